"""Proof that writing an engine's parameters in place equals what the engine's own loader does.

Some engines keep shapes and still reorder or derive weights. So known values go once through the bridge's plan and once
through the loader, and every parameter, buffer and derived tensor must come out bit-equal. What to do where they do not
is left to the caller.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from megatron_bridge import compat
from megatron_bridge.bind_vllm import is_used, unfilled
from megatron_bridge.checksum import digest
from megatron_bridge.copies import FusedCopies
from megatron_bridge.errors import UserError
from megatron_bridge.layouts import Layout, VLLMLayout
from megatron_bridge.layouts.loader import LoaderLayout
from megatron_bridge.layouts.part import OneRank
from megatron_bridge.plan import Copy, make_plan

TABLE = 1_048_573  # length of the table of known values, a prime
SHOWN = 4  # of what a loader left out


class Proof(NamedTuple):
    """What was compared on one rank: parameters, buffers and derived tensors, their bytes, and which came out apart."""

    tensors: int
    bytes: int
    different: tuple[str, ...]


def prove(llm: Any, layout: VLLMLayout, tensors: Mapping[str, torch.Tensor], rank: int) -> Proof:
    """Compare the bridge with the engine's loader on one rank, without any other taking part.

    Args:
        llm: vLLM's `LLM` of this process; its weights are overwritten.
        layout: what vLLM holds.
        tensors: its live parameters by layout name (`bind_vllm.bind`).
        rank: this process's rank in the layout.

    Raises:
        UserError: the loader leaves parameters as they were, so that nothing can fill this engine.
    """
    some = next(iter(tensors.values()))
    wanted = OneRank(LoaderLayout(layout), rank)
    values = KnownValues(wanted, rank, some.dtype, some.device)
    model = compat.vllm_model(llm)
    _write(wanted, OneRank(layout, rank), values, tensors, rank)
    compat.renew_vllm_derived(llm)
    bridged = digests(model)
    for tensor in tensors.values():
        tensor.zero_()  # a loader that took nothing must not pass
    loaded = compat.vllm_load(llm, values.items())
    if faults := unfilled(layout, rank, tensors if loaded is None else loaded):
        raise UserError(f"vLLM on rank {rank}", "; ".join(faults[:SHOWN]))
    reloaded = digests(model)
    names = sorted(name for name in bridged.keys() | reloaded.keys() if is_used(name, layout, rank))
    different = tuple(name for name in names if bridged.get(name) != reloaded.get(name))
    sizes = {name: tensor.nbytes for name, tensor in named_tensors(model).items()}
    return Proof(len(names), sum(sizes.get(name, 0) for name in names), different)


def _write(
    source: Layout, target: Layout, values: "KnownValues", tensors: Mapping[str, torch.Tensor], rank: int
) -> None:
    """Make the copies that the bridge plans between two layouts of one rank, a whole source tensor after another."""
    copies: dict[str, list[Copy]] = defaultdict(list)
    for copy in make_plan(source, target, itemsize=values.dtype.itemsize).into(rank):
        copies[copy.source.parameter].append(copy)
    for name, parts in copies.items():
        FusedCopies(parts, {name: values[name]}, tensors).run()
    for name, elements in target.padding(rank).items():
        tensors[name].view(-1)[-elements:].zero_()


class KnownValues(Mapping[str, torch.Tensor]):
    """Every canonical tensor by its Hugging Face name, made when it is asked for and not kept: the same each time.

    A tensor repeats a table of random 8-bit numbers, exact in every format, from a place that its name gives. The
    table's length is prime and longer than a row, so that whatever is misplaced by rows or elements differs.
    """

    def __init__(self, layout: Layout, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._shapes = {name: param.shape for name, param in layout.parameters(rank).items()}
        table = torch.randint(-128, 128, (TABLE,), generator=torch.Generator().manual_seed(0))
        self._table = table.to(dtype).to(device)

    def __getitem__(self, name: str) -> torch.Tensor:
        begin = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % TABLE
        elements = prod(self._shapes[name])
        repeated = self._table.roll(-begin).repeat(-(-elements // TABLE))
        return repeated[:elements].view(self._shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Each parameter, buffer and tensor attribute of a model but the key-value cache, by its layout name."""
    named: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for prefix, module in model.named_modules():
        attributes = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
        named |= {f"{prefix}.{name}": value for name, value in attributes.items() if name != "kv_cache"}
    return {compat.vllm_parameter_name(name): tensor.detach() for name, tensor in named.items()}


def digests(model: torch.nn.Module) -> dict[str, int]:
    """A 64-bit digest, sensitive to order, of each of a model's tensors."""
    return {name: int(digest(tensor)) for name, tensor in named_tensors(model).items()}
