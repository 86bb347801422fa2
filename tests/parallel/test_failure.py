"""A failing rank is named once and ends the job; a mistake has an exit code of its own, lack of memory advice.

A job under torchrun with a rank that fails is in tests/test_end_to_end.py.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlflow.errors import UserError
from rlflow.parallel import failure
from tests.parallel import fault_ranks


def test_a_failure_ends_ranks_of_other_machines_too(tmp_path: Path) -> None:
    """cases.md G05, without an agent that would end rank 0, which is in no collective either."""
    ended = fault_ranks.run(2, fault_ranks.raise_on_rank_1, MemoryError("no more"), folder=tmp_path)
    assert ended.codes == [1, 1]
    assert ended.errors.count("Traceback") == 1
    assert "rank 1 failed in phase 'update/actor': MemoryError: no more" in ended.errors
    assert ended.seconds < 30


@pytest.mark.parametrize("phase", ["update", "sync", "save"])
def test_a_rank_that_fails_while_another_waits_for_it_ends_both(
    phase: str, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    """cases.md G05: within a pipeline's forward pass, a transfer of weights, a checkpoint."""
    ended = fault_ranks.run(2, fault_ranks.fail_in, phase, tiny_model("qwen2"), tmp_path, folder=tmp_path)
    assert ended.codes == [1, 1]
    assert ended.errors.count("Traceback") == 1
    assert ended.errors.count(f"rank 1 failed in phase '{phase}': RuntimeError: the last straw") == 1
    assert "rank 0 failed" not in ended.errors
    assert ended.seconds < 30


def test_a_users_mistake_is_told_without_a_traceback(tmp_path: Path) -> None:
    ended = fault_ranks.run(2, fault_ranks.raise_on_rank_1, UserError("rollout.n", "is odd"), folder=tmp_path)
    assert (ended.codes, ended.errors) == ([1, 2], "error: rollout.n: is odd\n")


@pytest.mark.parametrize(
    ("phase", "keys"),
    [
        ("generate", "rollout.kv_cache_gib, rollout.max_num_seqs"),
        ("update/actor", "micro_batch_tokens and logprob_chunk_tokens of the role"),
        ("sync", "bridge.bucket_mib, rollout.kv_cache_gib"),
    ],
)
def test_lack_of_memory_names_rank_phase_peak_and_keys(
    phase: str, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # cases.md G08
    monkeypatch.setenv("RANK", "3")
    errors = (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("x: can't allocate memory: 1 byte"),
        RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:62"),  # vLLM's, as it wakes up
    )
    for error in errors:
        text = failure._describe(error, phase)
        assert f"rank 3 failed in phase '{phase}'" in text
        assert f"rank 3 ran out of memory in phase '{phase}' (the process's peak " in text
        assert f"lower {keys}; or spread the model over more ranks" in text
    assert "memory" not in failure._describe(ValueError("disk full"), phase)


def test_lack_of_a_gpus_memory_tells_what_torch_keeps_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = {"max_memory_allocated": 114.5, "memory_reserved": 140.25, "memory_allocated": 101.0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**28, 140 * 2**30))
    for name, amount in gib.items():
        monkeypatch.setattr(torch.cuda, name, lambda amount=amount: int(amount * 2**30))
    text = failure._describe(torch.OutOfMemoryError("CUDA out of memory"), "sync/weights")
    assert (
        "(torch's peak in it 114.50 GiB, 39.25 GiB kept by torch without use; the GPU's use 139.75 of 140.00 GiB)"
    ) in text


def test_a_lost_peer_is_no_failure_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711\nmore")
    assert failure._describe(lost, "exchange") == (
        "rank 1 lost its connection to another rank in phase 'exchange': "
        "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"
    )
