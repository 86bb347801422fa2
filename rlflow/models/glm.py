"""What GLM-4 computes in another way than Llama: norms behind both parts of a layer.

Its rotation comes from the architecture; so does all that GLM, which has no such norms, does in another way.
"""

from __future__ import annotations

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_bridge.families import Architecture
from rlflow.models.norm import NormedProjection, put_norms_behind
from rlflow.models.variant import Variant


def _change(layer: ModuleSpec, arch: Architecture, config: TransformerConfig, number: int) -> None:
    put_norms_behind(layer, NormedProjection)


GLM4 = Variant(change=_change, transformer_engine=False)
