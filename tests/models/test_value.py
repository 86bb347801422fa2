"""Value models: transformers' score of every token on each grid, its gradient, and heads made for a language model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megatron_bridge.bind_megatron import bind
from megatron_bridge.checkpoints import load_hf
from megatron_bridge.families import load_architecture
from megatron_bridge.layouts import MegatronLayout
from megatron_bridge.score import load_language_model, with_score_head
from tests.roles.samples import random_batch

GRIDS: list[tuple[int, dict[str, int], bool]] = [
    (1, {}, False), (2, {"tensor": 2}, False), (2, {"tensor": 2}, True), (2, {"pipeline": 2}, False),
]  # fmt: skip


def build(folder: Path, grid_options: dict[str, Any], sequence_parallel: bool, head: str | None = None) -> Any:
    """The grid, this rank's stage with its weights, and its parameters by name."""
    from rlflow import parallel
    from rlflow.models import build_value, transformer_config

    parallel.initialize(60, 0)
    grid = parallel.Grid(**grid_options)
    arch = load_architecture(folder) if head is None else with_score_head(load_architecture(folder))
    layout = MegatronLayout(arch, grid.tp, grid.pp, grid.dp)
    config = transformer_config(arch, grid, torch.float32, sequence_parallel=sequence_parallel)
    model = build_value(arch, grid, config, padded_vocab=layout.padded_vocab)
    bound = bind(model, layout, grid.rank)
    if head is None:
        load_hf(folder, layout, bound, rank=grid.rank)
    else:
        load_language_model(folder, layout, bound, rank=grid.rank, head=head, seed=3)  # type: ignore[arg-type]
    return grid, model, bound


def values(folder: Path, grid_options: dict[str, Any], sequence_parallel: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """On the last stage the values of all response tokens' predicting rows; gradients of their sum of squares."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from rlflow import parallel
    from rlflow.batch import pack
    from rlflow.models import Scoring, pack_input

    grid, model, bound = build(folder, grid_options, sequence_parallel)
    batch = random_batch()
    packed = pack(batch, [list(range(len(batch)))], share_prompts=True, multiple=2)
    found: list[Tensor] = []

    def step(micro_batches: Any, stage: Any) -> Any:
        micro_batch = next(micro_batches)
        scoring = Scoring(micro_batch.predict_at, micro_batch.targets)
        input_ = pack_input(micro_batch, stage.ropes, torch.float32, scoring)
        output = stage(micro_batch.token_ids[None], micro_batch.position_ids[None], None, packed_seq_params=input_)

        def loss(scores: Tensor) -> Any:
            assert (scores.shape, scores.dtype) == (micro_batch.token_ids.shape, torch.float32)
            chosen = torch.empty(len(micro_batch.token_index))
            chosen[micro_batch.token_index] = scores.detach()[micro_batch.predict_at]
            found.append(chosen)
            return (scores[micro_batch.predict_at] ** 2).sum(), torch.zeros((), dtype=torch.int), {}

        return output, loss

    with parallel.active(grid):
        get_forward_backward_func()(
            forward_step_func=step, data_iterator=iter(packed), model=model, num_microbatches=1,
            seq_length=1, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
    gradients = {name: tensor.grad for name, tensor in bound.items() if tensor.grad is not None}
    if sequence_parallel:  # what megatron's `finalize_model_grads` does with a parameter marked so
        assert bound["output_layer.weight"].sequence_parallel
        dist.all_reduce(gradients["output_layer.weight"], group=grid.groups.tp)
    return (found[0] if found else torch.empty(0)), gradients


def reference(folder: Path) -> tuple[Tensor, Tensor]:
    """Scores of all response tokens by transformers, and the head's gradient of their sum of squares."""
    from transformers import AutoModelForSequenceClassification

    model, batch = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32), random_batch()
    scores = []
    for sample, prompt in enumerate(batch.prompt_of.tolist()):
        ids = torch.cat([batch.prompts.row(prompt), batch.responses.row(sample)])
        scores.append(
            model.score(model.model(ids[None]).last_hidden_state)[0, batch.prompts.lengths[prompt] - 1 : -1, 0]
        )
    joined = torch.cat(scores)
    (joined**2).sum().backward()
    return joined.detach(), model.score.weight.grad


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_values_are_those_of_transformers(
    world: Callable[..., Any], tiny_model: Callable[..., Path], family: str
) -> None:
    folder = tiny_model(family, tied=False, score=True)
    assert load_architecture(folder).head == "score"
    expected, gradient = reference(folder)
    for ranks, grid, sequence_parallel in GRIDS:
        last = world(ranks, values, folder, grid, sequence_parallel)[-1]
        assert (last[0] - expected).abs().max() < 1e-4, grid
        assert torch.allclose(
            last[1]["output_layer.weight"], gradient, rtol=1e-4, atol=1e-3 * gradient.abs().max().item()
        )


def made(folder: Path, grid_options: dict[str, Any], head: str) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in build(folder, grid_options, False, head)[2].items()}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_head_is_made_for_a_language_model(
    world: Callable[..., Any], tiny_model: Callable[..., Path], tied: bool
) -> None:
    folder = tiny_model("qwen2", tied=tied)
    checkpoint = load_file(folder / "model.safetensors")
    for held in world(2, made, folder, {"tensor": 2}, "zero"):
        assert held["output_layer.weight"].tolist() == [[0.0] * 128]
        assert torch.equal(held["decoder.final_layernorm.weight"], checkpoint["model.norm.weight"])
    first_stage, last_stage = world(2, made, folder, {"pipeline": 2}, "zero")
    assert "output_layer.weight" not in first_stage
    assert last_stage["output_layer.weight"].shape == (1, 128)
    first, second = world(2, made, folder, {"tensor": 2}, "random")
    assert torch.equal(first["output_layer.weight"], second["output_layer.weight"])
    assert first["output_layer.weight"].std().item() == pytest.approx(128**-0.5, rel=0.2)
