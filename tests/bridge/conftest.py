"""What tests of the bridge's commands share."""

from collections.abc import Callable
from typing import Any

import pytest

from megatron_bridge.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`run("import", "--hf", source, …)`: what the command prints; `code` is the exit code that is expected."""

    def call(*words: Any, code: int = 0) -> str:
        assert main([str(word) for word in words]) == code
        out, error = capsys.readouterr()
        assert bool(error) == (code > 1)
        return error if code > 1 else out

    return call
