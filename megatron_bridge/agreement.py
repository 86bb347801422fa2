"""What all ranks of a transfer must have in common, compared once before the first bucket is sent.

Ranks plan alone. Where they were given different settings, two jobs with configurations of their own say, buckets
would have other sizes than the peers expect: a hang, or wrong weights. Here it becomes an error that says so.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_bridge.errors import SyncError
from megatron_bridge.fingerprint import fingerprint
from megatron_bridge.groups import Group, gather_integers
from megatron_bridge.layouts.layout import Layout

if TYPE_CHECKING:
    from megatron_bridge.execute import Transfer


def require_agreement(transfer: "Transfer", group: Group) -> None:
    """Raise SyncError where ranks have different settings, ValueError where what is sent is too narrow. Collective."""
    rounded, others = _rounded(transfer.dtype, transfer.source), _others(transfer.dtype, transfer.target)
    found = gather_integers(group, [identity(transfer), bool(rounded), bool(others)])
    apart = [rank for rank, values in enumerate(found) if values[0] != found[0][0]]
    if apart:
        raise SyncError(
            f"ranks {apart} planned another transfer than rank 0: layouts, dtype, bucket size, ranks per node and "
            "checksum must be the same on all ranks"
        )
    if any(values[1] for values in found) and any(values[2] for values in found):
        raise ValueError(f"{transfer.dtype} holds not all source tensors and is not all targets' type: {NARROW}")


def is_alone(source: Layout, target: Layout) -> bool:
    """Whether a rank may go on without the others: there is none, or each reads what it needs from files.

    A plan without messages does not say so, because a rank with other settings may expect some.
    """
    ranks = {*source.ranks, *target.ranks}
    return len(ranks) <= 1 or (source.is_read_anywhere and ranks == set(source.ranks))


def identity(transfer: "Transfer") -> int:
    """63 bits that differ, almost surely, where two transfers differ in anything that their messages depend on."""
    rounds = [len(phase.exchange.rounds) for phase in transfer.phases]
    return fingerprint(transfer.plan.fingerprint, str(transfer.dtype), rounds, transfer.checksum)


def gather_faults(group: Group, count: int) -> list[int]:
    """The ranks that count faults. Collective, so that all ranks refuse what one of them received wrongly."""
    return [rank for rank, (faults,) in enumerate(gather_integers(group, [count])) if faults]


NARROW = "sending it would lose precision that the target keeps; send a wider dtype"


def loses_precision(dtype: torch.dtype, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> str:
    """Why a rank that holds both ends cannot send `dtype` between them; empty if it can.

    Where it holds every source tensor exactly, or is the type of every target tensor, what arrives is a cast from
    source to target.
    """
    rounded, others = _rounded(dtype, source), _others(dtype, target)
    if not rounded or not others:
        return ""
    return f"{rounded[0]} is {source[rounded[0]].dtype}, {others[0]} {target[others[0]].dtype}: as {dtype} {NARROW}"


def _rounded(dtype: torch.dtype, source: Mapping[str, Tensor]) -> list[str]:
    """The tensors whose values `dtype` does not hold exactly."""
    return [name for name, tensor in source.items() if not _holds(dtype, tensor.dtype)]


def _others(dtype: torch.dtype, target: Mapping[str, Tensor]) -> list[str]:
    """The tensors of another type."""
    return [name for name, tensor in target.items() if tensor.dtype != dtype]


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    if dtype == other or not (dtype.is_floating_point and other.is_floating_point):
        return dtype == other
    if 1 in (dtype.itemsize, other.itemsize):  # torch promotes no 8-bit floats, which all wider ones hold
        return other.itemsize < dtype.itemsize
    return torch.promote_types(dtype, other) == dtype
