"""From the names of vLLM's layout to the live parameters of a running engine, and whether a source can fill them.

Names, shapes and storage are checked here, so that whoever writes may trust them. Which bytes to write is left to
plans, whether writing in place is right for a model to `proof`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from megatron_bridge import compat
from megatron_bridge.errors import UserError
from megatron_bridge.execute import check_tensors
from megatron_bridge.layouts.layout import Layout

FAULTS_SHOWN = 8


def bind(llm: Any, layout: Layout, rank: int) -> dict[str, Tensor]:
    """The engine's parameters of `rank`, by layout name, to be written in place.

    Args:
        llm: vLLM's `LLM` of this process.
        layout: what vLLM is expected to hold.
        rank: this process's rank in the layout.

    Raises:
        UserError: the engine lacks a parameter, has one that nothing fills, another shape, or has packed it.
    """
    live = {name: parameter.detach() for name, parameter in compat.vllm_model(llm).named_parameters()}
    return check_tensors(layout, rank, live)


def require_complete(source: Layout, rank: int, given: Iterable[str], target: Layout) -> None:
    """UserError if a rank lacks parameters of its source layout, naming the engine's fused parameters that they leave
    half written (cases.md A29). ``given`` are the names that it has."""
    have = set(given)
    fused = _homes(target)
    faults = []
    for unit in source.units(rank):
        for param in source.params(unit.kind, source.shard(rank, unit.kind)):
            if unit.prefix + param.name not in have:
                homes = sorted({home for piece in param.pieces for home in fused[unit.canonical + piece.name]})
                faults += [f"{home} lacks its part {unit.prefix}{param.name}" for home in homes]
    if faults:
        more = f"; and {len(faults) - FAULTS_SHOWN} more" if len(faults) > FAULTS_SHOWN else ""
        raise UserError(f"weights of rank {rank}", "; ".join(faults[:FAULTS_SHOWN]) + more)


def _homes(target: Layout) -> Mapping[str, list[str]]:
    """Which of the engine's parameters hold (parts of) each canonical tensor, on its first rank: all hold the same."""
    homes: dict[str, list[str]] = defaultdict(list)
    rank = target.ranks[0]
    for unit in target.units(rank):
        for param in target.params(unit.kind, target.shard(rank, unit.kind)):
            for piece in param.pieces:
                homes[unit.canonical + piece.name].append(unit.prefix + param.name)
    return homes
