"""What a part of the suite says of one measurement: a JSON line, a row of the table that `tools.gpu_suite` prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

GIB = 2**30
"""Bytes of a "GiB"."""


@dataclass(frozen=True)
class Measurement:
    """One number with what it is held against.

    `target` is what is wanted, `bound` what the hardware or the peer does at best in the same run, both in `unit`;
    `more_is_better` tells in which direction a target is missed. `details` are further numbers of the same run.
    """

    section: str  # of the suite: "training", "rollout", …
    what: str  # "MFU 0.5b te graphs"
    value: float
    unit: str  # "s", "TB/s", "tokens/s", "GiB", "" for a ratio
    target: float | None = None
    bound: float | None = None
    against: str = ""  # what the bound is
    more_is_better: bool = True
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def meets_target(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.more_is_better else self.value <= self.target


def emit(section: str, what: str, value: float, unit: str = "", **rest: Any) -> None:
    """Print a measurement on a line of its own; `rest` are the other fields of `Measurement`."""
    line = json.dumps(asdict(Measurement(section, what, value, unit, **rest)))
    sys.stdout.write(line + "\n")  # as one: `print` writes the end of a line apart, and threads measure side by side
    sys.stdout.flush()


def read(lines: Iterable[str]) -> list[Measurement]:
    """The measurements among the lines that a part printed; all other lines are its log.

    So is the last line of a part that was ended while it wrote, and a line that processes wrote into each other's.
    """
    found = []
    for line in lines:
        if line.startswith('{"section": ') and line.endswith("}}"):  # the last field is a mapping
            with suppress(ValueError, TypeError):
                found.append(Measurement(**json.loads(line)))
    return found
