"""Weights from a model folder, Hugging Face's or Megatron's, into the tensors of any layout.

Loading is a transfer whose source every rank can read, so nothing is sent: each rank copies its boxes out of the mapped
files. Writing folders is left to `export` and `distcp_writer`, the files themselves to `files` and `distcp`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from megatron_bridge.distcp import is_torch_dist, open_torch_dist, torch_dist_dtypes
from megatron_bridge.execute import Traffic, connect
from megatron_bridge.families import FAMILIES, Architecture
from megatron_bridge.files import MappedTensors, open_hf, tensor_dtypes
from megatron_bridge.layouts import HFLayout, Layout
from megatron_bridge.layouts.layout import HEAD, raise_faults


def load_weights(folder: str | Path, layout: Layout, tensors: Mapping[str, Tensor], *, rank: int) -> Traffic:
    """Fill this rank's tensors from a folder that `open_source` takes, reading only the bytes they need.

    Values are cast to the tensors' dtypes. Raises UserError that names every tensor which is missing, of another shape,
    or unknown to the family.
    """
    return _fill(*open_source(folder, layout.arch, layout.ranks), layout, tensors, rank)


def load_hf(folder: str | Path, layout: Layout, tensors: Mapping[str, Tensor], *, rank: int) -> Traffic:
    """The same from a Hugging Face folder alone."""
    source = HFLayout(layout.arch, layout.ranks)
    return _fill(source, open_weights(folder, layout.arch), layout, tensors, rank)


def _fill(
    source: Layout, held: Mapping[str, Tensor], layout: Layout, tensors: Mapping[str, Tensor], rank: int
) -> Traffic:
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()), torch.bfloat16)
    held = held if rank in layout.ranks else {}
    return connect(source, held, layout, tensors, rank=rank, dtype=dtype).run()


def open_source(folder: str | Path, arch: Architecture, ranks: Sequence[int] = (0,)) -> tuple[Layout, MappedTensors]:
    """The weights of a folder as a source for `ranks`, each of which holds them all: their layout, and mapped tensors.

    `folder` has safetensors, or is a `torch_dist` checkpoint of Megatron's, or the root or the step's folder of one.
    """
    if is_torch_dist(folder):
        return open_torch_dist(folder, arch, ranks)
    return HFLayout(arch, tuple(ranks)), open_weights(folder, arch)


def source_dtypes(folder: str | Path, arch: Architecture) -> dict[str, torch.dtype]:
    """Hugging Face tensor name -> dtype in which a folder that `open_source` takes holds it."""
    return torch_dist_dtypes(folder, arch) if is_torch_dist(folder) else tensor_dtypes(Path(folder))


def open_weights(folder: str | Path, arch: Architecture) -> MappedTensors:
    """The tensors of a Hugging Face folder as `HFLayout` names them, mapped, without those that the family ignores.

    UserError where one is missing, unknown or of another shape.
    """
    weights, wanted = open_hf(folder), HFLayout(arch, (0,)).parameters(0)
    raise_faults(str(folder), name_faults(weights, arch))
    shapes = {name: (list(weights[name].shape), list(parameter.shape)) for name, parameter in wanted.items()}
    misshapen = [f"{name} is {has}, expected {due}" for name, (has, due) in shapes.items() if has != due]
    raise_faults(str(folder), misshapen)
    return weights.only(wanted)


def name_faults(names: Iterable[str], arch: Architecture) -> list[str]:
    """What is wrong with a checkpoint's tensor names: wanted ones that are missing, and ones that nobody knows."""
    given, wanted = set(names), set(HFLayout(arch, (0,)).parameters(0))
    ignored = [*FAMILIES[arch.family].ignored, *([re.escape(f"{HEAD}weight")] if arch.tied else [])]
    unknown = [name for name in given - wanted if not any(re.fullmatch(pattern, name) for pattern in ignored)]
    faults = [f"{name} is missing" for name in sorted(wanted - given)]
    return faults + [f"{name} is not a tensor of a {arch.family} model" for name in sorted(unknown)]
