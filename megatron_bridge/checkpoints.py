"""Weights from a model folder, Hugging Face's or Megatron's, into the tensors of any layout.

Loading is a transfer whose source every rank can read, so nothing is sent: each rank copies its boxes out of the mapped
files. Writing folders is left to `export`, `hf_writer` and `distcp_writer`, the files themselves to `files` and
`distcp`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.boxes import Param
from megatron_bridge.distcp import is_torch_dist, open_torch_dist
from megatron_bridge.errors import UserError
from megatron_bridge.execute import Traffic, connect
from megatron_bridge.families import FAMILIES, Architecture, read_json
from megatron_bridge.files import CODES, MappedTensors, holds_weights, open_hf, tensor_files
from megatron_bridge.folders import NAMES
from megatron_bridge.layouts import HFLayout, Layout, Unit
from megatron_bridge.layouts.hf import ROOT
from megatron_bridge.layouts.layout import EMBEDDING, FLOAT32_KINDS, HEAD, raise_faults
from megatron_bridge.prediction import prediction_faults, prediction_names, say_left_out
from megatron_bridge.tied import check_tied, equal

NAMED = {"root": str, "stacked": bool, "tied_head": bool}  # what a Megatron folder says of names
EMBEDDING_IN_ROOT = f"{EMBEDDING.removeprefix(ROOT)}weight"


def load_weights(folder: str | Path, layout: Layout, tensors: Mapping[str, Tensor], *, rank: int) -> Traffic:
    """Fill this rank's tensors from a folder that `open_source` takes, reading only the bytes they need.

    Values are cast to the tensors' dtypes. Raises UserError that names every tensor which is missing, of another shape,
    or unknown to the family.
    """
    return _fill(*open_source(folder, layout.arch, layout.ranks), layout, tensors, rank)


def load_hf(folder: str | Path, layout: Layout, tensors: Mapping[str, Tensor], *, rank: int) -> Traffic:
    """The same from a Hugging Face folder alone."""
    return _fill(*_open_hf(folder, layout.arch, layout.ranks), layout, tensors, rank)


def _fill(
    source: Layout, held: Mapping[str, Tensor], layout: Layout, tensors: Mapping[str, Tensor], rank: int
) -> Traffic:
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()), torch.bfloat16)
    held = held if rank in layout.ranks else {}
    return connect(source, held, layout, tensors, rank=rank, dtype=dtype).run()


# ---------------------------------------------------------------- sources
def open_source(folder: str | Path, arch: Architecture, ranks: Sequence[int] = (0,)) -> tuple[Layout, MappedTensors]:
    """The weights of a folder as a source for `ranks`, each of which holds them all: their layout, and mapped tensors.

    `folder` has safetensors, or is a `torch_dist` checkpoint of Megatron's, or the root or the step's folder of one.
    """
    return open_torch_dist(folder, arch, ranks) if is_torch_dist(folder) else _open_hf(folder, arch, ranks)


def _open_hf(folder: str | Path, arch: Architecture, ranks: Sequence[int]) -> tuple[HFLayout, MappedTensors]:
    weights = open_weights(folder, arch)
    return hf_layout(weights, arch, ranks), weights


def open_weights(folder: str | Path, arch: Architecture) -> MappedTensors:
    """The tensors of a Hugging Face folder as its `hf_layout` names them, without those that the family ignores.

    UserError where one is missing, unknown or of another shape, or one that is ignored as tied is not.
    """
    weights = open_hf(folder)
    layout = hf_layout(weights, arch)
    raise_faults(str(folder), name_faults(weights, layout))
    if left_out := prediction_names(layout, weights) & weights.keys():
        say_left_out(str(folder), len(left_out))
    wanted = layout.parameters(0)
    shapes = {name: (list(weights[name].shape), list(parameter.shape)) for name, parameter in wanted.items()}
    faults = [f"{name} is {has}, expected {due}" for name, (has, due) in shapes.items() if has != due]
    unscaled = (name for name in wanted if weights[name].dtype.itemsize == 1)
    faults += [
        f"{name} has dtype {CODES[weights[name].dtype]}, which is not supported: convert it to bf16 first"
        for name in unscaled
    ]
    raise_faults(str(folder), faults)
    head, embedding = f"{HEAD}weight", layout.root + EMBEDDING_IN_ROOT
    if arch.tied and head in weights:
        check_tied(folder, head, embedding, equal(weights[head], weights[embedding], weights.release))
    return weights.only(wanted)


# ---------------------------------------------------------------- names and dtypes
def hf_layout(names: Iterable[str], arch: Architecture, ranks: Sequence[int] = (0,)) -> HFLayout:
    """The layout in which a checkpoint with these tensors is read: their root, and whether experts are stacked."""
    given = set(names)
    roots = sorted(name.removesuffix(EMBEDDING_IN_ROOT) for name in given if name.endswith(f".{EMBEDDING_IN_ROOT}"))
    layout = HFLayout(arch, tuple(ranks), root=roots[0] if roots else ROOT)
    experts = [unit.prefix for unit in replace(layout, stacked=True).all_units if unit.kind == "experts"]
    stacked = {prefix + parameter.name for prefix in experts for parameter in FAMILIES[arch.family].stacked}
    return replace(layout, stacked=not stacked.isdisjoint(given))


def names_of(folder: str | Path, arch: Architecture) -> HFLayout:
    """How Hugging Face's files name a folder's tensors, a tied output matrix included.

    A Megatron folder says so in a file of its own; without it the canonical names are taken.
    """
    if holds_weights(Path(folder)):
        names = tensor_files(Path(folder))
        return replace(hf_layout(names, arch), tied_head=arch.tied and f"{HEAD}weight" in names)
    said = Path(folder) / NAMES
    return replace(HFLayout(arch, (0,)), **(_read_names(said) if said.exists() else {}))


def _read_names(path: Path) -> dict[str, Any]:
    said = read_json(path)
    for key, value in said.items():
        if (kind := NAMED.get(key)) is None or type(value) is not kind:
            due = f"expected a {kind.__name__}" if kind else f"the keys are {', '.join(NAMED)}"
            raise UserError(path, f"{key} is {value!r}, but {due}")
    return said


def name_faults(names: Iterable[str], layout: HFLayout) -> list[str]:
    """What is wrong with a checkpoint's tensor names: wanted ones that are missing, and ones that nobody knows."""
    arch, given, wanted = layout.arch, set(names), set(layout.parameters(layout.ranks[0]))
    unknown = [name for name in given - wanted - prediction_names(layout, given) if not is_ignored(name, layout)]
    faults = [f"{name} is missing" for name in sorted(wanted - given)] + prediction_faults(given, layout)
    return faults + [f"{name} is not a tensor of a {arch.family} model" for name in sorted(unknown)]


def is_ignored(name: str, layout: HFLayout) -> bool:
    """Whether a checkpoint may hold this tensor although nobody needs it."""
    if name == f"{HEAD}weight" and layout.arch.tied:
        return True
    canonical = ROOT + name.removeprefix(layout.root) if name.startswith(layout.root) else name
    return any(re.fullmatch(pattern, canonical) for pattern in FAMILIES[layout.arch.family].ignored)


def dtypes_in(target: Layout, layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    """The dtype of each parameter of a target's first rank that holds without loss what a source's tensors hold.

    Parameters that are nothing but padding have none.
    """
    held: dict[str, torch.dtype] = {}
    for unit, param in _parameters(layout):
        dtype = tensors[unit.prefix + param.name].dtype
        for name in {unit.canonical + piece.name for piece in param.pieces}:
            held[name] = torch.promote_types(dtype, held.get(name, dtype))
    return {
        unit.prefix + param.name: reduce(torch.promote_types, (held[unit.canonical + p.name] for p in param.pieces))
        for unit, param in _parameters(target)
        if param.pieces
    }


def cast_dtypes(target: Layout, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of each parameter of a target's first rank in a model of `dtype`: what is kept in float32 stays so."""
    return {
        unit.prefix + param.name: torch.float32 if unit.kind in FLOAT32_KINDS else dtype
        for unit, param in _parameters(target)
    }


def widened(
    target: Layout, dtypes: Mapping[str, torch.dtype], layout: Layout, tensors: Mapping[str, Tensor]
) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """The source's tensors that a target of these dtypes holds in another: the dtype they have, and the one they get.

    The target's first rank holds all of it.
    """
    written = {
        unit.canonical + piece.name: dtypes[unit.prefix + param.name]
        for unit, param in _parameters(target)
        for piece in param.pieces
    }
    found = {}
    for unit, param in _parameters(layout):
        held = tensors[unit.prefix + param.name].dtype
        if changed := [dtype for piece in param.pieces if (dtype := written[unit.canonical + piece.name]) != held]:
            found[unit.prefix + param.name] = (held, changed[0])
    return found


def _parameters(layout: Layout) -> Iterator[tuple[Unit, Param]]:
    rank = layout.ranks[0]
    for unit in layout.units(rank):
        for param in layout.params(unit.kind, layout.shard(rank, unit.kind)):
            yield unit, param
