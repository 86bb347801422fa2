"""What a process does when it fails: tell of the job's first failure, once, and leave at once.

Peers wait in collectives that will never finish. torchrun ends those of the same machine when it sees this process
gone, `watchdog` those of others.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
import torch.distributed as dist

from rlflow.errors import UserError
from rlflow.parallel.process import job_group

FAILURE_KEY = "rlflow/failures"
GIB = 2**30
LESS_MEMORY = (
    ("generate", "rollout.kv_cache_gib, rollout.max_num_seqs"),
    ("evaluate", "rollout.kv_cache_gib, rollout.max_num_seqs"),
    ("sync", "bridge.bucket_mib, rollout.kv_cache_gib"),
    ("start", "rollout.kv_cache_gib"),
)
"""Beginning of a phase's name → the keys that lower what it takes on a device."""
LESS_FOR_TRAINING = "micro_batch_tokens and logprob_chunk_tokens of the role"
MORE_RANKS = "spread the model over more ranks (tensor_parallel_size, pipeline_parallel_size), use recompute or offload"


@contextlib.contextmanager
def reporting(phase: Callable[[], str]) -> Iterator[None]:
    """Print the job's first failure once, with its rank and phase, and leave the process at once with a non-zero code.

    The exit code is 2 for a mistake of the user's, which is printed without a traceback, and 1 for everything else.
    """
    try:
        yield
    except BaseException as error:  # the process ends here, whatever it was
        if isinstance(error, SystemExit) and error.code in (0, None):
            raise
        if not dist.is_initialized() or is_first_failure(job_group()[1]):
            print(_describe(error, phase()), file=sys.stderr, flush=True)
        end_process(2 if isinstance(error, UserError) else 1)


def is_first_failure(store: dist.Store) -> bool:
    """Whether no other rank has reported a failure before; this one has, from now on."""
    try:
        return store.add(FAILURE_KEY, 1) == 1
    except (RuntimeError, dist.DistError):
        return False  # what serves the store is gone, which somebody has reported


def end_process(code: int) -> NoReturn:
    """Leave at once, from any thread: interpreter and libraries would wait for communication when they shut down."""
    sys.stdout.flush()
    os._exit(code)


def _describe(error: BaseException, phase: str) -> str:
    rank = job_group()[0].rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
    if isinstance(error, UserError):
        return f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted in phase '{phase}'"
    if _lost_a_peer(error):  # whose own message, or torchrun's, says why
        return f"rank {rank} lost its connection to another rank in phase '{phase}': {str(error).splitlines()[0]}"
    trace = "".join(traceback.format_exception(error))
    failed = f"{trace}rank {rank} failed in phase '{phase}': {type(error).__name__}: {error}"
    return f"{failed}\n{_describe_memory(rank, phase)}" if _lacks_memory(error) else failed


def _lost_a_peer(error: BaseException) -> bool:
    """Whether gloo has found a peer's process gone."""
    words = ("Connection closed by peer", "Connection reset by peer")
    return isinstance(error, RuntimeError) and "gloo" in str(error) and any(word in str(error) for word in words)


def _lacks_memory(error: BaseException) -> bool:
    # torch raises a plain RuntimeError where the host has no more, and vLLM's pool where the GPU has none
    words = ("can't allocate memory", "CUDA Error: out of memory", "CUDA error: out of memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in str(error) for word in words)


def _describe_memory(rank: int, phase: str) -> str:
    keys = next((keys for name, keys in LESS_MEMORY if phase.startswith(name)), LESS_FOR_TRAINING)
    return f"rank {rank} ran out of memory in phase '{phase}' ({_memory_used()}): lower {keys}; or {MORE_RANKS}"


def _memory_used() -> str:
    """Of the GPU, or of the process where there is none."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        used, peak = total - free, torch.cuda.max_memory_allocated()
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # which vLLM's pool cannot take
        return (
            f"torch's peak in it {peak / GIB:.2f} GiB, {unused / GIB:.2f} GiB kept by torch without use; "
            f"the GPU's use {used / GIB:.2f} of {total / GIB:.2f} GiB"
        )
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"the process's peak {peak / GIB:.2f} GiB"
