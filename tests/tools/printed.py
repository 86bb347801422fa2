"""What a part of the GPU suite has printed, for the tests of parts."""

import pytest

from tools.gpu.report import Measurement, read


def measurements(capsys: pytest.CaptureFixture[str]) -> dict[str, Measurement]:
    """All since the last look at the output, by name."""
    return {one.what: one for one in read(capsys.readouterr().out.splitlines())}
