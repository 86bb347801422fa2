"""The resharding benchmark on two real processes and in one, on a model of two layers."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def bench(*arguments: str) -> list[dict]:
    command = [sys.executable, "-m", "tools.bench_reshard", "--layers", "2", "--repeat", "1", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_line_for_each_pair_with_both_ways_checked() -> None:
    sharded, equal = bench("--train", "pp=2", "tp=2", "--rollout", "tp=2", "tp=2", "--dtype", "fp32")
    assert sharded["bitwise"]
    assert equal["bitwise"]
    weights = 2 * (2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1536 + 512 + 2 * 256 + 2 * 512) + 512 + 2 * 8192 * 512
    assert sharded["model_bytes"] == 4 * weights
    assert sharded["received_bytes"] + sharded["local_bytes"] >= 4 * weights / 2
    assert (equal["received_bytes"], equal["rounds"], equal["extra_bytes"]) == (0, 0, 0)
    assert sharded["extra_bytes"] < 4.1 * sharded["received_bytes"]
    assert sharded["seconds"] > 0 < sharded["gather_to_bridge"]


def test_local_copies_that_cast() -> None:
    (found,) = bench("--local", "--train-dtype", "fp32")
    assert found["bitwise"]
    assert found["local_bytes"] > 2**24
