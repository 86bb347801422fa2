"""Kernels in Triton's interpreter, on a CPU. Triton looks for it when it is imported: so in a process of their own."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch


def interpret(check: Callable[[], None]) -> None:
    """Call `check`, a public function of an importable module, in a new process; it fails where the process does.

    The test is skipped where there is nothing to interpret, and on a stack with CUDA.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if torch.version.cuda is not None:
        pytest.skip("tests/gpu runs the kernels themselves")
    program = f"from {check.__module__} import {check.__name__}; {check.__name__}()"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
