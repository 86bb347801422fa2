"""A process group that joins the processes of several jobs, training ranks and separate rollout ranks for example.

A process has one default group, and both jobs have theirs already. So this group has a store of its own and is
registered nowhere; a transfer takes it as it is. Ranks are counted through: say training has 0 … n − 1 and rollout
n … n + m − 1, then the layouts of a transfer name these.
"""

import socket
import time
from datetime import timedelta

import torch.distributed as dist

from megatron_bridge.errors import UserError
from megatron_bridge.groups import Group, gather_integers

POLL_SECONDS = 0.02


def connect_worlds(store_address: str, rank: int, size: int, backend: str = "gloo", timeout: float = 600) -> Group:
    """Join; returns when all have joined. Every process of all jobs calls it with its own rank.

    `shutdown()` of the group ends it.

    Args:
        store_address: "host:port" on the machine of rank 0, whose process serves the store there.
        rank: this process's rank among all.
        size: the number of processes of all jobs.
        backend: "gloo", or "nccl", which uses each process's current GPU.
        timeout: seconds to wait for the others, here and in each exchange.

    Raises:
        UserError: the address is malformed, in use or silent, ranks are missing or given twice, sizes differ.
    """
    host, _, port = store_address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(store_address, 'expected "host:port" of rank 0\'s machine')
    if backend not in ("gloo", "nccl"):
        raise UserError("backend", f"{backend!r} is neither gloo nor nccl")
    if not 0 <= rank < size:
        raise UserError("rank", f"{rank} is not one of {size} ranks")
    wait = timedelta(seconds=timeout)
    try:
        store = dist.TCPStore(host, int(port), None, rank == 0, wait, wait_for_workers=False)
    except RuntimeError as error:
        what = "cannot serve the store there" if rank == 0 else "rank 0 does not answer there"
        raise UserError(store_address, f"{what}: {error}") from error
    _call_the_roll(store, store_address, rank, size, timeout)
    group = _group(dist.PrefixStore("group", store), rank, size, backend, wait)
    gather_integers(group, [rank])  # whoever left earlier would break the connections of one that is still joining
    return group


def _call_the_roll(store: dist.Store, address: str, rank: int, size: int, wait: float) -> None:
    """Return when every rank is there; UserError names those that are not."""
    if store.add(f"joined {rank}", 1) > 1:
        raise UserError(address, f"two processes joined as rank {rank}")
    store.set(f"size {rank}", f"{size} on {socket.gethostname()}")
    keys = [f"size {other}" for other in range(size)]
    deadline = time.monotonic() + wait
    while missing := _absent(store, keys):
        if time.monotonic() > deadline:
            raise UserError(address, f"ranks {missing} of {size} did not join within {wait:.0f} s")
        time.sleep(POLL_SECONDS)
    others = {other: store.get(key).decode() for other, key in enumerate(keys)}
    wrong = {other: found for other, found in others.items() if int(found.split()[0]) != size}
    if wrong:
        raise UserError(address, f"rank {rank} expects {size} ranks, others do not: {wrong}")


def _absent(store: dist.Store, keys: list[str]) -> list[int]:
    """The ranks whose key is not there; all, if the store has ended with rank 0, which gave up first."""
    try:
        return [] if store.check(keys) else [rank for rank, key in enumerate(keys) if not store.check([key])]
    except dist.DistNetworkError:
        return list(range(len(keys)))


def _group(store: dist.Store, rank: int, size: int, backend: str, wait: timedelta) -> Group:
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, wait)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = wait
    return dist.ProcessGroupNCCL(store, rank, size, options)
