"""Which micro-batches Transformer Engine's attention is given; its kernels are tested on a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlflow.batch import pack
from tests.roles.samples import random_batch

HEADS, GROUPS, CHANNELS = 4, 2, 8


class Kernel(torch.nn.Module):
    """Stands in for megatron-core's wrapper, and keeps what it is given."""

    def __init__(self, config: Any, **how: Any) -> None:
        super().__init__()
        self.how = how
        self.given: list[Any] = []

    def forward(self, query: Tensor, *others: Any, packed_seq_params: Any) -> Tensor:
        self.given.append((query.shape, packed_seq_params))
        return torch.full_like(query, 7.0)


@pytest.mark.parametrize("share", [True, False], ids=["prompts shared", "prompts repeated"])
def test_sequences_that_see_themselves_alone_are_its_own(monkeypatch: pytest.MonkeyPatch, share: bool) -> None:
    from rlflow.models import transformer_engine
    from rlflow.models.packed import Scoring, pack_input
    from rlflow.models.rope import Rope, Ropes, inverse_frequencies

    monkeypatch.setattr(transformer_engine, "TEDotProductAttention", Kernel)
    batch = random_batch(prompt_lengths=(5, 9), responses=2, longest=6)
    (micro_batch,) = pack(batch, [[0, 1, 2, 3]], share_prompts=share)
    ropes = Ropes(Rope(inverse_frequencies(1e4, CHANNELS)))
    packed = pack_input(micro_batch, ropes, torch.float32, Scoring(micro_batch.predict_at, micro_batch.targets))
    packed.seen_rows, packed.cu_seqlens_q = micro_batch.seen_rows, micro_batch.cu_seqlens  # as on a GPU
    attention = transformer_engine.TransformerEngineAttention(SimpleNamespace(kv_channels=CHANNELS), layer_number=3)
    rows = len(micro_batch.token_ids)
    query, key, value = (torch.randn(rows, 1, heads, CHANNELS) for heads in (HEADS, GROUPS, GROUPS))
    out = attention(query, key, value, None, packed_seq_params=packed)
    assert out.shape == (rows, 1, HEADS * CHANNELS)
    assert attention.kernel.how["layer_number"] == 3
    if share:
        assert not attention.kernel.given
        assert not (out == 7).any()
    else:
        ((shape, sequences),) = attention.kernel.given
        assert shape == (rows, HEADS, CHANNELS)
        assert sequences.qkv_format == "thd"
        assert torch.equal(sequences.cu_seqlens_q, micro_batch.cu_seqlens)
        assert (out == 7).all()
