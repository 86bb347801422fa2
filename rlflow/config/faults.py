"""What is wrong in a configuration, collected so that everything is reported at once."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.errors import UserError


@dataclass(frozen=True)
class Fault:
    """One broken rule: the key and its value, what the rule demands, and the nearest key or value that would do."""

    key: str
    value: Any
    rule: str
    nearest: str | None = None
    also: tuple[str, ...] = ()  # other keys that the rule reads

    def __str__(self) -> str:
        given = "" if self.value is None else f" = {as_written(self.value)}"
        return f"{self.key}{given}: {self.rule}" + (f"; nearest: {self.nearest}" if self.nearest else "")


def as_written(value: Any) -> Any:
    """`value` as a file has it: true, null, [0, 1]."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return list(value) if isinstance(value, tuple) else value


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice that is spelled most like `word`, None where nothing is similar."""
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def independent(faults: Iterable[Fault], earlier: Iterable[Fault]) -> list[Fault]:
    """The `faults` of rules that read no key, nor section, which an `earlier` fault has shown to be wrong by itself."""
    wrong = {fault.key for fault in earlier}
    return [fault for fault in faults if not any(_within(key, wrong) for key in (fault.key, *fault.also))]


def _within(key: str, wrong: set[str]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:end]) in wrong for end in range(1, len(parts) + 1))


def refuse(source: str, faults: Sequence[Fault]) -> None:
    """Raise one UserError that lists all `faults` found in `source`; return where there are none."""
    if faults:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise UserError(source, "\n  ".join([count, *map(str, faults)]))
