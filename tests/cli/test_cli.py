"""The command line: what is refused, with which exit code, and what reaches the job."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import rlflow
from rlflow import cli
from rlflow.config import Config
from rlflow.errors import UserError
from tests.config.examples import QWEN, ROOT, write_config

GONE = 2**22 + 1  # above the largest number that Linux gives a process


class FakeJob(ModuleType):
    """Stands in for rlflow.job: remembers what it is given and answers as told."""

    def __init__(self, code: int = 0, error: Exception | None = None) -> None:
        super().__init__("rlflow.job")
        self.code, self.error, self.seen = code, error, SimpleNamespace()

    def train(self, config: Config) -> int:
        return self._answer("train", config, [])

    def evaluate(self, config: Config) -> int:
        return self._answer("evaluate", config, [])

    def generate(self, config: Config, prompts: list[str]) -> int:
        return self._answer("generate", config, prompts)

    def _answer(self, command: str, config: Config, prompts: list[str]) -> int:
        self.seen = SimpleNamespace(command=command, config=config, prompts=prompts)
        if self.error is not None:
            raise self.error
        return self.code


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> FakeJob:
    fake = FakeJob()
    monkeypatch.setitem(sys.modules, "rlflow.job", fake)
    monkeypatch.setattr(rlflow, "job", fake, raising=False)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return fake


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(write_config(tmp_path))


def test_train_gives_the_checked_config_to_the_job(job: FakeJob, path: str) -> None:
    assert cli.main(["train", path, "optimizer.lr=1e-5", "trainer.steps=3"]) == 0
    assert job.seen.command == "train"
    assert (job.seen.config.optimizer.lr, job.seen.config.trainer.steps) == (1e-5, 3)


def test_verify_takes_no_data(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Config, bool]] = []
    fake = ModuleType("rlflow.verify")
    fake.verify = lambda config, parity: seen.append((config, parity)) or 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rlflow.verify", fake)
    monkeypatch.setattr(rlflow, "verify", fake, raising=False)
    command = ["verify", str(ROOT / "configs" / "tiny.yaml"), "--parity", "data.train=nowhere"]
    assert cli.main([*command, f"model.path={QWEN}", "actor.tensor_parallel_size=1"]) == 1
    assert [(config.model.path, parity) for config, parity in seen] == [(str(QWEN), True)]


def test_overrides_may_follow_options(job: FakeJob, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", path, "--world-size", "2", "trainer.prompts_per_step=6"]) == 0
    assert "6 prompts × 8 responses = 48 samples" in capsys.readouterr().out


@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_job_decides_the_exit_code(job: FakeJob, path: str, code: int) -> None:
    job.code = code
    assert cli.main(["eval", path]) == code
    assert job.seen.command == "evaluate"


def test_a_user_error_of_the_job_is_one_message(job: FakeJob, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    job.error = UserError("data.train", "3 prompts")
    assert cli.main(["train", path]) == 2
    assert capsys.readouterr().err == "error: data.train: 3 prompts\n"


def test_a_defect_of_the_job_keeps_its_traceback(job: FakeJob, path: str) -> None:
    job.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        cli.main(["train", path])


def test_bad_configuration_never_reaches_the_job(job: FakeJob, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", path, "trainer.lerning_rate=1e-6"]) == 2
    assert not vars(job.seen)
    assert "trainer.lerning_rate = 1e-6: unknown key; nearest: optimizer.lr" in capsys.readouterr().err


def test_under_torchrun_rank_0_reports_the_configuration_first(
    job: FakeJob, path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others give it time, in which torchrun ends them; one that has faults of its own still says so."""
    waits: list[float] = []
    monkeypatch.setattr(cli.time, "sleep", waits.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, starts, waited in (("0", "error: ", 0), ("1", "error on rank 1: ", 1)):
        monkeypatch.setenv("RANK", rank)
        assert cli.main(["train", path, "rollout.n=0"]) == 2
        message = capsys.readouterr().err
        assert message.startswith(starts + path)
        assert "rollout.n = 0: must be at least 1" in message
        assert len(waits) == waited


def test_the_world_size_of_torchrun_is_checked(
    job: FakeJob, path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert cli.main(["train", path, "rollout.tensor_parallel_size=2"]) == 2
    assert "3 ranks do not divide into vLLM replicas of 2" in capsys.readouterr().err


def test_generate_takes_a_model_or_a_config(job: FakeJob, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(QWEN)
    assert cli.main(["generate", "--model", model, "--prompt", "1 + 1 =", "--prompt", "hi"]) == 0
    assert (job.seen.config.model.path, job.seen.prompts) == (model, ["1 + 1 =", "hi"])
    assert cli.main(["generate", "--model", model, "rollout.n=3", "rollout.temperature=0.7", "--prompt", "hi"]) == 0
    assert (job.seen.config.rollout.n, job.seen.config.rollout.temperature) == (3, 0.7)
    assert cli.main(["generate", path, "rollout.temperature=0.5", "--prompt", "hi"]) == 0
    assert job.seen.config.rollout.temperature == 0.5
    assert cli.main(["generate", "--prompt", "hi"]) == 2
    assert "needs either CONFIG or --model" in capsys.readouterr().err


def test_generate_takes_lengths_that_fit_the_model(
    job: FakeJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """512 positions are less than the lengths by default, 512 tokens of a prompt and as many of a response."""
    small = json.loads((QWEN / "config.json").read_text()) | {"max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(small))
    command = ["generate", "--model", str(tmp_path), "--prompt", "hi"]

    def lengths() -> tuple[int, int]:
        return job.seen.config.rollout.max_prompt_length, job.seen.config.rollout.max_response_length

    assert cli.main(command) == 0
    assert lengths() == (256, 256)
    assert cli.main([*command, "rollout.max_response_length=100"]) == 0
    assert lengths() == (256, 100)
    assert cli.main([*command, "rollout.max_response_length=500"]) == 2
    assert "rollout.max_response_length = 500: with rollout.max_prompt_length = 256" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["train"], ["trian", "x"], ["check", "x", "--world-size", "0"], ["train", "x", "--what"]]
)
def test_wrong_arguments_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out == "rlflow 0.1.0\n"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)


def test_check_imports_neither_torch_nor_engines(path: str) -> None:
    heavy = "['torch', 'vllm', 'megatron.core', 'transformers']"
    code = f"import sys; from rlflow.cli import main; main(); print([m for m in {heavy} if m in sys.modules])"
    result = run("-c", code, "check", path, "--world-size", "2")
    assert result.stdout.splitlines()[-1] == "[]", result.stderr


def test_nproc_passes_exit_codes_through(path: str) -> None:
    """torchrun reports every failure as 1; a user's error found in the processes is still one of the whole."""
    code = "import sys; from rlflow.cli import launch; sys.exit(launch(2, ['check', *sys.argv[1:]]))"
    result = run("-c", code, path, "trainer.epochs=0")
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("trainer.epochs = 0") == 1


@pytest.mark.parametrize(
    "command",
    [
        ["train", "CONFIG", "trainer.steps=3"],
        ["eval", "CONFIG"],
        ["generate", "CONFIG", "rollout.n=2", "--prompt", "a b", "--prompt", "c"],
        ["generate", "--model", str(QWEN), "--prompt", "a"],
    ],
)
def test_nproc_starts_the_same_command(
    command: list[str], path: str, monkeypatch: pytest.MonkeyPatch, job: FakeJob
) -> None:
    command, started = [path if word == "CONFIG" else word for word in command], []
    monkeypatch.setattr(cli, "launch", lambda processes, words: started.append((processes, words)) or 7)
    assert cli.main([*command, "--nproc", "2"]) == 7
    assert started == [(2, command)]


def test_a_signal_ends_the_launcher_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(options: object) -> None:
        raise SignalException("got signal", signal.SIGINT)

    monkeypatch.setattr("torch.distributed.run.run", interrupted)
    assert cli.launch(2, ["check", "c.yaml"]) == 130
    assert capsys.readouterr().err == "ended by SIGINT\n"


def test_processes_that_a_signal_ended_are_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """cases.md G08: rank 1 killed for want of memory, rank 2 crashed, rank 0 failed for that, rank 3 told to end."""
    codes = {0: 1, 1: -signal.SIGKILL, 2: -signal.SIGSEGV, 3: -signal.SIGTERM}

    def failed(options: object) -> None:
        raise ChildFailedError("rlflow", {rank: ProcessFailure(rank, GONE, code, "") for rank, code in codes.items()})

    monkeypatch.setattr("torch.distributed.run.run", failed)
    assert cli.launch(4, ["train", "c.yaml"]) == 1
    killed, crashed = capsys.readouterr().err.splitlines()
    assert killed.startswith("rank 1 was killed (SIGKILL): ")
    assert "ran out of memory" in killed
    assert "rollout.kv_cache_gib" in killed
    assert crashed == "rank 2 was ended by SIGSEGV"


STUBBORN = """
import os, signal, subprocess, time
from pathlib import Path

ready = Path(__file__).with_suffix(".ready")
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as its child does
subprocess.Popen(["sleep", "60"])
if os.environ["RANK"] == "0":
    ready.touch()
    time.sleep(60)
while not ready.exists():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_outlives_a_killed_rank_for_long(tmp_path: Path, path: str) -> None:
    """cases.md G05: neither a rank that ignores SIGTERM, for which torchrun would wait 30 s, nor what ranks started."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    code = "import os, sys; os.environ['PYTHONPATH'] += ':' + sys.argv[1]; from rlflow.cli import launch; "
    code += "sys.exit(launch(2, ['check', *sys.argv[2:]]))"
    begin = time.monotonic()
    result = run(
        "-c", code, str(tmp_path), path, "rewards.0.function=stubborn:score"
    )  # which returns when nobody holds the output open
    assert time.monotonic() - begin < 20
    assert result.returncode == 1
    assert "rank 1 was killed (SIGKILL)" in result.stderr
    assert "rank 0 was" not in result.stderr  # not of itself


def test_nproc_checks_before_it_starts_anything(path: str, capsys: pytest.CaptureFixture[str], job: FakeJob) -> None:
    assert cli.main(["train", path, "--nproc", "3", "rollout.tensor_parallel_size=2"]) == 2
    assert "3 ranks" in capsys.readouterr().err


def test_nproc_under_torchrun_is_refused(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], job: FakeJob
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", path, "--nproc", "2"]) == 2
    assert "--nproc" in capsys.readouterr().err


def test_data_file_without_the_column_is_found_before_any_model(tmp_path: Path) -> None:
    path, data = write_config(tmp_path), tmp_path / "train.jsonl"
    data.write_text(json.dumps({"prompt": "1", "solution": 1}) + "\n")
    result = run("-m", "rlflow", "check", str(path))
    assert result.returncode == 2
    # cases.md D03: file, missing column, columns present and the key that selects it
    assert f"data.answer_key = answer: no such column in {data}, which has prompt, solution" in result.stderr
