"""Random strided copies between tensors, and what plain indexing makes of them."""

import random
from math import prod

import torch
from torch import Tensor

from megatron_bridge.copies import FLOATS, region
from megatron_bridge.plan import Copy, Place

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


class Case:
    """Some copies out of one tensor into another, no two to the same element, on a device."""

    def __init__(self, copies: list[Copy], source: torch.dtype, target: torch.dtype, device: str = "cpu") -> None:
        self.copies = copies
        self.source = _values(_extent([(copy.shape, copy.source) for copy in copies]), source).to(device)
        self.target = torch.full(
            (_extent([(copy.shape, copy.target) for copy in copies]) + 5,), 7, dtype=target, device=device
        )
        self.expected = self.target.clone()
        for copy in copies:
            part = region(self.source, copy.shape, copy.source.strides, copy.source.offset)
            region(self.expected, copy.shape, copy.target.strides, copy.target.offset).copy_(part.to(target))

    def __repr__(self) -> str:
        return f"{self.source.dtype} to {self.target.dtype}: {self.copies}"

    @property
    def ends(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return {"from": self.source}, {"to": self.target}


def random_case(rng: random.Random, largest: int, device: str = "cpu") -> Case:
    """Up to three copies of up to three dimensions: odd sizes, gaps, offsets, transposes, casts, most bits aligned."""
    source = rng.choice(FLOATS + INTEGERS)
    target = rng.choice(FLOATS) if source in FLOATS and rng.random() < 0.5 else source
    copies, end = [], rng.choice([0, 0, 8, 1])
    for _ in range(rng.randint(1, 3)):
        multiple = rng.choice([1, 8, 64])
        rows, columns = rng.choice([1, 1, 2, 5, 33]), rng.randint(1, max(1, largest // multiple)) * multiple
        shape = (rng.choice([1, 1, 2]), rows, columns)
        wide, narrow = columns + rng.choice([0, multiple, 3]), columns + rng.choice([0, multiple])
        strides = (rows * wide, wide, 1) if rng.random() < 0.9 else (rows * columns, 1, rows)
        copies.append(
            Copy(
                shape,
                Place(0, "from", rng.choice([0, 8, 3]), strides),
                Place(0, "to", end, (rows * narrow, narrow, 1)),
            )
        )
        end += prod((shape[0], rows, narrow)) + rng.choice([0, 8, 1])
    return Case(copies, source, target, device)


def _extent(ends: list[tuple[tuple[int, ...], Place]]) -> int:
    """Elements up to the last one of all regions."""
    return max(
        place.offset + sum((n - 1) * stride for n, stride in zip(shape, place.strides, strict=True)) + 1
        for shape, place in ends
    )


def _values(n: int, dtype: torch.dtype) -> Tensor:
    """Values of every magnitude, so that casts round, overflow and keep signs of zeros and infinities."""
    generator = torch.Generator().manual_seed(n)
    if not dtype.is_floating_point:
        return torch.randint(-128, 128, (n,), generator=generator).to(dtype)
    values = torch.randn(n, generator=generator) * 10.0 ** torch.randint(-9, 9, (n,), generator=generator)
    values[:4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])[: len(values)]
    return values.to(dtype)
