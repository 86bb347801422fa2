"""A failing rank is named once and ends the job; the exit code tells a mistake from a defect."""

import os
import subprocess
import sys
from pathlib import Path

PATHS = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(PATHS)}
SCRIPT = """
import os
import torch.distributed as dist
from rlflow import parallel
from rlflow.errors import UserError

parallel.initialize(60, 0)
with parallel.reporting(lambda: "save"):
    if dist.get_rank() == 1:
        {failure}
    dist.barrier()
"""


def run_two(folder: Path, failure: str) -> subprocess.CompletedProcess[str]:
    script = folder / "job.py"
    script.write_text(SCRIPT.format(failure=failure))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=ENVIRONMENT)


def test_one_failing_rank_ends_all(tmp_path: Path) -> None:  # cases.md G05
    done = run_two(tmp_path, 'raise ValueError("disk full")')
    assert done.returncode != 0
    assert done.stderr.count("rank 1 failed in phase 'save': ValueError: disk full") == 1
    assert "rank 0 failed" not in done.stderr


def test_a_users_mistake_is_told_without_a_traceback(tmp_path: Path) -> None:
    done = run_two(tmp_path, 'raise UserError("trainer.output_dir", "not writable")')
    assert done.stderr.count("error: trainer.output_dir: not writable") == 1
    assert "exitcode  : 2" in done.stderr
