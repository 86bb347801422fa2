"""The life of one process in a job: device, default process group and shutdown.

The device is chosen once, on first use. Groups of a role are made by `grid`, failures are told by `failure` and
`watchdog`; nothing here knows about models.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import os
import sys

import torch
import torch.distributed as dist

from rlflow.parallel import cpu_shim
from rlflow.parallel.seeds import seed_process

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


@functools.cache
def device() -> torch.device:
    """The device of this process, chosen once: the GPU of its local rank, or the CPU where CUDA is absent."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def initialize(timeout_seconds: float, seed: int) -> torch.device:
    """Make the process ready for megatron-core: shim, threads, device, default group, generators.

    An existing default group is kept. The timeout is that of every collective of the default group and, by way of
    `Grid`, of every other group. A process that torchrun did not start becomes a world of one.
    """
    cpu_shim.install()
    limit_threads()
    keep_freed_memory()
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if device().type == "cuda":
        torch.cuda.set_device(device())
    if not dist.is_initialized():
        _init_default_group(timeout)
    seed_process(seed, dist.get_rank())
    return device()


def limit_threads() -> None:
    """On a CPU, share the cores among the processes of this machine, unless OMP_NUM_THREADS says otherwise."""
    if device().type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def ranks_per_node() -> int:
    """Ranks next to each other that share a machine; all of the job's where torchrun did not start them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def keep_freed_memory() -> None:
    """On a CPU, let malloc reuse large blocks: by default each is mapped anew and its pages are zeroed by the kernel.

    A bf16 step of a 135M model takes a fifth less time. Allocators other than glibc's are left alone.
    """
    if device().type != "cpu" or sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def _init_default_group(timeout: datetime.timedelta) -> None:
    on_gpu = device().type == "cuda"
    backend, bound = ("nccl", device()) if on_gpu else ("gloo", None)
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=bound)
    else:
        dist.init_process_group(backend, timeout=timeout, device_id=bound)


def job_group() -> tuple[dist.ProcessGroup, dist.Store]:
    """The group of the whole job with its store, also where another one is shown as the default."""
    world = dist.distributed_c10d._world
    group = next(iter(world.pg_map))  # the first that was made
    return group, world.pg_map[group][1]


def shutdown() -> None:
    """Destroy all process groups; every rank calls it at the end of a run that went well."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
