"""The kernels of a layer in Triton's interpreter; on a GPU, `tests/gpu/test_kernels.py` runs them themselves."""

import sys
import types
from pathlib import Path

import torch

import rlflow
from tests.interpreter import interpret


def check_kernels() -> None:
    """Only in float32: the interpreter truncates where a GPU rounds to bfloat16."""
    package = types.ModuleType("rlflow.models")  # the kernels need none of the package's other modules, nor megatron
    package.__path__ = [str(Path(rlflow.__file__).parent / "models")]
    sys.modules["rlflow.models"] = package
    from tests.models.kernel_checks import check_all

    torch.manual_seed(0)
    check_all(torch.float32, "cpu")


def test_the_kernels_in_the_interpreter() -> None:
    interpret(check_kernels)
