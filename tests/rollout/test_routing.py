"""The experts that the rollout sent tokens to, from vLLM to the trainer's routers."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlflow.rollout.routing import routing_of
from tests.rollout import routing_ranks
from tests.workers import World


def test_vllm_tells_where_every_token_went(world: World, tiny_model: Callable[..., Path]) -> None:
    """In float32 the experts are those of transformers' routers: of prompts and responses, cached or computed."""
    from transformers import AutoModelForCausalLM

    folder = tiny_model("qwen3_moe", False)
    found = world(1, routing_ranks.sample_and_score, folder, "float32")[0]
    assert found.gaps["replay"].max() < 1e-4
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    chosen: list[torch.Tensor] = []
    for router in routers:
        router.register_forward_hook(
            lambda gate, inputs, _: chosen.append((inputs[0].flatten(0, -2) @ gate.weight.T).topk(2).indices)
        )
    different = total = 0
    for sample in found.samples:
        chosen.clear()
        with torch.no_grad():
            model(torch.tensor([sample.prompt.token_ids + sample.response_ids[:-1]]))
        expected, told = torch.stack(chosen, 1).sort().values, sample.routing.long().sort().values
        assert told.shape == expected.shape
        different, total = different + int((told != expected).any(-1).sum()), total + told[..., 0].numel()
    assert different <= total // 1000  # a tie within the rounding may fall either way


def test_replay_brings_the_trainers_log_probs_nearer_to_the_rollouts(
    world: World, tiny_model: Callable[..., Path]
) -> None:
    """In bfloat16 rounding sends some tokens elsewhere, which the replay mends (arXiv:2510.11370, section 4)."""
    folder = tiny_model("qwen3_moe", False, num_experts=16, num_experts_per_tok=4)
    gaps = world(1, routing_ranks.sample_and_score, folder, "bfloat16")[0].gaps
    replay, choose = gaps["replay"].mean(), gaps["choose"].mean()
    assert replay < 0.7 * choose, (replay, choose)


def completion(rows: list[list[list[int]]] | None, dtype: type = np.uint8) -> SimpleNamespace:
    return SimpleNamespace(routed_experts=None if rows is None else np.array(rows, dtype))


def test_routing_is_taken_of_layers_with_experts_and_tokens_that_were_computed() -> None:
    rows = [[[0, 0], [2, 1]], [[0, 0], [300, 4]], [[0, 0], [5, 6]]]  # layer 0 is dense
    found = routing_of(completion(rows, np.uint16), 2, [1])
    assert found.tolist() == [[[2, 1]], [[300, 4]]]
    assert found.dtype == torch.int16


@pytest.mark.parametrize(
    ("rows", "message"),
    [(None, "experts of 0 of 2 tokens"), ([[[1, 2]]], "experts of 1 of 2 tokens"),
     ([[[0, 0]], [[0, 0]]], "one expert twice")],
)  # fmt: skip
def test_missing_routing_is_an_error(rows: list[list[list[int]]] | None, message: str) -> None:
    """A kernel that chooses by itself leaves zeros."""
    with pytest.raises(RuntimeError, match=message):
        routing_of(completion(rows), 2, [0])
