"""Moves the contents of storages to host memory and back; the tensors and all views of them stay what they are.

A storage that is away has size 0. On CUDA the host memory is pinned and kept for the next time, and copies run on the
current stream, beside the host. Which storages belong together, and when they move, is left to `residency`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

SLAB_BYTES = 1 << 28


class HostMemory:
    """Room on the host for the storages of one device, filled by `take` and emptied by `give_back`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slabs: list[Tensor] = []

    def take(self, storages: Sequence[torch.UntypedStorage]) -> list[int]:
        """Copy the storages' bytes to the host and free them on the device; returns their sizes in bytes."""
        sizes = [storage.nbytes() for storage in storages]
        self._reserve(sum(sizes))
        for storage, places in zip(storages, self._places(sizes), strict=True):
            for part, place in zip(_bytes_of(storage).split([len(place) for place in places]), places, strict=True):
                place.copy_(part, non_blocking=True)
        drop(storages, self._device)
        return sizes

    def give_back(self, storages: Sequence[torch.UntypedStorage], sizes: Sequence[int]) -> None:
        """Take the device's memory again and fill it with what `take` was given."""
        for storage, size, places in zip(storages, sizes, self._places(sizes), strict=True):
            storage.resize_(size)
            for part, place in zip(_bytes_of(storage).split([len(place) for place in places]), places, strict=True):
                part.copy_(place, non_blocking=True)

    def _reserve(self, nbytes: int) -> None:
        """Slabs of powers of two, because torch rounds every pinned allocation up to one."""
        missing = nbytes - sum(map(len, self._slabs))
        while missing > 0:
            size = min(SLAB_BYTES, 1 << (missing - 1).bit_length())
            on_gpu = self._device.type == "cuda"
            self._slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu))
            missing -= size

    def _places(self, sizes: Sequence[int]) -> Iterator[list[Tensor]]:
        """Where the bytes of each storage lie, one after another: a run of slabs' parts for each."""
        starts = [0]
        for slab in self._slabs:
            starts.append(starts[-1] + len(slab))
        begin = 0
        for size in sizes:
            end = begin + size
            yield [
                slab[max(begin - first, 0) : end - first]
                for slab, (first, last) in zip(self._slabs, pairwise(starts), strict=True)
                if first < end and begin < last
            ]
            begin = end


def drop(storages: Sequence[torch.UntypedStorage], device: torch.device) -> None:
    """Free storages without keeping what is in them, for other allocators of the device too."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    for storage in storages:
        storage.resize_(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def zero(storages: Sequence[torch.UntypedStorage], sizes: Sequence[int]) -> None:
    """Take the memory of dropped storages again, filled with zeros."""
    for storage, size in zip(storages, sizes, strict=True):
        storage.resize_(size)
        _bytes_of(storage).zero_()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
