"""Proof, at start, that writing an engine's parameters in place equals what the engine's own loader does.

Some engines keep shapes and still reorder or derive weights. So known values go once through the bridge and once
through the loader, and every parameter, buffer and derived tensor must come out bit-equal. What to do where they do not
is left to the caller.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_bridge import compat
from megatron_bridge.execute import connect
from megatron_bridge.layouts import HFLayout, Layout
from megatron_bridge.layouts.part import OneUnit

CHUNK = 1 << 22  # elements that are mixed at a time: bounds the memory that making and reading values takes
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
        _write_unit(OneUnit(source, unit.canonical), OneUnit(layout, unit.canonical), values, tensors, rank)
    model = compat.vllm_model(llm)
    bridged = digests(model)
    for tensor in tensors.values():
        tensor.zero_()  # a loader that took nothing must not pass
    compat.vllm_load(llm, values.items())
    loaded = digests(model)
    return sorted(name for name in bridged.keys() | loaded.keys() if bridged.get(name) != loaded.get(name))


def _write_unit(
    source: OneUnit, target: OneUnit, values: "KnownValues", tensors: dict[str, torch.Tensor], rank: int
) -> None:
    held = {name: values[name] for name in source.parameters(rank)}
    filled = {name: tensors[name] for name in target.parameters(rank)}
    connect(source, held, target, filled, rank=rank, dtype=values.dtype).run()


class KnownValues(Mapping[str, torch.Tensor]):
    """Every canonical tensor by its Hugging Face name, made when it is asked for and not kept: the same each time.

    Values are 8-bit numbers scattered by a mix of name and position, exact in every format, so that a misplaced row or
    element shows.
    """

    def __init__(self, layout: HFLayout, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self._device = dtype, device
        self._shapes = {name: param.shape for name, param in layout.parameters(rank).items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        values = torch.empty(self._shapes[name], dtype=self.dtype, device=self._device)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        flat = values.view(-1)
        for start in range(0, len(flat), CHUNK):
            part = flat[start : start + CHUNK]
            at = torch.arange(start, start + len(part), dtype=torch.int64, device=self._device)
            part.copy_(_mix(at + seed).bitwise_and_(255).sub_(128))
        return values

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
    return {name: _digest(tensor.detach()) for name, tensor in named.items()}


def _digest(tensor: torch.Tensor) -> int:
    flat = tensor.contiguous().view(-1).view(INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK].to(torch.int64)
        at = torch.arange(start, start + len(part), dtype=torch.int64, device=flat.device)
        total += _mix(part + _mix(at)).sum()
    return int(total.item())


def _mix(numbers: torch.Tensor) -> torch.Tensor:
    """Scatter int64 numbers, wrapping around: a bijection, so that different inputs stay different."""
    numbers = numbers * -7046029254386353131  # odd
    numbers ^= numbers >> 29
    numbers *= -4658895280553007687  # odd
    numbers ^= numbers >> 32
    return numbers
