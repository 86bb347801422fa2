"""Who waits for whom: what ranks say of themselves, compared. Pure; `watchdog` collects and acts.

A rank waits where nothing of it moves, neither its phase, nor the line that it executes, nor its count of collectives.
It waits for the ranks that are in an earlier phase, or have begun fewer collectives of a group that both are in. Ranks
that work long are never still, and ranks in the same place wait for nobody.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from rlflow.config.ranks import in_short

SHOWN = 8  # ranks that did not arrive that are described one by one


@dataclass(frozen=True)
class Sign:
    """What a rank says of itself. Times are seconds since the watchdogs started, which all do together."""

    rank: int
    told: float
    "when it said so"
    number: int
    "phases entered and left so far, parts of phases not counted"
    phase: str
    since: float
    "when the phase began"
    still: float
    "since when nothing of it has moved"
    place: str = ""
    "what its main thread executes"
    collectives: Mapping[str, int] = field(default_factory=dict)
    "how many it has begun in each of its groups"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Sign:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Stall:
    """Ranks that wait, and those that they wait for."""

    waiting: tuple[Sign, ...]
    absent: tuple[Sign, ...]
    seconds: float
    "of the rank that has waited longest"

    @property
    def key(self) -> str:
        """The same for one stall at any time."""
        return ",".join(f"{sign.rank}@{sign.number}" for sign in self.absent)


def find_stall(signs: Iterable[Sign], now: float, patience: float) -> Stall | None:
    """The stall in which some rank has waited `patience` seconds; None where there is none.

    A rank that waits itself is not named as one that is waited for, unless ranks wait in a circle.
    """
    signs = sorted(signs, key=lambda sign: sign.rank)
    waiting = [sign for sign in signs if now - sign.still >= patience and any(_behind(other, sign) for other in signs)]
    if not waiting:
        return None
    absent = [sign for sign in signs if any(_behind(sign, other) for other in waiting)]
    first = [sign for sign in absent if sign not in waiting] or absent
    return Stall(tuple(waiting), tuple(first), now - min(sign.still for sign in waiting))


def _behind(sign: Sign, other: Sign) -> bool:
    if sign.number != other.number:
        return sign.number < other.number
    common = sign.collectives.keys() & other.collectives.keys()
    return any(sign.collectives[group] < other.collectives[group] for group in common)


def describe(stall: Stall, now: float, silence: float) -> str:
    """The stall in words, a line for each rank that did not arrive; one that was silent for `silence` s is said so."""
    waiting, absent = ([sign.rank for sign in signs] for signs in (stall.waiting, stall.absent))
    phase = max(stall.waiting, key=lambda sign: sign.number).phase
    lines = [
        f"{_name(waiting)} waited {stall.seconds:.0f} s in phase '{phase}' for {_name(absent)}",
        *(f"  {_describe_absent(sign, now, silence)}" for sign in stall.absent[:SHOWN]),
    ]
    if len(absent) > SHOWN:
        lines.append(f"  and {len(absent) - SHOWN} more")
    return "\n".join(lines)


def _describe_absent(sign: Sign, now: float, silence: float) -> str:
    text = f"rank {sign.rank} did not arrive: in phase '{sign.phase}' for {now - sign.since:.0f} s"
    if sign.place:
        text += f", at {sign.place}"
    if now - sign.told > silence:
        text += f"; its process gave no sign for {now - sign.told:.0f} s: it is stopped or gone"
    return text


def _name(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 4-7`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {in_short(ranks, ', ')}"
