"""Score models out of language models: the same weights but the head, and a new head of one output.

A checkpoint that has a score head is loaded like any other; nothing is made up where `load_weights` is called.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megatron_bridge.checkpoints import open_source
from megatron_bridge.errors import UserError
from megatron_bridge.execute import Traffic, connect
from megatron_bridge.families import Architecture, load_architecture
from megatron_bridge.layouts import Layout
from megatron_bridge.layouts.layout import SCORE, canonical_units
from megatron_bridge.layouts.part import Part, one_unit


def with_score_head(arch: Architecture) -> Architecture:
    """The architecture with a head of one output in the place of its own."""
    return replace(arch, head="score")


def load_language_model(
    folder: str | Path,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    *,
    rank: int,
    head: Literal["zero", "random"],
    seed: int = 0,
) -> Traffic:
    """Fill a score model's tensors from the folder of a language model, and make its head.

    A `random` head is normal with a standard deviation of 1 / √hidden, from `seed` and so the same on every rank.
    Raises UserError where the folder is that of a score model, or for what `load_weights` refuses.
    """
    if load_architecture(folder).head == "score":
        raise UserError(folder, "this model has a score head already: load it with `load_weights`")
    source, held = open_source(folder, replace(layout.arch, head="lm"), layout.ranks)
    body = frozenset(unit.canonical for unit in canonical_units(layout.arch)) - {SCORE}
    alike = replace(source, arch=layout.arch)  # type: ignore[type-var]  # the plan asks for one architecture
    here, there = Part(alike, body), Part(layout, body)
    traffic = connect(
        here,
        {name: held[name] for name in here.parameters(rank)},
        there,
        {name: tensors[name] for name in there.parameters(rank)},
        rank=rank,
        dtype=reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()), torch.bfloat16),
    ).run()
    for name in one_unit(layout, SCORE).parameters(rank):
        tensors[name].detach().copy_(_head(layout.arch.hidden, head, seed))
    return traffic


def _head(hidden: int, kind: Literal["zero", "random"], seed: int) -> Tensor:
    if kind == "zero":
        return torch.zeros(1, hidden)
    return torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed)) / hidden**0.5
