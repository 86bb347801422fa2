"""The way through the loader, decided and fed without an engine: a fake one notes what it is given, and when."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge import compat
from megatron_bridge.errors import SyncError, UserError
from megatron_bridge.layouts import HFLayout, MegatronLayout, VLLMLayout
from rlflow.rollout.engine import Lifecycle, NotReady
from rlflow.rollout.weights import WeightReceiver
from tests.bridge.toys import labelled, shards, toy_experts
from tests.rollout.test_engine import FakeEngine

BUCKET = 512  # bytes: an expert's projection is 128, an attention matrix 256, an embedding 1,184


class Loader:
    """Stands in for `compat.vllm_load`: remembers tensors, and fills all parameters but those named."""

    def __init__(self, layout: VLLMLayout, left_out: str = "nothing") -> None:
        self.layout, self.left_out = layout, left_out
        self.given: dict[str, Tensor] = {}

    def __call__(self, llm: Any, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        for name, tensor in tensors:
            assert name not in self.given
            self.given[name] = tensor
        return {name for name in self.layout.parameters(dist.get_rank()) if self.left_out not in name}


def _quantized(layout: VLLMLayout) -> WeightReceiver:
    """A receiver for an engine that would fail at any look into it."""
    return WeightReceiver(layout, object(), torch.float32, BUCKET, startup_proof=True, quantized=True)  # type: ignore[arg-type]


def _through_the_loader() -> dict[str, Any]:
    arch, rank = toy_experts(), dist.get_rank()
    checkpoint = {name: tensor.float() for name, tensor in labelled(arch).items()}
    source, layout = MegatronLayout(arch, tp=2, ep=2, etp=1), VLLMLayout(arch, tp=2, ep=True)
    receiver = _quantized(layout)
    sent = max(sum(tensor.nbytes for tensor in receiver._empty(one.of(receiver._wanted)).values())
               for one in receiver._portions)  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "vllm_load", loader := Loader(layout))
        patch.setattr(compat, "renew_vllm_derived", lambda llm: None)
        traffic = receiver.receive(source, shards(checkpoint, source)[rank])
    return {
        "decision": receiver.decision, "in place": receiver.in_place, "largest": sent, "names": set(loader.given),
        "equal": all(torch.equal(tensor, checkpoint[name]) for name, tensor in loader.given.items()),
        "bytes": traffic.local + traffic.received, "given": sum(tensor.nbytes for tensor in loader.given.values()),
    }  # fmt: skip


def test_a_quantizing_engine_gets_everything_through_its_loader(world: Callable[..., Any]) -> None:
    """No look at its parameters, no proof; each rank's loader gets its own experts, in bounded portions."""
    everything = set(HFLayout(toy_experts(), (0,)).parameters(0))
    for rank, seen in enumerate(world(2, _through_the_loader)):
        assert seen["decision"] == "weights go through vLLM's loader, which quantises them"
        assert not seen["in place"]
        others = {name for name in everything if ".experts." in name and int(name.split(".")[5]) // 2 != rank}
        assert seen["names"] == everything - others
        assert seen["equal"]
        assert seen["bytes"] == seen["given"]
        assert seen["largest"] == 37 * 8 * 4  # the embedding, the one tensor above the bucket


def _with_a_deaf_loader() -> tuple[str, str, bool]:
    arch, rank = toy_experts(), dist.get_rank()
    source, layout = MegatronLayout(arch, tp=2), VLLMLayout(arch, tp=2)
    receiver, lifecycle = _quantized(layout), Lifecycle(FakeEngine(), 0)
    held = shards({name: tensor.float() for name, tensor in labelled(arch).items()}, source)[rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "vllm_load", Loader(layout, "w2_weight" if rank == 1 else "nothing"))
        patch.setattr(compat, "renew_vllm_derived", lambda llm: None)
        try:
            with lifecycle.updating():
                receiver.receive(source, held)
        except (SyncError, UserError) as error:
            with pytest.raises(NotReady):
                lifecycle.require_ready()
            return type(error).__name__, str(error), True
    return "", "", False


def test_what_a_loader_passes_over_stops_every_rank(world: Callable[..., Any]) -> None:
    """cases.md A29: a stream that matches nothing of a parameter is an error, not a half-updated engine."""
    (kind, message, refused), (kind_1, message_1, refused_1) = world(2, _with_a_deaf_loader)
    assert (kind_1, kind) == ("UserError", "SyncError")
    assert "vLLM's loader took nothing for model.layers.0.mlp.experts.w2_weight" in message_1
    assert message == "ranks [1] could not send or take their weights"
    assert refused
    assert refused_1


def _with_moved_tensors(moved: int) -> bool:
    arch, rank = toy_experts(), dist.get_rank()
    source, layout = MegatronLayout(arch, tp=2), VLLMLayout(arch, tp=2)
    checkpoint = {name: tensor.float() for name, tensor in labelled(arch).items()}
    held, due = shards(checkpoint, source)[rank], shards(checkpoint, layout)[rank]
    filled = {name: torch.zeros_like(tensor) for name, tensor in due.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "vllm_weights", lambda llm: filled)
        patch.setattr(compat, "renew_vllm_derived", lambda llm: None)
        receiver = WeightReceiver(layout, object(), torch.float32, BUCKET, startup_proof=False, checksum=True)  # type: ignore[arg-type]
        receiver.receive(source, held)
        if rank == moved:
            held = {name: tensor.clone() for name, tensor in held.items()}
        for tensor in held.values():
            tensor.mul_(2)
        receiver.receive(source, held)
    return all(torch.equal(filled[name], 2 * tensor) for name, tensor in due.items())


def test_tensors_of_one_rank_may_move_between_syncs(world: Callable[..., Any]) -> None:
    """As they do where weights were offloaded: all ranks bind anew then, because a new transfer agrees on its plan."""
    assert world(2, _with_moved_tensors, 1) == [True, True]
