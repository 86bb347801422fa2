"""What Transformer Engine's attention is given; its kernels are tested on a GPU."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.batch import pack
from rlflow.models.packed import Scoring, kernel_bounds, pack_input
from rlflow.models.rope import Rope, Ropes, inverse_frequencies
from rlflow.models.transformer_engine import TransformerEngineAttention
from tests.roles.samples import random_batch

HEADS, GROUPS, CHANNELS = 4, 2, 8
MADE: list[Any] = []  # the last kernel


class Kernel(torch.nn.Module):
    """Stands in for Transformer Engine's, and keeps what it is given."""

    def __init__(self, heads: int, channels: int, **how: Any) -> None:
        super().__init__()
        self.heads, self.channels, self.how = heads, channels, how
        self.given: dict[str, Any] = {}
        MADE[:] = [self]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **sequences: Any) -> Tensor:
        self.given = {"keys": key, **sequences}
        return torch.full_like(query, 7.0).flatten(1)

    def get_extra_state(self) -> Tensor:
        return torch.zeros(1)


@pytest.mark.parametrize("share", [True, False], ids=["prompts shared", "prompts repeated"])
def test_sequences_are_its_own_and_see_their_prompts(monkeypatch: pytest.MonkeyPatch, share: bool) -> None:
    """Prompts of 5 and 9 tokens with two responses each of at most 6."""
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", SimpleNamespace(DotProductAttention=Kernel))
    batch = random_batch(prompt_lengths=(5, 9), responses=2, longest=6)
    (micro_batch,) = pack(batch, [[0, 1, 2, 3]], share_prompts=share)
    ropes = Ropes(Rope(inverse_frequencies(1e4, CHANNELS)))
    packed = pack_input(micro_batch, ropes, torch.float32, Scoring(micro_batch.predict_at, micro_batch.targets))
    for name, value in kernel_bounds(micro_batch, micro_batch.segments, None).items():  # as on a GPU
        setattr(packed, name, value)
    config = SimpleNamespace(
        kv_channels=CHANNELS, num_attention_heads=2 * HEADS, num_query_groups=2 * GROUPS, tensor_model_parallel_size=2,
        deterministic_mode=False,
    )  # fmt: skip
    attention = TransformerEngineAttention(config, layer_number=3)
    rows = len(micro_batch.token_ids)
    query, key, value = (torch.randn(rows, 1, heads, CHANNELS) for heads in (HEADS, GROUPS, GROUPS))
    out = attention(query, key, value, None, packed_seq_params=packed)
    (kernel,) = MADE
    assert out.shape == (rows, 1, HEADS * CHANNELS)
    assert (out == 7).all()
    assert (kernel.heads, kernel.channels, kernel.how["num_gqa_groups"]) == (HEADS, CHANNELS, GROUPS)
    assert kernel.how["softmax_scale"] == CHANNELS**-0.5
    given = kernel.given
    assert given["attn_mask_type"] == ("padding_causal_bottom_right" if share else "padding_causal")
    assert torch.equal(given["keys"], key[:, 0] if micro_batch.seen_rows is None else key[micro_batch.seen_rows, 0])
    assert given["max_seqlen_q"] == given["max_seqlen_kv"] == 64
    assert torch.equal(given["cu_seqlens_q"], micro_batch.cu_seqlens)
    assert int(given["cu_seqlens_kv"][-1]) == len(given["keys"])
    assert attention.state_dict() == {}  # checkpoints are the same with and without it


@pytest.mark.parametrize(("deterministic", "ranks"), [(True, 1), (False, 2)], ids=["deterministic", "two ranks"])
def test_torch_computes_what_its_kernels_do_not(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool, ranks: int
) -> None:
    monkeypatch.delitem(sys.modules, "transformer_engine.pytorch", raising=False)  # nobody asks for it
    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: ranks))
    config = SimpleNamespace(kv_channels=CHANNELS, deterministic_mode=deterministic)
    assert TransformerEngineAttention(config, pg_collection=groups).kernel is None
