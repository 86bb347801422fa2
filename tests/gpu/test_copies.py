"""The copy kernel, the streams of an exchange and the digests on one GPU; the exchange goes from the GPU to itself."""

import random
from collections.abc import Iterator
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge import checksum
from megatron_bridge.copies import FLOATS, FusedCopies
from megatron_bridge.exchange import Buckets, Exchange
from megatron_bridge.execute import connect
from megatron_bridge.groups import Group, gather_integers
from megatron_bridge.layouts import MegatronLayout, VLLMLayout
from megatron_bridge.plan import Copy, Place
from megatron_bridge.streams import messages
from megatron_bridge.worlds import connect_worlds
from tests.bridge.regions import random_case
from tests.bridge.toys import empty, gathered, labelled, shards, toy
from tests.gpu.devices import needs_gpus
from tests.workers import World, free_port

pytestmark = needs_gpus(1)

ROUNDS, MIB = 24, 1 << 20


@pytest.mark.parametrize("seed", range(3))
def test_odd_sizes_gaps_transposes_and_casts(seed: int) -> None:
    rng, kinds = random.Random(seed), set()
    for _ in range(80):
        case = random_case(rng, rng.choice([50, 300, 40_000]), "cuda")
        copies = FusedCopies(case.copies, *case.ends)
        copies.run()
        assert not copies._plain
        kinds |= {kind for kind, _ in copies._launches}
        assert torch.equal(case.target, case.expected), case
    assert len(kinds) > 15


def test_casts_of_every_bit_pattern_are_those_of_torch() -> None:
    patterns = torch.arange(-(2**15), 2**15, device="cuda", dtype=torch.int32)
    wide = torch.cat([patterns << 16 | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    for source in FLOATS:
        values = (wide if source == torch.float32 else patterns.to(torch.int16)).view(source)
        values = values[~values.isnan()]  # of a NaN nothing but that it is one is promised
        for target in FLOATS:
            found = torch.empty(len(values), dtype=target, device="cuda")
            copy = Copy((len(values),), Place(0, "a", 0, (1,)), Place(0, "b", 0, (1,)))
            FusedCopies([copy], {"a": values}, {"b": found}).run()
            assert torch.equal(found.view(torch.uint8), values.to(target).view(torch.uint8)), (source, target)


def test_tables_stay_until_a_tensor_moves() -> None:
    source, target = ({name: torch.arange(1000, device="cuda")} for name in "ab")
    copies = FusedCopies([Copy((1000,), Place(0, "a", 0, (1,)), Place(0, "b", 0, (1,)))], source, target)
    copies.run()
    ((_, table),) = copies._launches
    source["a"] += 1
    copies.run()
    assert copies._launches[0][1] is table
    assert torch.equal(target["b"], torch.arange(1, 1001, device="cuda"))
    kept = source["a"]
    source["a"] = kept + 1
    copies.run()
    assert torch.equal(target["b"], torch.arange(2, 1002, device="cuda"))


def test_tables_follow_a_bucket_that_is_allocated_anew() -> None:
    copy = [Copy((4096,), Place(0, name, 0, (1,)), Place(0, "bucket", 4096 * at, (1,))) for at, name in enumerate("ab")]
    source = {name: torch.randn(4096, device="cuda") for name in "ab"}
    target = {"bucket": torch.zeros(8192, device="cuda")}
    copies = FusedCopies(copy, source, target)
    copies.run()
    ((_, table),) = copies._launches
    kept, target["bucket"] = target["bucket"], torch.zeros(8192, device="cuda")
    copies.run()
    assert copies._launches[0][1] is table
    assert torch.equal(target["bucket"], torch.cat(list(source.values())))
    source["a"] = source["a"].clone() + 1  # of two tensors one moves: all is built anew
    copies.run()
    assert copies._launches[0][1] is not table
    assert torch.equal(target["bucket"], torch.cat(list(source.values())))
    assert torch.equal(kept[4096:], source["b"])


def test_a_transfer_on_the_gpu_is_that_of_the_cpu() -> None:
    arch = toy(model_type="qwen2", num_key_value_heads=2)
    layout, engine = MegatronLayout(arch), VLLMLayout(arch)
    held = {name: (tensor / 7).cuda() for name, tensor in shards(labelled(arch, torch.float32), layout)[0].items()}
    filled = {
        name: torch.full(param.shape, torch.nan, dtype=torch.bfloat16, device="cuda")
        for name, param in engine.parameters(0).items()
    }
    connect(layout, held, engine, filled, rank=0, dtype=torch.bfloat16).run()
    back = gathered(engine, {0: {name: tensor.cpu() for name, tensor in filled.items()}})
    assert all(
        torch.equal(back[name], (tensor / 7).bfloat16()) for name, tensor in labelled(arch, torch.float32).items()
    )


@pytest.fixture(scope="module")
def to_itself() -> Iterator[Group]:
    """A group of this process alone over NCCL, made as two jobs make theirs."""
    torch.cuda.set_device(0)
    group = connect_worlds(f"127.0.0.1:{free_port()}", 0, 1, "nccl", timeout=60)
    yield group
    group.shutdown()


def exchange_of_rows(source: dict[str, Tensor], target: dict[str, Tensor], sent: torch.dtype) -> Exchange:
    """From a tensor to one of its size, its rows in another order, in many rounds."""
    rows, columns = source["a"].shape
    copies = [
        Copy((1, columns), Place(0, "a", row * columns, (columns, 1)), Place(0, "b", to * columns, (columns, 1)))
        for row, to in enumerate(random.Random(0).sample(range(rows), rows))
    ]
    sends, receives = {0: messages(copies, ROUNDS, "source", 8)}, {0: messages(copies, ROUNDS, "target", 8)}
    buckets = Buckets(torch.device("cuda", 0), sent)
    return Exchange(sends, receives, source, target, buckets, rank=0, rounds=ROUNDS, digests=True)


@pytest.mark.parametrize("sent", [torch.bfloat16, torch.float32])
def test_rounds_overlap_without_overtaking(to_itself: Group, sent: torch.dtype) -> None:
    source = {"a": torch.randn(96, MIB + 8, device="cuda")}
    target = {"b": torch.full(source["a"].shape, torch.nan, device="cuda", dtype=torch.bfloat16)}
    exchange = exchange_of_rows(source, target, sent)
    order = random.Random(0).sample(range(96), 96)
    for _ in range(3):
        source["a"].normal_()
        target["b"].fill_(torch.nan)
        exchange.run(to_itself, lambda: torch.cuda._sleep(10_000_000))
        assert torch.equal(target["b"][order], source["a"].bfloat16())
        assert exchange.faults() == []
    buckets = exchange._buckets.nbytes
    assert buckets < 4 * (prod(source["a"].shape) * sent.itemsize / ROUNDS + MIB)


def test_a_wrong_bit_is_found_on_the_gpu(to_itself: Group) -> None:
    source = {"a": torch.randn(8, MIB, device="cuda")}
    exchange = exchange_of_rows(source, {"b": torch.empty_like(source["a"])}, torch.float32)
    unpack = exchange.unpack

    def harmed(k: int) -> None:
        if k == 5:
            exchange.incoming(k)[1000] ^= 4
        unpack(k)

    exchange.unpack = harmed  # type: ignore[method-assign]
    exchange.run(to_itself, lambda: None)
    assert exchange.faults() == [f"round 6 of {ROUNDS}, rank 0 to rank 0, b"]


def test_digests_are_the_same_on_the_cpu(to_itself: Group) -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (70 * checksum.CHUNK + 3,))
    assert checksum.digest(words.cuda()).cpu() == checksum.digest(words)
    assert gather_integers(to_itself, [2**62, -1]) == [[2**62, -1]]


def _through_host_memory(source: MegatronLayout, target: VLLMLayout) -> dict[str, Tensor]:
    """A transfer over gloo, whose buckets lie in host memory, between two processes' tensors on the GPU."""
    rank = dist.get_rank()
    held = {name: tensor.cuda() for name, tensor in shards(labelled(source.arch), source)[rank].items()}
    filled = {name: tensor.cuda() for name, tensor in empty(target, rank).items()}
    connect(source, held, target, filled, rank=rank, dtype=torch.int32, bucket_bytes=1000, checksum=True).run()
    return {name: tensor.cpu() for name, tensor in filled.items()}


def test_gloo_carries_tensors_of_the_gpu(world: World) -> None:
    arch = toy()
    found = world(2, _through_host_memory, MegatronLayout(arch, pp=2), VLLMLayout(arch, 2))
    back = gathered(VLLMLayout(arch, 2), dict(enumerate(found)))
    assert all(torch.equal(back[name], tensor) for name, tensor in labelled(arch).items())
