"""Context parallelism on GPUs: each rank's chunks through the kernel on one, log-probs and gradients over two."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlflow.batch import MicroBatch, pack
from rlflow.batch.zigzag import context_rows
from tests.gpu import ranks
from tests.gpu.devices import needs_gpus, needs_transformer_engine
from tests.roles.runs import Case
from tests.roles.test_engine import GRADIENT_STEP, assert_same_change
from tests.workers import World

pytestmark = needs_gpus(1)
two_gpus = needs_gpus(2)[1]

WINDOW = 64
HEADS, GROUPS, SIZE = 8, 2, 64


def attend_and_learn(
    micro_batch: MicroBatch, dtype: torch.dtype, window: int, states: list[Tensor], upstream: Tensor
) -> list[Tensor]:
    """Output of the attention of the micro-batch, or of a rank's part of it, and gradients, in float32."""
    from rlflow.models import Scoring, pack_input
    from rlflow.models.attention import attend, attend_varlen
    from rlflow.models.rope import Rope, Ropes, inverse_frequencies

    rope = Rope(inverse_frequencies(1e4, SIZE))
    scoring = Scoring(micro_batch.predict_at, micro_batch.targets)
    packed = pack_input(micro_batch, Ropes(rope, rope, WINDOW).to(torch.device("cuda")), dtype, scoring)
    plan = packed.windowed.plan if window and packed.windowed is not None else packed.plan
    query, key, value = (each.to(dtype, copy=True).requires_grad_() for each in states)
    if plan is None:
        out = attend_varlen(query, key, value, packed, SIZE**-0.5, window)
    else:
        out = attend(query, key, value, plan, SIZE**-0.5)
    gradients = torch.autograd.grad(out, (query, key, value), upstream.to(dtype))
    return [each.detach().float() for each in (out, *gradients)]


def kernel_against_float32(size: int, window: int) -> list[float]:
    """Mean differences of output, query, key and value, over mean values: all ranks' chunks together."""
    batch = ranks.long_batch().to("cuda")
    (micro_batch,) = pack(batch, [list(range(len(batch)))], share_prompts=False, context=size)
    draw = torch.Generator("cuda").manual_seed(0)
    total = len(micro_batch.token_ids)
    shapes = ((HEADS, SIZE), (GROUPS, SIZE), (GROUPS, SIZE), (HEADS * SIZE,))
    *states, upstream = (torch.randn(total, *shape, generator=draw, device="cuda") for shape in shapes)
    expected = attend_and_learn(micro_batch, torch.float32, window, states, upstream)
    parts = [context_rows(micro_batch.segments, rank, size).cuda() for rank in range(size)]
    order = torch.cat(parts)
    found = [torch.zeros_like(each) for each in expected]
    for rank, rows in enumerate(parts):
        local = micro_batch.for_context_rank(rank, size)
        own = [states[0][rows], states[1][order], states[2][order]]
        out, query, key, value = attend_and_learn(local, torch.bfloat16, window, own, upstream[rows])
        found[0][rows], found[1][rows] = out, query
        found[2].index_add_(0, order, key)
        found[3].index_add_(0, order, value)
    return [
        float((mine - exact).abs().mean() / exact.abs().mean()) for mine, exact in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize("window", [0, WINDOW], ids=["all", "window"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_kernel_aligns_a_chunk_with_the_end_of_its_keys(gpus: World, size: int, window: int) -> None:
    """Were the beginnings aligned, most of a late chunk's keys would be left out: a difference near one."""
    differences = gpus(1, kernel_against_float32, size, window)[0]
    print("output, query, key, value, bfloat16 against float32:", differences)
    assert max(differences) < 0.02


CP2 = Case("CP2", 2, {"context": 2})


@two_gpus
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "deepseek_v3"])
def test_gradients_over_two_ranks_are_those_of_one(gpus: World, tiny_model: Callable[..., Path], family: str) -> None:
    folder = tiny_model(family, family != "deepseek_v3")
    one = gpus(1, ranks.learn_on_grid, folder, Case("one", 1, {}, {"share_prompts": False}), GRADIENT_STEP)[0]
    found = gpus(2, ranks.learn_on_grid, folder, CP2, GRADIENT_STEP)[0]
    assert_same_change(found, one, 1e-3)
    assert found.metrics[0]["engine/grad_norm"] == pytest.approx(one.metrics[0]["engine/grad_norm"], rel=1e-3)


@two_gpus
@pytest.mark.parametrize("model", ["qwen", "gemma", "latent"])
def test_bfloat16_over_two_ranks_stays_as_near_float32_as_on_one(
    gpus: World, request: pytest.FixtureRequest, model: str
) -> None:
    folder, batch = request.getfixturevalue(model), ranks.long_batch()
    exact = gpus(1, ranks.log_probs, folder, torch.float32, batch)[0]
    score = partial(ranks.log_probs, share_prompts=False, transformer_engine=False)
    one = (gpus(1, score, folder, torch.bfloat16, batch)[0] - exact).abs().mean()
    two = (gpus(2, partial(score, grid={"context": 2}), folder, torch.bfloat16, batch)[0] - exact).abs().mean()
    print(f"{model}, bfloat16 against float32: one rank {one:.2e}, two {two:.2e}")
    assert two < 1.5 * one + 1e-4


@two_gpus
@needs_transformer_engine
def test_torch_s_kernel_is_in_transformer_engine_s_place_over_two_ranks(gpus: World, qwen: Path) -> None:
    """Log-probs as near to float32 as on one rank, and the gradient's norm of a step."""
    batch, cp2 = ranks.long_batch(), {"context": 2}
    exact = gpus(1, ranks.log_probs, qwen, torch.float32, batch)[0]
    score = partial(ranks.log_probs, share_prompts=False, transformer_engine=True)
    one = (gpus(1, score, qwen, torch.bfloat16, batch)[0] - exact).abs().mean()
    two = (gpus(2, partial(score, grid=cp2), qwen, torch.bfloat16, batch)[0] - exact).abs().mean()
    assert two < 1.5 * one + 1e-4
    learn = partial(ranks.learn, share_prompts=False, transformer_engine=True)
    alone = gpus(1, learn, qwen, torch.bfloat16, batch, 1)[0].metrics[0]
    shared = gpus(2, partial(learn, grid=cp2), qwen, torch.bfloat16, batch, 1)[0].metrics[0]
    assert shared["engine/grad_norm"] == pytest.approx(alone["engine/grad_norm"], rel=0.02)
