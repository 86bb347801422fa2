"""What an architecture's layers may have in another way than Llama's: the one form in which a family's module says so.

Which family has which variant is listed in `layers`; the modules that define them import nothing from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_bridge.families import Architecture
from rlflow.models.activation import SwiGLU
from rlflow.models.attention import PackedAttention
from rlflow.models.embedding import VocabularyEmbedding
from rlflow.models.norm import RMSNorm


def _no_values(arch: Architecture) -> dict[str, Any]:
    return {}


def _keep(layer: ModuleSpec, arch: Architecture, config: TransformerConfig, number: int) -> None:
    pass


@dataclass(frozen=True)
class Variant:
    """The defaults are Llama's.

    `values` are fields of the config besides the common ones, or instead of them; `config` is the class that has them.
    `change` may put other modules into the spec of layer `number` (from 0, over all stages), or make it a spec of
    another layer class. `norm`, `attention` (the core one) and `activation` are modules of the layers, `embedding`
    is the first stage's. `transformer_engine` says whether that has kernels for their attention too.
    """

    values: Callable[[Architecture], dict[str, Any]] = _no_values
    config: type[TransformerConfig] = TransformerConfig
    change: Callable[[ModuleSpec, Architecture, TransformerConfig, int], None] = _keep
    norm: type[RMSNorm] = RMSNorm
    attention: type[nn.Module] = PackedAttention
    activation: type[nn.Module] = SwiGLU
    embedding: type[VocabularyEmbedding] = VocabularyEmbedding
    transformer_engine: bool = True
