"""From the names of vLLM's layout to the live parameters of a running engine, and whether a source can fill them.

Names, shapes and storage are checked here, so that whoever writes may trust them. Which bytes to write is left to
plans, whether writing in place is right for a model to `proof`.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from megatron_bridge import compat
from megatron_bridge.execute import check_tensors
from megatron_bridge.layouts import VLLMLayout
from megatron_bridge.layouts.layout import EMBEDDING, HEAD, NORM, Layout


def bind(llm: Any, layout: VLLMLayout, rank: int) -> dict[str, Tensor]:
    """The engine's parameters of `rank`, by layout name, to be written in place.

    Args:
        llm: vLLM's `LLM` of this process.
        layout: what vLLM is expected to hold.
        rank: this process's rank in the layout.

    Raises:
        UserError: the engine lacks a parameter, has one that nothing fills, another shape, or has packed it.
    """
    live = compat.vllm_weights(llm)
    return check_tensors(layout, rank, {name: live[name] for name in live if is_used(name, layout, rank)})


def is_used(name: str, layout: VLLMLayout, rank: int) -> bool:
    """Whether a parameter is one of its pipeline stage: some models build embedding and head on every stage."""
    outer = name.startswith((EMBEDDING, NORM, HEAD))
    return layout.pp == 1 or not outer or name in layout.parameters(rank)


def missing_parts(source: Layout, rank: int, given: Iterable[str], target: Layout) -> list[str]:
    """What a rank lacks of its source layout, `given` the names that it has; empty if it can send all.

    Each is named with the engine's fused parameters that it would leave half written (cases.md A29).
    """
    have, faults = set(given), []
    homes: Mapping[str, list[str]] = {}
    for unit in source.units(rank):
        for param in source.params(unit.kind, source.shard(rank, unit.kind)):
            if unit.prefix + param.name not in have:
                homes = homes or _homes(target)
                fused = sorted({home for piece in param.pieces for home in homes[unit.canonical + piece.name]})
                faults += [f"{home} lacks its part {unit.prefix}{param.name}" for home in fused]
    return faults


def unfilled(layout: VLLMLayout, rank: int, loaded: Iterable[str]) -> list[str]:
    """The engine's parameters of a rank that its loader, which names those that it `loaded`, left as they were."""
    names = set(loaded)
    return [f"vLLM's loader took nothing for {name}" for name in layout.parameters(rank) if name not in names]


def _homes(target: Layout) -> Mapping[str, list[str]]:
    """Which of the engine's parameters hold (parts of) each canonical tensor: all ranks of a stage have the same."""
    homes: dict[str, list[str]] = defaultdict(list)
    for units, rank in {target.units(rank): rank for rank in target.ranks}.items():
        for unit in units:
            for param in target.params(unit.kind, target.shard(rank, unit.kind)):
                for piece in param.pieces:
                    homes[unit.canonical + piece.name].append(unit.prefix + param.name)
    return homes
