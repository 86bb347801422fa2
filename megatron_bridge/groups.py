"""The few collectives that a transfer needs, on any process group object.

`Group` is a job's own group or one that `worlds` made between two jobs, of which torch's registry of groups knows
nothing: so calls go to the object itself. All sizes are in bytes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.errors import SyncError

Group = Any  # dist.ProcessGroup, or a backend object with the same collectives


def or_default(group: Group | None) -> Group:
    """The group, or the default one of the process."""
    return dist.group.WORLD if group is None else group


def device_of(group: Group | None) -> torch.device:
    """Where a group's backend wants its buffers: the current GPU for NCCL, else host memory."""
    if group is None and not dist.is_initialized():
        return torch.device("cpu")
    group = or_default(group)
    backend = dist.get_backend_config(group) if isinstance(group, dist.ProcessGroup) else group.name()
    if "nccl" in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def exchange_bytes(
    group: Group, incoming: Tensor, outgoing: Tensor, received: Sequence[int], sent: Sequence[int]
) -> dist.Work:
    """Start an exchange of uint8 buffers that hold one part for each rank, in rank order."""
    return group.alltoall_base(incoming, outgoing, list(received), list(sent), dist.AllToAllOptions())


def gather_integers(group: Group, values: Sequence[int]) -> list[list[int]]:
    """Every rank's integers (int64, equally many), by rank. SyncError if a rank is gone or silent."""
    mine = torch.tensor(values, dtype=torch.int64, device=device_of(group))
    found = [torch.empty_like(mine) for _ in range(group.size())]
    try:
        group.allgather([found], [mine]).wait()
    except RuntimeError as error:
        raise SyncError(f"not all ranks of the transfer answer: {error}") from error
    return torch.stack(found).tolist()
