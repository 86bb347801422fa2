"""Ranks as users write them: `all`, a list, a range such as `0-3`, or whole nodes such as `node 0` and `nodes 0-1`.

The written forms become lists before anything is checked, so that nothing else knows of them or of nodes.
"""

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, overload

from megatron_bridge.layouts.grid import LARGEST_WORLD
from rlflow.config.convert import Mismatch, Text, plain
from rlflow.config.faults import Fault, as_written
from rlflow.config.schema import Ranks

FORM = re.compile(r"(?P<nodes>nodes?\s+)?(?P<numbers>\d+(-\d+)?(\s*,\s*\d+(-\d+)?)*)")
RULE = "must be all, a list such as [0, 1], a range such as 0-3, or nodes such as node 0 and nodes 0-1"


@overload
def rank_list(ranks: Ranks, world_size: int) -> tuple[int, ...]: ...
@overload
def rank_list(ranks: Ranks, world_size: int | None) -> tuple[int, ...] | None: ...
def rank_list(ranks: Ranks, world_size: int | None) -> tuple[int, ...] | None:
    """The ranks that a role names; None where `all` of an unknown number."""
    if ranks == "all":
        return None if world_size is None else tuple(range(world_size))
    return ranks


def ranks_on_node() -> int | None:
    """How many ranks torchrun has started on each node; None outside of it."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(given) if given.isdecimal() else None


def written_out(tree: dict[str, Any], ranks_per_node: int | None, faults: list[Fault]) -> dict[str, Any]:
    """The sections of a file with every range and every node in a `ranks` key as a list; what cannot be read is `all`.

    `ranks_per_node` is what nodes are counted by: rank r is on node r // ranks_per_node.
    """
    return {name: _in_section(name, section, ranks_per_node, faults) for name, section in tree.items()}


def written_short(tree: dict[str, Any]) -> dict[str, Any]:
    """The sections of a configuration with lists of ranks as ranges, which `written_out` reads back."""
    lists = {
        name: section["ranks"] for name, section in tree.items() if isinstance(section, dict) and "ranks" in section
    }
    short = {name: in_short(ranks) for name, ranks in lists.items() if ranks != "all" and _is_ascending(ranks)}
    return tree | {name: {**tree[name], "ranks": ranks} for name, ranks in short.items()}


def expand(text: str, ranks_per_node: int | None) -> list[int]:
    """The ranks that a text other than `all` stands for; raises Mismatch."""
    form = FORM.fullmatch(text.strip())
    if form is None:
        raise Mismatch(RULE, "all")
    numbers = list(_numbers(form["numbers"]))
    if not form["nodes"]:
        return numbers
    if ranks_per_node is None:
        raise Mismatch("how many ranks a node has is unknown here: write the ranks, or say it by --ranks-per-node")
    return [node * ranks_per_node + place for node in numbers for place in range(ranks_per_node)]


def in_short(ranks: Sequence[int], separator: str = ",") -> str:
    """Ascending ranks as text that `expand` reads back, runs of them as ranges."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return separator.join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _is_ascending(ranks: Sequence[int]) -> bool:
    return len(ranks) > 0 and list(ranks) == sorted(set(ranks)) and 0 <= ranks[0] <= ranks[-1] < LARGEST_WORLD


def _numbers(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if int(last or first) >= LARGEST_WORLD:
            raise Mismatch(f"no job has more than {LARGEST_WORLD} ranks")
        if dash and int(last) < int(first):
            raise Mismatch("a range goes from the smaller number to the larger", f"{last}-{first}")
        yield from range(int(first), int(last or first) + 1)


def _in_section(name: str, section: Any, ranks_per_node: int | None, faults: list[Fault]) -> Any:
    if not isinstance(section, dict) or "ranks" not in section:
        return section
    ranks = section["ranks"]
    try:
        return {**section, "ranks": _listed(ranks, ranks_per_node)}
    except Mismatch as mismatch:
        faults.append(Fault(f"{name}.ranks", as_written(ranks), mismatch.args[0], mismatch.nearest))
        return {**section, "ranks": "all"}


def _listed(ranks: Any, ranks_per_node: int | None) -> list[int] | str:
    """`all`, or the ranks that a value of any form stands for; raises Mismatch."""
    ranks = plain(Text(ranks) if isinstance(ranks, str) else ranks)
    if ranks == "all":
        return ranks
    items = ranks if isinstance(ranks, list) else [ranks]
    if any(isinstance(item, bool) or not isinstance(item, int | str) for item in items):
        raise Mismatch(RULE, "all")
    if all(isinstance(item, int) for item in items):
        return items
    return expand(", ".join(map(str, items)), ranks_per_node)
