"""Routed experts in training: the auxiliary loss, the load that is measured, and replayed routing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.batch import Batch
from rlflow.batch.routing import ROUTING
from tests.roles.expert_runs import replayed, routed_batch, step, steps
from tests.roles.runs import Case, threads_after_an_engine
from tests.roles.samples import random_batch, reference_scores
from tests.workers import World

EXPERTS, PER_TOKEN = 4, 2  # of tests.tiny's qwen3_moe, in its layers 0, 2 and 3
COEF = 3.0
WHOLE = {"micro_batch_tokens": 4000, "share_prompts": False}
LOAD = ("engine/moe_tokens_max_over_mean", "engine/moe_balance_entropy", "engine/moe_aux_loss")

CUTS = [
    Case("small micro-batches", 1),
    Case("two replicas", 2, options={"micro_batch_tokens": 60}),
    Case("pipeline of chunks, recomputed", 2, {"pipeline": 2}, {"virtual_pipeline": 2, "recompute": "full"}),
    Case("context", 2, {"context": 2}),
    Case("experts and tensors", 4, {"tensor": 2, "expert": 2, "expert_tensor": 1}, {"sequence_parallel": True}),
]


def relative_gap(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference in a tensor over the tensor's largest element."""
    gaps = [(found[name] - expected[name]).abs().max() / expected[name].abs().max() for name in expected]
    return max(gaps).item()


def gates(folder: Path, batch: Batch) -> tuple[Any, list[Tensor]]:
    """transformers' model, and for each layer with experts the logits of all rows that training computes: [rows, 4]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    logits: list[list[Tensor]] = [[] for _ in routers]
    for router, found in zip(routers, logits, strict=True):
        router.register_forward_hook(
            lambda gate, inputs, _, found=found: found.append(inputs[0].flatten(0, -2) @ gate.weight.T)
        )
    for sample, prompt in enumerate(batch.prompt_of.tolist()):
        ids = torch.cat([batch.prompts.row(prompt), batch.responses.row(sample)])
        model(ids[None, :-1])  # the last token predicts nothing and is no row
    return model, [torch.cat(found) for found in logits]


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3_moe", False)


def test_an_engine_with_experts_leaves_nothing_behind(world: World, folder: Path) -> None:
    """Its token dispatchers keep tensors with gradients, by which these hold the model."""
    first, *later = (world(1, threads_after_an_engine, folder)[0] for _ in range(3))
    assert later == [first, first]


def test_the_loss_is_the_papers_over_all_rows_of_the_step(world: World, folder: Path) -> None:
    """E · Σ fᵢ·Pᵢ of each layer (arXiv:2101.03961, eq. 4), here by transformers' routers and autograd."""
    model, logits = gates(folder, random_batch())
    losses, peaks = [], []
    for layer in logits:
        chosen = torch.zeros_like(layer).scatter(1, layer.topk(PER_TOKEN).indices, 1.0)
        shares = chosen.sum(0) / chosen.sum()
        losses.append(EXPERTS * (shares * layer.softmax(-1).mean(0)).sum())
        peaks.append(shares.max().item() * EXPERTS)
    (COEF * torch.stack(losses).sum()).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    moves, metrics = world(1, step, folder, Case("", 1, {}, {"moe_aux_loss_coef": COEF}), None, False)[0]
    compared = [name for name in gradients if name in moves]
    assert sum(".gate." in name for name in compared) == 3
    expected = {name: -gradients[name] / (gradients[name].abs() + 1.0) for name in compared}  # see READ_OFF
    assert relative_gap(moves, expected) < 1e-4
    assert metrics["engine/moe_aux_loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert metrics["engine/moe_tokens_max_over_mean"] == pytest.approx(max(peaks), rel=1e-6)


@pytest.mark.parametrize("replay", [False, True], ids=["routers choose", "replay"])
def test_gradients_and_load_do_not_depend_on_the_cut(world: World, folder: Path, replay: bool) -> None:
    """cases.md B05 for experts: any budget, any grid, prompts shared or not."""
    options = {"moe_aux_loss_coef": COEF, "router_replay": replay}
    expected, load = world(1, steps, folder, [Case("", 1, {}, options | WHOLE)], replay)[0][0]
    without, _ = world(1, steps, folder, [Case("", 1, {}, options | {"moe_aux_loss_coef": 0.0})], replay)[0][0]
    assert relative_gap(without, expected) > 0.1, "the loss moves nothing"
    for case in CUTS:
        cut = Case(case.name, case.ranks, case.grid, case.options | options)
        moves, metrics = world(case.ranks, steps, folder, [cut], replay)[0][0]
        assert relative_gap(moves, expected) < 1e-5, case.name
        assert [metrics[name] for name in LOAD] == pytest.approx([load[name] for name in LOAD], rel=1e-6), case.name


def test_a_micro_batchs_own_loss_is_that_of_all_rows_where_it_has_them_all(world: World, folder: Path) -> None:
    options = {"moe_aux_loss_coef": COEF} | WHOLE
    both = [Case(over, 1, {}, options | {"moe_aux_loss": over}) for over in ("global", "micro-batch")]
    (expected, _), (alone, _) = world(1, steps, folder, both)[0]
    assert relative_gap(alone, expected) < 1e-6
    split = Case("", 2, {"tensor": 2}, both[1].options | {"sequence_parallel": True})
    assert relative_gap(world(2, steps, folder, [split])[0][0][0], expected) < 1e-5
    cut = Case("", 1, {}, both[1].options | {"micro_batch_tokens": 60})
    assert relative_gap(world(1, steps, folder, [cut])[0][0][0], expected) > 1e-3


def routing_by_transformers(folder: Path) -> Batch:
    """The random batch with the experts that transformers sends its tokens to; each prompt's by its first sample."""
    batch = routed_batch()
    _, logits = gates(folder, batch)
    chosen = torch.stack([layer.topk(PER_TOKEN).indices for layer in logits], 1).flatten(1).to(torch.uint8)
    row = 0
    for sample, prompt in enumerate(batch.prompt_of.tolist()):
        before, grown = int(batch.prompts.lengths[prompt]), int(batch.responses.lengths[sample]) - 1
        batch.prompt_tokens[ROUTING][batch.prompts.value_index(torch.tensor([prompt]))] = chosen[row : row + before]
        own = batch.responses.value_index(torch.tensor([sample]))[:grown]
        batch.tokens[ROUTING][own] = chosen[row + before : row + before + grown]
        row += before + grown
    return batch


@pytest.mark.parametrize(
    "case",
    [Case("alone", 1), Case("context", 2, {"context": 2}),
     Case("tensors", 2, {"tensor": 2}, {"sequence_parallel": True})],
    ids=lambda case: case.name,
)  # fmt: skip
def test_tokens_go_where_the_batch_says(world: World, folder: Path, case: Case) -> None:
    """With the routing of transformers its log-probs; with one token sent elsewhere, others from that token on."""
    right = routing_by_transformers(folder)
    wrong = routing_by_transformers(folder)
    sample, token = 5, 3
    place = int(right.responses.offsets[sample]) + token
    first_layer = wrong.tokens[ROUTING][place, :PER_TOKEN]
    first_layer.copy_(torch.tensor([expert for expert in range(EXPERTS) if expert not in first_layer.tolist()]))
    replay = Case(case.name, case.ranks, case.grid, case.options | {"router_replay": True})
    found, changed = world(case.ranks, replayed, folder, replay, [right, wrong])[0]
    torch.testing.assert_close(found, reference_scores(folder, right)[0], atol=1e-4, rtol=1e-4)
    different = (found - changed).abs() > 1e-4
    end = int(right.responses.offsets[sample + 1])
    assert different[place + 1 : end].all()
    assert not different[: place + 1].any()
    assert not different[end:].any()
