"""Transfers on real gloo processes: bitwise, in capped buckets, moving the bytes that the plan states."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_bridge.errors import UserError
from megatron_bridge.execute import Transfer, connect
from megatron_bridge.layouts import HFLayout, Layout, MegatronLayout, VLLMLayout
from megatron_bridge.plan import make_plan
from tests.bridge.toys import empty, gathered, labelled, shards, toy

WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 130, "tie_word_embeddings": True}


def _sync(source: Layout, target: Layout, bucket_bytes: int) -> dict[str, Any]:
    """Run a transfer twice, the second time after the weights changed and one storage moved."""
    rank = dist.get_rank()
    held = shards(labelled(source.arch), source).get(rank, {})
    filled = empty(target, rank)
    transfer = connect(source, held, target, filled, rank=rank, dtype=torch.int32, bucket_bytes=bucket_bytes)
    transfer.run()
    for tensor in held.values():
        tensor.data = tensor + (tensor != 0).int()
    traffic = transfer.run()
    plan = transfer.plan
    moved = (traffic.local, traffic.received, traffic.sent)
    assert moved == (plan.local_bytes(rank), plan.received_bytes(rank), plan.sent_bytes(rank))
    assert not any(filled[name].view(-1)[-elements:].any() for name, elements in target.padding(rank).items())
    return {"tensors": filled, "received": traffic.received, "rounds": transfer.rounds}


@pytest.mark.parametrize(
    ("megatron", "vllm", "received"),
    [
        ({"tp": 2}, {"tp": 1, "ranks": (0,)}, True),
        ({"tp": 2}, {"tp": 1, "ranks": (0, 1)}, True),
        ({"pp": 2}, {"tp": 2}, True),
        ({"tp": 1, "dp": 2}, {"tp": 2}, False),
        ({"pp": 2}, {"tp": 1, "ranks": (0, 1)}, True),
        ({"tp": 2}, {"tp": 2}, False),
    ],
    ids=["TP2-TP1", "TP2-TP1x2", "PP2-TP2", "TP1-TP2", "PP2-TP1x2", "TP2-TP2"],
)
def test_sync_into_vllm(world: Callable[..., Any], megatron: dict, vllm: dict, received: bool) -> None:
    arch = toy(model_type="qwen2", **WIDE)
    source, target = MegatronLayout(arch, **megatron), VLLMLayout(arch, **vllm)
    results = world(2, _sync, source, target, 1000)
    assert any(result["received"] for result in results) == received
    assert len({result["rounds"] for result in results}) == 1
    assert (results[0]["rounds"] > 1) == received
    back = gathered(target, {rank: results[rank]["tensors"] for rank in target.ranks})
    assert all(torch.equal(back[name], tensor + 1) for name, tensor in labelled(arch).items())


def test_rollout_on_a_subset_of_ranks(world: Callable[..., Any]) -> None:
    arch = toy(num_hidden_layers=3)
    target = VLLMLayout(arch, 2, (2, 0))
    results = world(3, _sync, MegatronLayout(arch, pp=3), target, 1000)
    assert results[1]["tensors"] == {}
    back = gathered(target, {rank: results[rank]["tensors"] for rank in target.ranks})
    assert all(torch.equal(back[name], tensor + 1) for name, tensor in labelled(arch).items())


def _sync_in_two_phases(source: Layout, target: Layout) -> dict[str, Any]:
    rank = dist.get_rank()
    held, filled = shards(labelled(source.arch), source).get(rank, {}), empty(target, rank)
    transfer = connect(
        source, held, target, filled, rank=rank, dtype=torch.int32, bucket_bytes=1000, ranks_per_node=2, checksum=True
    )
    traffic = [transfer.run() for _ in range(2)][1]
    return {"tensors": filled, "phases": len(transfer.phases), "moved": (traffic.received, traffic.sent)}


def test_what_two_engines_of_a_node_need_crosses_once_and_is_passed_on(world: Callable[..., Any]) -> None:
    arch = toy()
    source, target = MegatronLayout(arch, tp=2), VLLMLayout(arch, 1, (2, 3))
    results = world(4, _sync_in_two_phases, source, target)
    assert [result["phases"] for result in results] == [2] * 4
    model = sum(tensor.nbytes for tensor in labelled(arch).values())
    assert sum(result["moved"][1] for result in results[:2]) == model
    assert [result["moved"][0] for result in results] == [0, 0, model, model]
    for rank in (2, 3):
        back = gathered(VLLMLayout(arch), {0: results[rank]["tensors"]})
        assert all(torch.equal(back[name], tensor) for name, tensor in labelled(arch).items())


def _send_cast() -> dict[str, torch.Tensor]:
    rank, arch = dist.get_rank(), toy()
    source, target = MegatronLayout(arch, pp=2), VLLMLayout(arch, 1, (0, 1))
    held = {name: tensor / 7 for name, tensor in shards(labelled(arch, torch.float32), source)[rank].items()}
    filled = empty(target, rank, torch.bfloat16)
    connect(source, held, target, filled, rank=rank, dtype=torch.bfloat16).run()
    return filled


def test_senders_cast_as_local_copies_do(world: Callable[..., Any]) -> None:
    first, second = world(2, _send_cast)
    assert all(torch.equal(first[name], second[name]) for name in first)
    expected = (labelled(toy(), torch.float32)["model.norm.weight"] / 7).bfloat16()
    assert torch.equal(first["model.norm.weight"], expected)


def test_wrong_tensors_are_named() -> None:
    arch = toy()
    layout, source = MegatronLayout(arch), HFLayout(arch, (0,))
    tensors = empty(layout, 0)
    tensors["extra"] = tensors.pop("output_layer.weight")
    tensors["decoder.final_layernorm.weight"] = torch.zeros(9)
    with pytest.raises(UserError) as error:
        connect(source, labelled(arch), layout, tensors, rank=0, dtype=torch.int32)
    assert "output_layer.weight is missing" in str(error.value)
    assert "decoder.final_layernorm.weight is [9], expected [8]" in str(error.value)
    assert "extra has no place in the layout" in str(error.value)


def test_a_lossy_dtype_is_refused() -> None:
    arch = toy()
    layout = MegatronLayout(arch)
    plan = make_plan(HFLayout(arch, (0,)), layout, itemsize=2)
    tensors = empty(layout, 0, torch.float32)
    with pytest.raises(ValueError, match="would lose precision"):
        Transfer(plan, labelled(arch), tensors, rank=0, dtype=torch.bfloat16)
