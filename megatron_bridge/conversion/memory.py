"""How much memory a conversion may take, and what of it mapped pages of the source may have."""

import resource

from megatron_bridge.errors import UserError
from megatron_bridge.fill import MAPPED_BYTES, WINDOW_BYTES

DEFAULT_MEMORY = 2 * 2**30
LEAST_BYTES = 48 * 2**20  # besides the program: room for pages, a window, and what Python makes in between
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def mapped_budget(most: int) -> int:
    """Bytes of a source that may be mapped where a process may take `most` in all; UserError if too few are left."""
    taken = peak_memory()
    if most - taken < LEAST_BYTES:
        raise UserError(
            "--max-memory",
            f"{most / 2**30:.2f} GiB is too little: the program itself takes {taken / 2**30:.2f} GiB, "
            f"give {(taken + LEAST_BYTES) / 2**30 + 0.005:.2f}G or more",
        )
    return min(MAPPED_BYTES, (most - taken) // 3)


def expected_peak(mapped: int) -> int:
    """The most bytes that a process takes which is about to convert with so many mapped."""
    return peak_memory() + mapped + WINDOW_BYTES


def peak_memory() -> int:
    """The most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def parse_bytes(text: str) -> int:
    """`4G`, `512MiB` or `0.5gb` in bytes, units being powers of 1,024; ValueError for anything else."""
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:].isalpha() else ""
    size = int(float(number.removesuffix(unit)) * UNITS[unit]) if unit in UNITS else 0
    if size < 1:
        raise ValueError(text)
    return size
