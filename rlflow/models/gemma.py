"""What Gemma-3 computes in another way than Llama; its rotations and windows come from the architecture."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_bridge.families import Architecture
from rlflow.models.activation import TanhGeGLU
from rlflow.models.attention import WindowAttention
from rlflow.models.embedding import VocabularyEmbedding
from rlflow.models.norm import ZeroCenteredProjection, ZeroCenteredRMSNorm, put_norms_behind
from rlflow.models.variant import Variant


class ScaledEmbedding(VocabularyEmbedding):
    """The embedding times √H, a number that is rounded to the dtype of the weights first."""

    def forward(self, token_ids: Tensor) -> Tensor:
        """[1, T] → [1, T, H], or this rank's part of the rows as [T / tp, 1, H] under sequence parallelism."""
        return super().forward(token_ids) * torch.tensor(self.embedding_dim**0.5, dtype=self.weight.dtype).item()


def _values(arch: Architecture) -> dict[str, Any]:
    return {
        "softmax_scale": arch.attention_scale,
        "layernorm_zero_centered_gamma": True,
        "activation_func": F.gelu,  # of which the module in the spec takes the tanh form
    }


def _change(layer: ModuleSpec, arch: Architecture, config: TransformerConfig, number: int) -> None:
    put_norms_behind(layer, ZeroCenteredProjection)
    if arch.windows[number]:
        layer.submodules.self_attention.submodules.core_attention = WindowAttention


GEMMA3 = Variant(
    values=_values,
    change=_change,
    norm=ZeroCenteredRMSNorm,
    activation=TanhGeGLU,
    embedding=ScaledEmbedding,
    transformer_engine=False,
)
