"""Messages between real processes: what is sent is cast, checked, and the same on all ranks; failures are errors."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge import checksum
from megatron_bridge.errors import SyncError
from megatron_bridge.execute import Transfer, connect
from megatron_bridge.layouts import HFLayout, MegatronLayout, VLLMLayout
from megatron_bridge.layouts.part import Part
from tests.bridge.toys import empty, flip, gathered, labelled, on_arrival, shards, toy

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _weights(dtype: torch.dtype) -> dict[str, Tensor]:
    """Values that rounding changes, of every magnitude that half precision has and some that it has not."""
    return {
        name: ((tensor / 7 - 9) * 2.0 ** (tensor % 40 - 20)).to(dtype)
        for name, tensor in labelled(toy(), torch.float32).items()
    }


def _cast(source: torch.dtype, target: torch.dtype, sent: torch.dtype) -> dict[str, Tensor]:
    rank, arch = dist.get_rank(), toy()
    actor, engine = MegatronLayout(arch, pp=2), VLLMLayout(arch, 1, (0, 1))
    held, filled = shards(_weights(source), actor)[rank], empty(engine, rank, target)
    connect(actor, held, engine, filled, rank=rank, dtype=sent, bucket_bytes=1000, checksum=True).run()
    return gathered(VLLMLayout(arch), {0: filled})


def _casts() -> list[tuple[torch.dtype, torch.dtype, torch.dtype, dict[str, Tensor]]]:
    """What arrives for every pair of types, sent as the target's type and, where that is exact, as another one."""
    cases = [(source, target, target) for source in FLOATS for target in FLOATS]
    cases += [(torch.bfloat16, torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16, torch.bfloat16)]
    cases += [(torch.float32, torch.bfloat16, torch.float32), (torch.bfloat16, torch.float16, torch.float32)]
    return [(*case, _cast(*case)) for case in cases]


def test_what_arrives_is_cast_as_torch_casts(world: Callable[..., Any]) -> None:
    for found in world(2, _casts):
        for source, target, sent, arrived in found:
            for name, tensor in _weights(source).items():
                assert torch.equal(arrived[name], tensor.to(target)), (source, target, sent, name)


def _narrow() -> str:
    rank, arch = dist.get_rank(), toy()
    source, target = MegatronLayout(arch, ranks=(0,)), VLLMLayout(arch, 1, (1,))
    held, filled = labelled_shard(source, rank, torch.float32), empty(target, rank, torch.float32)
    try:
        connect(source, held, target, filled, rank=rank, dtype=torch.bfloat16).run()
    except ValueError as error:
        return str(error)
    return ""


def labelled_shard(layout: MegatronLayout, rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return shards(labelled(layout.arch, dtype), layout).get(rank, {})


def test_a_dtype_that_loses_precision_is_refused_where_no_rank_has_both_ends(world: Callable[..., Any]) -> None:
    for message in world(2, _narrow):
        assert message.startswith("torch.bfloat16 holds not all source tensors and is not all targets' type")


def _differently(settings: list[dict[str, Any]]) -> str:
    rank, arch = dist.get_rank(), toy()
    source, target = MegatronLayout(arch, tp=2), VLLMLayout(arch, 1, (0, 1))
    held, filled = labelled_shard(source, rank, torch.float32), empty(target, rank, torch.float32)
    settings = [{"dtype": torch.float32, **each} for each in settings]
    try:
        connect(source, held, target, filled, rank=rank, **settings[rank]).run()
    except SyncError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("other", [{"bucket_bytes": 1000}, {"checksum": True}], ids=["bucket", "checksum"])
def test_different_settings_are_an_error_on_all_ranks(world: Callable[..., Any], other: dict[str, Any]) -> None:
    for message in world(2, _differently, [{}, other]):
        assert message.startswith("ranks [1] planned another transfer than rank 0")


def _with_engine(engines: list[VLLMLayout]) -> str:
    rank, source = dist.get_rank(), MegatronLayout(toy(), tp=2)
    held, filled = labelled_shard(source, rank, torch.float32), empty(engines[rank], rank, torch.float32)
    try:
        connect(source, held, engines[rank], filled, rank=rank, dtype=torch.float32).run()
    except SyncError as error:
        return str(error)
    return "done"


def test_a_rank_whose_plan_sends_nothing_still_compares_it(world: Callable[..., Any]) -> None:
    """Else the other, whose plan does, would wait for it."""
    for message in world(2, _with_engine, [VLLMLayout(toy(), 2), VLLMLayout(toy(), 1, (0, 1))]):
        assert message.startswith("ranks [1] planned another transfer than rank 0")


def test_folders_may_differ_in_what_shapes_no_weights(world: Callable[..., Any]) -> None:
    """The ends of a text are said in generation_config.json, the longest one by the config."""
    arch = toy()
    other = replace(arch, eos_token_ids=(2, 3), max_positions=99, hf_config={"transformers_version": "5.0"})
    assert world(2, _with_engine, [VLLMLayout(each, 1, (0, 1)) for each in (arch, other)]) == ["done", "done"]


def test_layouts_of_files_are_compared_with_nobody(world: Callable[..., Any]) -> None:
    """Each rank reads for itself, and may do so alone."""
    assert world(2, _read_alone) == [0, 0]


def _read_alone() -> int:
    rank, arch = dist.get_rank(), toy()
    layout = MegatronLayout(arch, tp=2)
    filled = empty(layout, rank)
    files = [HFLayout(arch, (0, 1)), Part(HFLayout(arch, (0, 1)), frozenset(u.canonical for u in layout.units(0)))]
    for source in files:
        if rank == 0:
            connect(source, labelled(arch), layout, filled, rank=0, dtype=torch.int32).run()
    return 0


FINGERPRINT = """
from megatron_bridge.agreement import identity
from tests.bridge.test_exchange import *
from megatron_bridge.layouts.part import Part
source, target = MegatronLayout(toy(), tp=2), VLLMLayout(toy())
names = frozenset(unit.canonical for unit in target.units(0))
print(identity(connect(Part(source, names), {}, Part(target, names), {}, rank=7, dtype=torch.float32)))
"""


def test_processes_agree_though_they_order_sets_in_their_own_ways() -> None:
    def found(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.check_output([sys.executable, "-c", FINGERPRINT], env=environment, text=True)

    assert int(found("1")) == int(found("2"))


def _corrupt(bad_round: int, change: Callable[[Tensor], None]) -> str:
    """Change, on rank 1, the bucket that arrives in one round of the second run."""
    rank, arch = dist.get_rank(), toy()
    source, target = MegatronLayout(arch, tp=2), VLLMLayout(arch, 1, (0, 1))
    held, filled = labelled_shard(source, rank, torch.float32), empty(target, rank, torch.float32)
    transfer = connect(source, held, target, filled, rank=rank, dtype=torch.float32, bucket_bytes=1000, checksum=True)
    transfer.run()
    if rank == 1:
        on_arrival(transfer, bad_round, change)
    try:
        transfer.run()
    except SyncError as error:
        return f"{transfer.rounds} {error}"
    return ""


def swap(bucket: Tensor) -> None:
    words = bucket.view(torch.int64)
    words[:2] = words[:2].flip(0).clone()


def keep_the_last_run(bucket: Tensor) -> None:
    """As if nothing had arrived: the message of the first run, whole with its digest."""
    bucket.view(torch.int64)[-1] -= 1 << 20


@pytest.mark.parametrize("change", [flip, swap, keep_the_last_run])
def test_what_did_not_arrive_as_sent_is_an_error_on_all_ranks(
    world: Callable[..., Any], change: Callable[[Tensor], None]
) -> None:
    healthy, harmed = world(2, _corrupt, 1, change)
    rounds = harmed.split()[0]
    assert (
        f"other bytes arrived than were sent: round 2 of {rounds}, rank 0 to rank 1, model.embed_tokens.weight"
        in harmed
    )
    assert harmed.endswith(" to lm_head.weight")  # the range of parameters
    assert healthy == f"{rounds} other bytes arrived at ranks [1] than were sent"


def test_digests_see_order_and_every_bit() -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (3 * checksum.CHUNK + 5,))
    digest = checksum.digest(words)
    for place in (0, checksum.CHUNK, 3 * checksum.CHUNK + 4):
        for bit in (0, 63):
            other = words.clone()
            other[place] ^= -(2**63) if bit == 63 else 1
            assert checksum.digest(other) != digest
    assert checksum.digest(words.flip(0)) != digest
    assert checksum.digest(words.roll(checksum.CHUNK)) != digest
    assert checksum.digest(words.clone()) == digest


def test_buckets_are_no_larger_than_needed_and_given_back() -> None:
    arch = toy()
    source, target = MegatronLayout(arch, tp=2), VLLMLayout(arch)
    held = labelled_shard(source, 1, torch.float32)
    transfer = connect(source, held, target, {}, rank=1, dtype=torch.float32)
    assert isinstance(transfer, Transfer)
    sent = transfer.plan.sent_bytes(1)
    assert sent <= transfer.buckets.nbytes // 2 < sent + 16  # two buckets of what it sends, none to receive
    bucket = transfer.phases[0].exchange.pack(0)
    assert bucket.untyped_storage().nbytes() == bucket.nbytes < sent + 16
    transfer.release()
    assert not transfer.buckets.outgoing[0]
