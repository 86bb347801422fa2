"""Weights from a Hugging Face model folder into the tensors of any layout.

Loading is a transfer whose source every rank can read, so nothing is sent: each rank copies its boxes out of the mapped
files. Writing folders is left to `export`, the files themselves to `files`.
"""

import re
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from megatron_bridge.execute import Traffic, connect
from megatron_bridge.families import FAMILIES, Architecture
from megatron_bridge.files import open_hf
from megatron_bridge.layouts import HFLayout, Layout
from megatron_bridge.layouts.layout import HEAD, raise_faults


def load_hf(folder: str | Path, layout: Layout, tensors: Mapping[str, Tensor], *, rank: int) -> Traffic:
    """Fill this rank's tensors from a model folder, reading only the bytes they need and casting to their dtype.

    Raises UserError that names every tensor which is missing, of another shape, or unknown to the family.
    """
    weights = open_weights(folder, layout.arch)
    source = HFLayout(layout.arch, layout.ranks)
    held = {name: weights[name] for name in source.parameters(rank)}
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()), torch.bfloat16)
    return connect(source, held, layout, tensors, rank=rank, dtype=dtype).run()


def open_weights(folder: str | Path, arch: Architecture) -> dict[str, Tensor]:
    """The tensors of a model folder as `HFLayout` names them, mapped, without those that the family ignores.

    UserError where one is missing, unknown or of another shape.
    """
    weights, wanted = open_hf(folder), HFLayout(arch, (0,)).parameters(0)
    raise_faults(str(folder), name_faults(weights, arch))
    shapes = {name: (list(weights[name].shape), list(parameter.shape)) for name, parameter in wanted.items()}
    misshapen = [f"{name} is {has}, expected {due}" for name, (has, due) in shapes.items() if has != due]
    raise_faults(str(folder), misshapen)
    return {name: weights[name] for name in wanted}


def name_faults(names: Iterable[str], arch: Architecture) -> list[str]:
    """What is wrong with a checkpoint's tensor names: wanted ones that are missing, and ones that nobody knows."""
    given, wanted = set(names), set(HFLayout(arch, (0,)).parameters(0))
    ignored = [*FAMILIES[arch.family].ignored, *([re.escape(f"{HEAD}weight")] if arch.tied else [])]
    unknown = [name for name in given - wanted if not any(re.fullmatch(pattern, name) for pattern in ignored)]
    faults = [f"{name} is missing" for name in sorted(wanted - given)]
    return faults + [f"{name} is not a tensor of a {arch.family} model" for name in sorted(unknown)]
