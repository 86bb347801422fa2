"""The launch scripts: what they refuse, which ports they choose and what they run; python and srun are stand-ins."""

import socket
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN, SLURM, ARRAY = (f"launch/{name}" for name in ("torchrun.sh", "slurm.sbatch", "slurm_array.sbatch"))
Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Script:
    """`run(script, *arguments, **environment)`: `python` and `srun` print their arguments, scontrol knows one node."""
    stand_ins = {
        "python": 'echo "python $*"',
        "srun": 'echo "srun $*"',
        "scontrol": 'if [ "$2" = hostnames ]; then echo n7; else echo "  NodeAddr=10.0.0.7 NodeHostName=n7"; fi',
        "nvidia-smi": "exit 1",
    }
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, body in stand_ins.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "activate").write_text("unset_is_fine=$NOT_SET\n")

    def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{programs}:/usr/bin:/bin", "ACTIVATE": str(tmp_path / "activate"), **environment}
        command = ["/bin/bash", script, *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=30)

    return run


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The message of a script that ended with the exit code of a user's error."""
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


def port(done: subprocess.CompletedProcess[str]) -> int:
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()[-1].split()
    return int(words[words.index("--master-port") + 1])


TWO_NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "JOB_ID": "17"}
SLURM_JOB = {"SLURM_JOB_ID": "40017", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[7-8]"}
ARRAY_TASK = {**SLURM_JOB, "SLURM_ARRAY_JOB_ID": "40017", "SLURM_ARRAY_TASK_ID": "1"}


def test_torchrun_without_a_config_shows_how_it_is_used(run: Script) -> None:
    assert "NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 JOB_ID=17 bash launch/torchrun.sh" in refused(run(TORCHRUN))


def test_quickstart_refuses_a_wrong_word_before_it_installs(run: Script) -> None:
    assert "--tyny is neither" in refused(run("launch/quickstart.sh", "--tyny"))
    assert "trainer.seed is neither" in refused(run("launch/quickstart.sh", "--tiny", "trainer.seed"))


def test_one_node_leaves_the_port_to_the_launcher(run: Script) -> None:
    """cases.md G02: single node, a free port."""
    done = run(TORCHRUN, "c.yaml", "trainer.seed=1", NPROC_PER_NODE="2")
    assert done.stdout == "python -m rlflow train --nproc 2 c.yaml trainer.seed=1\n"


def test_without_gpus_a_node_has_one_process(run: Script) -> None:
    assert "--nproc 1 " in run(TORCHRUN, "c.yaml").stdout


@pytest.mark.parametrize("missing", ["NODE_RANK", "MASTER_ADDR", "JOB_ID"])
def test_several_nodes_need_to_know_each_other(run: Script, missing: str) -> None:
    environment = {name: value for name, value in TWO_NODES.items() if name != missing}
    assert missing in refused(run(TORCHRUN, "c.yaml", **environment))


@pytest.mark.parametrize("variable", ["NNODES", "NPROC_PER_NODE", "NODE_RANK"])
def test_numbers_must_be_numbers(run: Script, variable: str) -> None:
    message = refused(run(TORCHRUN, "c.yaml", **{**TWO_NODES, variable: "two"}))
    assert message.startswith(f"error: {variable} must be ")
    assert message.endswith("not two\n")


def test_python_must_be_there(run: Script) -> None:
    assert "activate the environment" in refused(run(TORCHRUN, "c.yaml", PATH="/nowhere", BASH_ENV=""))


def test_ports_are_equal_on_all_nodes_and_differ_between_jobs(run: Script) -> None:
    """cases.md G02: from the job's number, below Linux's ports for outgoing connections (32768 and up)."""
    jobs = ("17", "17", "18", "12016", "0099")
    ports = [port(run(TORCHRUN, "c.yaml", **{**TWO_NODES, "JOB_ID": job})) for job in jobs]
    assert ports == [20017, 20017, 20018, 20016, 20099]
    assert port(run(TORCHRUN, "c.yaml", **TWO_NODES, MASTER_PORT="4711")) == 4711


def test_a_port_that_is_taken_is_refused(run: Script) -> None:
    """cases.md G02: one port already bound."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        taken = str(listener.getsockname()[1])
        message = refused(run(TORCHRUN, "c.yaml", **{**TWO_NODES, "NODE_RANK": "0"}, MASTER_PORT=taken))
        assert f"port {taken} of 127.0.0.1 is taken" in message
        assert port(run(TORCHRUN, "c.yaml", **TWO_NODES, MASTER_PORT=taken)) == int(taken)  # node 1 joins node 0 there


def test_slurm_starts_an_agent_a_node_at_the_first_nodes_address(run: Script, tmp_path: Path) -> None:
    (tmp_path / "programs" / "srun").write_text('#!/bin/bash\necho "$MASTER_ADDR $NNODES $JOB_ID $NPROC_PER_NODE|$*"\n')
    done = run(SLURM, "c.yaml", "trainer.seed=1", **SLURM_JOB, SLURM_GPUS_ON_NODE="8")
    variables, _, command = done.stdout.partition("|")
    assert variables == "10.0.0.7 2 40017 8", done.stderr
    assert command.startswith("--nodes=2 --ntasks=2 --ntasks-per-node=1 ")
    assert "--kill-on-bad-exit=1" in command
    assert command.endswith("rlflow c.yaml trainer.seed=1\n")


def test_slurm_ends_with_the_code_of_a_users_error_before_any_node_starts(run: Script, tmp_path: Path) -> None:
    (tmp_path / "programs" / "python").write_text("#!/bin/bash\necho error: a fault >&2\nexit 2\n")
    assert refused(run(SLURM, "c.yaml", **SLURM_JOB)) == "error: a fault\n"


def test_slurm_says_what_is_missing(run: Script) -> None:
    assert "usage: sbatch" in refused(run(SLURM, **SLURM_JOB))
    assert "submit this script with sbatch" in refused(run(SLURM, "c.yaml"))
    assert "there is no /nowhere" in refused(run(SLURM, "c.yaml", **SLURM_JOB, ACTIVATE="/nowhere"))


@pytest.fixture
def points(tmp_path: Path) -> str:
    file = tmp_path / "points.txt"
    file.write_text("# two points\noptimizer.lr=1e-6\n\n  optimizer.lr=1e-5  data.prompt_key=a*  \n")
    return str(file)


def test_a_task_trains_its_line_in_its_own_folder(run: Script, points: str, tmp_path: Path) -> None:
    done = run(ARRAY, "c.yaml", points, "trainer.steps=3", **ARRAY_TASK, SWEEP=str(tmp_path / "sweep"))
    folder = tmp_path / "sweep" / "point-1"
    overrides = f"c.yaml trainer.steps=3 optimizer.lr=1e-5 data.prompt_key=a* trainer.output_dir={folder}\n"
    assert done.stdout.endswith(overrides), done.stderr
    assert (folder / "point.txt").read_text().split() == ["optimizer.lr=1e-5", "data.prompt_key=a*"]


def test_array_says_what_is_missing(run: Script, points: str) -> None:
    assert "usage: sbatch --array" in refused(run(ARRAY, "c.yaml", **ARRAY_TASK))
    assert "--array=0-N" in refused(run(ARRAY, "c.yaml", points, **SLURM_JOB))
    assert "/nowhere: no such file" in refused(run(ARRAY, "c.yaml", "/nowhere", **ARRAY_TASK))
    message = refused(run(ARRAY, "c.yaml", points, **{**ARRAY_TASK, "SLURM_ARRAY_TASK_ID": "2"}))
    assert "has 2 points, counted from 0: there is none for task 2" in message
