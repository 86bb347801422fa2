"""The kernels of a layer in Triton's interpreter; on a GPU, `tests/gpu/test_kernels.py` runs them themselves."""

import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import rlflow

HERE = __name__


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.version.cuda is not None, reason="tests/gpu runs the kernels themselves")
def test_the_kernels_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-m", HERE], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def _interpret() -> None:
    """Only in float32: the interpreter truncates where a GPU rounds to bfloat16."""
    package = types.ModuleType("rlflow.models")  # the kernels need none of the package's other modules, nor megatron
    package.__path__ = [str(Path(rlflow.__file__).parent / "models")]
    sys.modules["rlflow.models"] = package
    from tests.models.kernel_checks import check_all

    torch.manual_seed(0)
    check_all(torch.float32, "cpu")


if __name__ == "__main__":
    _interpret()
