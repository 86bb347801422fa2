"""Transfers between processes of two jobs, each with a default group of its own, on real processes."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_bridge.errors import SyncError, UserError
from megatron_bridge.execute import connect
from megatron_bridge.layouts import Layout, MegatronLayout, VLLMLayout
from megatron_bridge.worlds import connect_worlds
from tests.bridge.toys import empty, gathered, labelled, shards, toy
from tests.workers import free_port


def _leave_for_own_world(folder: Path, job: int, rank: int, size: int) -> None:
    """Exchange the fixture's default group for one that only the ranks of a job share."""
    dist.barrier()  # all have joined the one that is left
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{job}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )


def _sync(folder: Path, address: str, source: Layout, target: Layout, repeats: int) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    trains = rank in source.ranks
    jobs = len(source.ranks), size - len(source.ranks)
    _leave_for_own_world(folder, 0 if trains else 1, rank if trains else rank - jobs[0], jobs[0 if trains else 1])
    group = connect_worlds(address, rank, size, timeout=60)
    held = shards(labelled(source.arch), source).get(rank, {})
    filled = empty(target, rank)
    transfer = connect(
        source, held, target, filled, rank=rank, dtype=torch.int32, group=group, bucket_bytes=2000, checksum=True
    )
    received = 0
    for _ in range(repeats):
        for tensor in held.values():
            tensor += (tensor != 0).int()
        received += transfer.run().received
        mean = torch.ones(1)
        dist.all_reduce(mean)  # the job's own group goes on beside
        assert mean.item() == dist.get_world_size()
    group.shutdown()
    return {"tensors": filled, "received": received, "rounds": transfer.rounds}


@pytest.mark.parametrize(
    ("megatron", "vllm"),
    [
        ({"tp": 2}, {"tp": 2, "ranks": (2, 3)}),
        ({"pp": 2}, {"tp": 1, "ranks": (2, 3)}),
        ({"tp": 1}, {"tp": 2, "ranks": (1, 2)}),
    ],
    ids=["2 and 2, TP2-TP2", "2 and 2, PP2-TP1x2", "1 and 2"],
)
def test_training_and_rollout_in_worlds_of_their_own(
    world: Callable[..., Any], tmp_path: Path, megatron: dict, vllm: dict
) -> None:
    arch = toy(model_type="qwen2", num_key_value_heads=4, tie_word_embeddings=True)
    source, target = MegatronLayout(arch, **megatron), VLLMLayout(arch, **vllm)
    size = max(*source.ranks, *target.ranks) + 1
    results = world(size, _sync, tmp_path, f"127.0.0.1:{free_port()}", source, target, 3)
    assert all(results[rank]["received"] == 0 < results[target.ranks[0]]["received"] for rank in source.ranks)
    assert {result["rounds"] > 1 for result in results} == {True}
    back = gathered(target, {rank: results[rank]["tensors"] for rank in target.ranks})
    assert all(torch.equal(back[name], tensor + 3) for name, tensor in labelled(arch).items())


def _of_one_world(pipe: Connection, folder: str, address: str, rank: int, leaves: str) -> None:
    """Sync once; before the second time rank 0 dies or falls silent, and rank 1 tells how long it waited and why."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/{rank}", rank=0, world_size=1)
    arch = toy()
    source, target = MegatronLayout(arch), VLLMLayout(arch, 1, (1,))
    held, filled = shards(labelled(arch), source).get(rank, {}), empty(target, rank)
    group = connect_worlds(address, rank, 2, timeout=2)
    transfer = connect(source, held, target, filled, rank=rank, dtype=torch.int32, group=group, bucket_bytes=2000)
    transfer.run()
    pipe.send("synced")
    if rank == 0 and leaves == "silently":
        pipe.recv()  # until the test ends
    elif rank == 1:
        begin = time.perf_counter()
        with pytest.raises(SyncError) as error:
            transfer.run()
        pipe.send((time.perf_counter() - begin, str(error.value)))


@pytest.mark.parametrize("leaves", ["dying", "silently"])
def test_a_peer_that_is_gone_is_an_error_within_the_timeout(leaves: str) -> None:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_of_one_world, args=(theirs, folder, address, rank, leaves))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        (trainer, _), (rollout, _) = pipes
        for pipe in (trainer, rollout):
            assert pipe.poll(60)
            assert pipe.recv() == "synced"
        if leaves == "dying":
            processes[0].kill()
        assert rollout.poll(30)
        seconds, message = rollout.recv()
        assert seconds < 6  # the timeout is 2 s
        assert "rank 1: the exchange with ranks [0] failed in round 1 of" in message
        for process in processes:
            process.kill()
            process.join()


def test_ranks_that_do_not_join_are_named() -> None:
    with pytest.raises(UserError, match=r"ranks \[1, 2\] of 3 did not join within 1 s"):
        connect_worlds(f"127.0.0.1:{free_port()}", 0, 3, timeout=1)


@pytest.mark.parametrize(
    ("address", "rank", "backend", "message"),
    [
        ("29500", 0, "gloo", 'expected "host:port"'),
        ("127.0.0.1:x", 0, "gloo", 'expected "host:port"'),
        ("127.0.0.1:1", 2, "gloo", "2 is not one of 2 ranks"),
        ("127.0.0.1:1", 0, "mpi", "'mpi' is neither gloo nor nccl"),
    ],
)
def test_wrong_arguments_are_named(address: str, rank: int, backend: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        connect_worlds(address, rank, 2, backend)


def test_a_silent_address_is_an_error() -> None:
    with pytest.raises(UserError, match="rank 0 does not answer there"):
        connect_worlds(f"127.0.0.1:{free_port()}", 1, 2, timeout=1)


def _joins_as(address: str, rank: int, size: int) -> str:
    try:
        connect_worlds(address, rank, size, timeout=1)
    except UserError as error:
        return str(error)
    return ""


def _disagree(address: str, ranks: list[int], sizes: list[int]) -> str:
    return _joins_as(address, ranks[dist.get_rank()], sizes[dist.get_rank()])


def test_one_rank_twice_and_different_sizes_are_named(world: Callable[..., Any]) -> None:
    twice = world(3, _disagree, f"127.0.0.1:{free_port()}", [0, 1, 1], [3, 3, 3])
    assert sum("two processes joined as rank 1" in message for message in twice) == 1
    sizes = world(2, _disagree, f"127.0.0.1:{free_port()}", [0, 1], [2, 3])
    assert any("expects 2 ranks, others do not: {1: '3 on" in message for message in sizes)
