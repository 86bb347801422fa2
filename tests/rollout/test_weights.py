"""The way through the loader, decided and fed without an engine: a fake one notes what it is given, and when."""

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge import agreement, compat, execute
from megatron_bridge.errors import SyncError, UserError
from megatron_bridge.groups import gather_integers
from megatron_bridge.layouts import HFLayout, MegatronLayout, VLLMLayout
from megatron_bridge.plan import make_plan
from rlflow.rollout.engine import Lifecycle, NotReady
from rlflow.rollout.weights import WeightReceiver
from tests.bridge.toys import labelled, shards, toy_experts, toy_latent
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


def _three_times(failing: int) -> list[tuple[bool, int, int]]:
    """Syncs by the loader of weights that change, one loader deaf in sync `failing`: whether what arrived was right.

    And how many plans were asked for, and how often ranks compared anything.
    """
    arch, rank = toy_experts(num_hidden_layers=6), dist.get_rank()
    checkpoint = {name: tensor.float() for name, tensor in labelled(arch).items()}
    source, layout = MegatronLayout(arch, tp=2, ep=2, etp=1), VLLMLayout(arch, tp=2, ep=True)
    receiver, found = _quantized(layout), []
    for sync in range(3):
        held = {name: tensor * 2**sync for name, tensor in shards(checkpoint, source)[rank].items()}
        deaf = sync == failing and rank == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compat, "vllm_load", loader := Loader(layout, "w2_weight" if deaf else "nothing"))
            patch.setattr(compat, "renew_vllm_derived", lambda llm: None)
            patch.setattr(execute, "make_plan", plans := Mock(side_effect=make_plan))
            patch.setattr(agreement, "gather_integers", gathers := Mock(side_effect=gather_integers))
            with contextlib.suppress(SyncError, UserError):
                receiver.receive(source, held)
        right = all(torch.equal(tensor, checkpoint[name] * 2**sync) for name, tensor in loader.given.items())
        found.append((right and len(loader.given) > 0, plans.call_count, gathers.call_count))
    return found


def test_portions_are_planned_and_compared_in_the_first_sync_only(world: Callable[..., Any]) -> None:
    """Later ones ask whether all arrived, three times; a rank that failed makes all ranks begin anew."""
    for first, second, third in world(2, _three_times, -1):
        assert first == (True, first[1], first[1] + 3)
        assert first[1] > 0
        assert second == third == (True, 0, 3)
    for first, second, third in world(2, _three_times, 1):
        assert second == (True, 0, 2)
        assert third == first


def _into_float16(held_as: torch.dtype, value: float, name: str) -> tuple[str, str, bool, bool]:
    """A sync into a float16 engine of weights of which rank 1's last has a value."""
    arch, rank = toy_latent(), dist.get_rank()
    source, layout = MegatronLayout(arch, pp=2, stages=(2, 1)), VLLMLayout(arch, 1, (0, 1))
    held = {key: torch.ones(param.shape, dtype=held_as) for key, param in source.parameters(rank).items()}
    if rank == 1:
        held[name].view(-1)[-1] = value
    filled = {
        key: torch.zeros(param.shape, dtype=torch.float32 if key.endswith("bias") else torch.float16)
        for key, param in layout.parameters(rank).items()
    }
    lifecycle, kind, message = Lifecycle(FakeEngine(), 0), "", ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "vllm_weights", lambda llm: filled)
        patch.setattr(compat, "renew_vllm_derived", lambda llm: None)
        receiver = WeightReceiver(layout, object(), torch.float16, 1 << 20, startup_proof=False)  # type: ignore[arg-type]
        try:
            with lifecycle.updating():
                receiver.receive(source, held)
        except (SyncError, UserError) as error:
            kind, message = type(error).__name__, str(error)
    with contextlib.suppress(NotReady):
        lifecycle.require_ready()
        return kind, message, True, any(tensor.isinf().any() for tensor in filled.values())
    return kind, message, False, any(tensor.any() for tensor in filled.values())


NORM = "decoder.final_layernorm.weight"
BIAS = "decoder.layers.0.mlp.router.expert_bias"


def test_a_value_that_only_float16_makes_infinite_stops_every_rank(world: Callable[..., Any]) -> None:
    healthy, harmed = world(2, _into_float16, torch.bfloat16, 65536.0, NORM)
    beyond = f"weights of rank 1: {NORM} has values beyond float16's largest, 65504: take rollout.dtype bfloat16"
    assert harmed == ("UserError", beyond, False, False)
    assert healthy == ("SyncError", "ranks [1] could not send or take their weights", False, False)


@pytest.mark.parametrize(
    ("held_as", "value", "name", "infinite"),
    [
        (torch.float16, math.inf, NORM, True),  # as it was trained
        (torch.float32, -65519.0, NORM, False),  # rounds to the largest
        (torch.float32, 1e6, BIAS, False),  # stays float32
    ],
    ids=["inf in float16", "the largest", "a bias of routers"],
)
def test_float16_is_not_blamed_for_what_it_does_not_change(
    world: Callable[..., Any], held_as: torch.dtype, value: float, name: str, infinite: bool
) -> None:
    for kind, message, ready, found in world(2, _into_float16, held_as, value, name):
        assert (kind, message, ready, found) == ("", "", True, infinite)


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
