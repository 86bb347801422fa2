"""What end-to-end tests need: a small task, rewards with faults built in, and the command as a user starts it.

`succeed` starts the command anew, with torchrun and all imports; `run_in` has it run by the processes of a `World`,
which have imported everything and take a tenth of the time. The command looks at the rewards here before it imports
torch; so this module must not either.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.workers import World

ROOT = Path(__file__).parent.parent


def fraction_of_digits(response: str, answer: Any, *, row: dict[str, Any]) -> float:
    """A reward that a random model can climb: how much of the text is digits."""
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)


def fail_on_rank_one(response: str, answer: Any, *, row: dict[str, Any]) -> float:
    """A mistake in a user's program that only one rank makes; it tells of the process groups that the rank has."""
    if os.environ["RANK"] == "1":
        timeouts = group_timeouts()
        raise SystemExit(f"the judge is unwell: {len(timeouts)} groups, timeouts {sorted(set(timeouts))}")
    return 0.0


def group_timeouts() -> list[float]:
    """Seconds after which collectives give up, of every group of this rank that torch knows of."""
    import torch
    from torch.distributed.distributed_c10d import _world

    backends = [group._get_backend(torch.device("cpu")) for group in _world.pg_map]
    return [backend.options._timeout.total_seconds() for backend in backends]


def write_rows(path: Path, count: int) -> Path:
    rows = [{"prompt": f"{number} plus {number + 1} =", "answer": 2 * number + 1} for number in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def configuration(folder: Path, model: Path, **sections: dict[str, Any]) -> Path:
    """A configuration file of a small run into `folder`/run; `sections` go over its defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32"},
        "actor": {"micro_batch_tokens": 256},
        "optimizer": {"lr": 1e-3},
        "rollout": {"n": 4, "max_prompt_length": 48, "max_response_length": 12, "kv_cache_gib": 0.1},
        "data": {
            "train": str(write_rows(folder / "train.jsonl", 40)),
            "evaluation": str(write_rows(folder / "held_out.jsonl", 5)),
        },
        "rewards": [{"function": "tests.end_to_end:fraction_of_digits", "name": "digits"}],
        "trainer": {"steps": 2, "prompts_per_step": 6, "output_dir": str(folder / "run")},
    }
    for name, values in sections.items():
        config[name] = values if isinstance(values, list) else {**config.get(name, {}), **values}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def rlflow(*arguments: str | Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run the command in the root of the checkout."""
    command = [sys.executable, "-m", "rlflow", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        command, cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=timeout
    )


def succeed(*arguments: str | Path) -> str:
    """Run the command, which must end with 0; returns its output."""
    done = rlflow(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_in(world: World, ranks: int, *arguments: str | Path) -> str:
    """Run the command on `ranks` processes of `world` as torchrun would; it must end with 0. Returns all output."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return "".join(world(ranks, _run, store.port, [str(word) for word in arguments]))


def _run(port: int, arguments: list[str]) -> str:
    """What this rank prints. The command makes its own default group, with its own timeout, in place of the world's."""
    import torch.distributed as dist

    from rlflow.cli import main

    dist.barrier()
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(arguments)
    assert code == 0, printed.getvalue()
    return printed.getvalue()


def records(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
