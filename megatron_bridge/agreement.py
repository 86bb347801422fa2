"""What all ranks of a transfer must have in common, compared once before the first bucket is sent.

Ranks plan alone. Where they were given different settings, two jobs with configurations of their own say, buckets
would have other sizes than the peers expect: a hang, or wrong weights. Here it becomes an error that says so.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_bridge.errors import SyncError
from megatron_bridge.groups import Group, gather_integers

if TYPE_CHECKING:
    from megatron_bridge.execute import Transfer


def require_agreement(transfer: "Transfer", group: Group) -> None:
    """Raise SyncError where ranks have different settings, ValueError where what is sent is too narrow. Collective."""
    source, target = _inexact(transfer.dtype, transfer.source), _inexact(transfer.dtype, transfer.target)
    found = gather_integers(group, [fingerprint(transfer), bool(source), bool(target)])
    apart = [rank for rank, values in enumerate(found) if values[0] != found[0][0]]
    if apart:
        raise SyncError(
            f"ranks {apart} planned another transfer than rank 0: layouts, dtype, bucket size, ranks per node and "
            "checksum must be the same on all ranks"
        )
    if any(values[1] for values in found) and any(values[2] for values in found):
        raise ValueError(f"{transfer.dtype} is exact neither for all source nor for all target tensors: " + NARROW)


def fingerprint(transfer: "Transfer") -> int:
    """63 bits that differ, almost surely, where two transfers differ in anything that their messages depend on."""
    plan = transfer.plan
    facts = (
        plan.source, plan.target, [sorted(traffic.items()) for traffic in plan.phase_traffic], str(transfer.dtype),
        [len(phase.exchange.rounds) for phase in transfer.phases], transfer.checksum,
    )  # fmt: skip
    return int.from_bytes(hashlib.sha256(repr(_ordered(facts)).encode()).digest()[:8], "big") >> 1


def _ordered(value: Any) -> Any:
    """A value whose representation is the same in all processes: sets come in an order of each process's own."""
    if dataclasses.is_dataclass(value):
        return type(value).__name__, [_ordered(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, frozenset | set):
        return sorted(map(repr, value))
    if isinstance(value, Mapping):
        return [(key, _ordered(inner)) for key, inner in value.items()]
    return [_ordered(inner) for inner in value] if isinstance(value, tuple | list) else value


def gather_faults(group: Group, count: int) -> list[int]:
    """The ranks that count faults. Collective, so that all ranks refuse what one of them received wrongly."""
    return [rank for rank, (faults,) in enumerate(gather_integers(group, [count])) if faults]


NARROW = "sending it would lose precision that the target keeps; send a wider dtype"


def loses_precision(dtype: torch.dtype, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> str:
    """Why a rank that holds both ends cannot send `dtype` between them; empty if it can.

    Where it is exact for every source tensor, or for every target tensor, the values that arrive are those of a cast
    from source to target.
    """
    inexact = _inexact(dtype, source), _inexact(dtype, target)
    if not all(inexact):
        return ""
    (name, tensor), (other, kept) = inexact[0][0], inexact[1][0]
    return f"{name} is {tensor.dtype}, {other} {kept.dtype}: as {dtype} {NARROW}"


def _inexact(dtype: torch.dtype, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The tensors whose values `dtype` does not hold exactly."""
    return [(name, tensor) for name, tensor in tensors.items() if not _holds(dtype, tensor.dtype)]


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    floats: Iterable[torch.dtype] = (dtype, other)
    exact = all(kind.is_floating_point for kind in floats) and torch.promote_types(dtype, other) == dtype
    return dtype == other or exact
