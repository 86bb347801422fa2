"""Jobs of several nodes on this machine: agents that meet over loopback, and a real two-node Slurm."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end import ROOT, configuration, records
from tests.launch.slurm_cluster import Cluster, missing_programs

ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}
STEP_LINE = re.compile(r"^step 1/1 reward ", re.MULTILINE)


def short_run(folder: Path, model: Path, ranks: int) -> Path:
    """A configuration of one step on a tiny model, tensor parallel over the ranks."""
    return configuration(
        folder, model, actor={"tensor_parallel_size": ranks}, evaluation={"at_start": False},
        tracking={"tensorboard": False}, trainer={"steps": 1, "export": False},
    )  # fmt: skip


def test_two_agents_meet_over_loopback(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    config = short_run(tmp_path, tiny_model("qwen2"), ranks=2)
    nodes = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "JOB_ID": str(os.getpid())}
    agents = [
        subprocess.Popen(
            ["bash", "launch/torchrun.sh", str(config)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**ENVIRONMENT, **nodes, "NODE_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    (out_0, err_0), (out_1, err_1) = [agent.communicate(timeout=240) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], err_0 + err_1
    assert STEP_LINE.search(out_0)  # the ranks are numbered by NODE_RANK: rank 0, which shows the run, is on node 0
    assert out_1 == ""
    assert "Warning" not in err_0 + err_1
    assert [record["step"] for record in records(tmp_path / "run")] == [1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if missing := missing_programs():
        pytest.skip(f"no Slurm on this machine ({', '.join(missing)} missing): apt-get install slurm-wlm munge")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Callable[..., str]:
    """`submit(script, *arguments, options=[...], **environment)`: the number of the job, whose logs are in tmp_path."""
    activate = tmp_path / "activate"
    activate.write_text(f"export PATH={Path(sys.executable).parent}:$PATH OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1\n")

    def submit(script: str, *arguments: str | Path, options: tuple[str, ...] = (), **environment: str) -> str:
        where = [f"--chdir={ROOT}", f"--output={tmp_path}/%x.%a.log"]
        command = ["sbatch", "--parsable", *where, *options, f"{ROOT}/launch/{script}", *map(str, arguments)]
        # A node of a cluster need not know what the user's shell knows.
        bare = {"PATH": "/usr/bin:/bin", "ACTIVATE": str(activate)}
        return cluster.command(*command, **bare, **environment).strip()

    return submit


def log(folder: Path, pattern: str = "rlflow.*.log") -> str:
    return "\n".join(path.read_text() for path in folder.glob(pattern))


def test_slurm_trains_on_two_nodes(
    cluster: Cluster, submit: Callable[..., str], tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    job = cluster.wait_for(submit("slurm.sbatch", short_run(tmp_path, tiny_model("qwen2"), ranks=2)))
    assert (job["JobState"], job["ExitCode"], job["NumNodes"]) == ("COMPLETED", "0:0", "2"), log(tmp_path)
    assert STEP_LINE.search(log(tmp_path))
    assert [record["step"] for record in records(tmp_path / "run")] == [1]


def test_each_task_of_a_slurm_array_takes_its_point_to_its_folder(
    cluster: Cluster, submit: Callable[..., str], tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    """The first point trains; the second is a user's error, which ends its own task alone."""
    config, points = short_run(tmp_path, tiny_model("qwen2"), ranks=1), tmp_path / "points.txt"
    points.write_text("optimizer.lr=1e-4\noptimizer.lr=-1\n")
    array = submit("slurm_array.sbatch", config, points, options=("--array=0-1",), SWEEP=str(tmp_path / "sweep"))
    for task, ended in enumerate((("COMPLETED", "0:0"), ("FAILED", "2:0"))):
        job = cluster.wait_for(f"{array}_{task}")
        assert (job["JobState"], job["ExitCode"]) == ended, log(tmp_path, "*.log")
    assert [record["actor/lr"] for record in records(tmp_path / "sweep/point-0")] == [1e-4]
    assert "optimizer.lr = -1" in log(tmp_path, "*.1.log")
    assert (tmp_path / "sweep/point-1/point.txt").read_text() == "optimizer.lr=-1\n"


def test_a_users_error_is_the_jobs_exit_code(
    cluster: Cluster, submit: Callable[..., str], tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    config = configuration(tmp_path, tiny_model("qwen2"))
    job = cluster.wait_for(submit("slurm.sbatch", config, "trainer.stps=1"))
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", "2:0")
    assert log(tmp_path).count("trainer.stps") == 1


def test_one_failing_node_ends_the_job(
    cluster: Cluster, submit: Callable[..., str], tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    """cases.md G05 at the level of nodes: node 1 fails alone, while node 0 waits for its ranks."""
    config, faulty = configuration(tmp_path, tiny_model("qwen2")), tmp_path / "every_shell"
    faulty.write_text('[ "${SLURM_NODEID:-}" != 1 ] || exit 7\n')
    job = cluster.wait_for(submit("slurm.sbatch", config, BASH_ENV=str(faulty)), seconds=60)
    assert job["JobState"] == "FAILED"
    assert job["ExitCode"] != "0:0"
