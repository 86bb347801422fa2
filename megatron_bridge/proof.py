"""Proof, at start, that writing an engine's parameters in place equals what the engine's own loader does.

Some engines keep shapes and still reorder or derive weights. So known values go once through the bridge and once
through the loader, and every parameter, buffer and derived tensor must come out bit-equal. What to do where they do not
is left to the caller.
"""

import hashlib
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch

from megatron_bridge import compat
from megatron_bridge.execute import connect
from megatron_bridge.layouts import HFLayout, Layout
from megatron_bridge.layouts.part import Part, one_unit

TABLE = 1_048_573  # length of the table of known values, a prime
CHUNK = 1 << 18  # elements that are digested at a time
MULTIPLIER = 6_364_136_223_846_793_005  # joins the chunks' digests in their order
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def startup_proof(llm: Any, layout: Layout, tensors: dict[str, torch.Tensor], rank: int) -> list[str]:
    """Names of the engine's tensors that the bridge leaves different from the loader; empty if it may write in place.

    Args:
        llm: vLLM's `LLM` of this process; its weights are overwritten.
        layout: what vLLM holds.
        tensors: its live parameters by layout name (`bind_vllm.bind`).
        rank: this process's rank in the layout.
    """
    some = next(iter(tensors.values()))
    source = HFLayout(layout.arch, layout.ranks)  # every rank holds all, so that nothing is sent
    values = KnownValues(source, rank, some.dtype, some.device)
    for unit in source.all_units:
        _write_unit(one_unit(source, unit.canonical), one_unit(layout, unit.canonical), values, tensors, rank)
    model = compat.vllm_model(llm)
    bridged = digests(model)
    for tensor in tensors.values():
        tensor.zero_()  # a loader that took nothing must not pass
    compat.vllm_load(llm, values.items())
    loaded = digests(model)
    return sorted(name for name in bridged.keys() | loaded.keys() if bridged.get(name) != loaded.get(name))


def _write_unit(source: Part, target: Part, values: "KnownValues", tensors: dict[str, torch.Tensor], rank: int) -> None:
    held = {name: values[name] for name in source.parameters(rank)}
    filled = {name: tensors[name] for name in target.parameters(rank)}
    connect(source, held, target, filled, rank=rank, dtype=values.dtype).run()


class KnownValues(Mapping[str, torch.Tensor]):
    """Every canonical tensor by its Hugging Face name, made when it is asked for and not kept: the same each time.

    A tensor repeats a table of random 8-bit numbers, exact in every format, from a place that its name gives. The
    table's length is prime and longer than a row, so that whatever is misplaced by rows or elements differs.
    """

    def __init__(self, layout: HFLayout, rank: int, dtype: torch.dtype, device: torch.device) -> None:
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


def digests(model: torch.nn.Module) -> dict[str, int]:
    """A 64-bit digest, sensitive to order, of each parameter, buffer and tensor attribute but the key-value cache."""
    named: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for prefix, module in model.named_modules():
        attributes = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
        named |= {f"{prefix}.{name}": value for name, value in attributes.items() if name != "kv_cache"}
    factors = torch.randint(-(2**63), 2**63 - 1, (CHUNK,), generator=torch.Generator().manual_seed(0))
    return {name: _digest(tensor.detach(), factors.to(tensor.device)) for name, tensor in named.items()}


def _digest(tensor: torch.Tensor, factors: torch.Tensor) -> int:
    """Sum of the elements' bits times random factors, wrapping around, chunk by chunk."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in tensor.contiguous().view(-1).view(INTEGERS[tensor.element_size()]).split(len(factors)):
        total = total * MULTIPLIER + (part.to(torch.int64) * factors[: len(part)]).sum()
    return int(total.item())
