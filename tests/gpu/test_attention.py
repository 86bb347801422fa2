"""The attention kernels on a GPU, torch's and Transformer Engine's, against float32."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rlflow.batch import MicroBatch, pack
from tests.gpu.devices import SPECS, needs_gpus
from tests.roles.samples import random_batch

pytestmark = needs_gpus(1)

BOUND = 0.01
"""Relative distance of bfloat16's outputs and gradients: three times what is found."""


def run(micro_batch: MicroBatch, dtype: torch.dtype, transformer_engine: bool, states: list[Tensor]) -> list[Tensor]:
    """The attention's output and the gradients of queries, keys and values."""
    from rlflow.models import Scoring, pack_input
    from rlflow.models.attention import PackedAttention
    from rlflow.models.rope import Rope, Ropes, inverse_frequencies
    from rlflow.models.transformer_engine import TransformerEngineAttention

    *inputs, upstream = (each.to(dtype).detach() for each in states)
    (heads, channels), groups = inputs[0].shape[1:], inputs[1].shape[1]
    config = SimpleNamespace(
        kv_channels=channels, num_attention_heads=heads, num_query_groups=groups, tensor_model_parallel_size=1,
        deterministic_mode=False,
    )  # fmt: skip
    ropes = Ropes(Rope(inverse_frequencies(1e4, channels))).to(torch.device("cuda"))
    packed = pack_input(micro_batch, ropes, dtype, Scoring(micro_batch.predict_at, micro_batch.targets))
    attention = (TransformerEngineAttention if transformer_engine else PackedAttention)(config)
    inputs = [each.requires_grad_() for each in inputs]
    out = attention.attend(*inputs, packed)
    return [each.detach().float() for each in (out, *torch.autograd.grad(out, inputs, upstream))]


@pytest.mark.parametrize("share_prompts", [True, False], ids=["prompts shared", "prompts repeated"])
@pytest.mark.parametrize(("heads", "groups", "channels"), [(14, 2, 64), (12, 2, 128)])
@pytest.mark.parametrize("transformer_engine", SPECS)
def test_packed_sequences_see_themselves_and_their_prompts(
    transformer_engine: bool, heads: int, groups: int, channels: int, share_prompts: bool
) -> None:
    """Of three prompts with four responses each, all of other lengths."""
    batch = random_batch(prompt_lengths=(7, 200, 130), longest=300).to("cuda")
    (micro_batch,) = pack(batch, [list(range(len(batch)))], share_prompts=share_prompts, multiple=64)
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = ((heads, channels), (groups, channels), (groups, channels), (heads * channels,))
    rows = len(micro_batch.token_ids)
    states = [torch.randn(rows, *shape, generator=draw, device="cuda") for shape in shapes]
    found = run(micro_batch, torch.bfloat16, transformer_engine, states)
    exact = run(micro_batch, torch.float32, False, [each.bfloat16() for each in states])
    real = rows - micro_batch.padding
    distances = [float((a - b)[:real].norm() / b[:real].norm()) for a, b in zip(found, exact, strict=True)]
    print(transformer_engine, share_prompts, channels, [f"{distance:.1e}" for distance in distances])
    assert max(distances) < BOUND
