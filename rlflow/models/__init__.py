"""Models: the architecture record as megatron-core modules, packed attention, positions, log-probs."""

import rlflow.parallel  # noqa: F401  # before anything imports megatron-core
from rlflow.models.config import transformer_config
from rlflow.models.layers import layer_spec
from rlflow.models.log_probs import VocabShard, token_log_probs
from rlflow.models.packed import PackedInput, Scoring, pack_input
from rlflow.models.policy import PolicyModel, build_policy, fits_transformer_engine, has_transformer_engine
from rlflow.models.stages import split_layers
from rlflow.models.value import ValueModel, build_value

Model = PolicyModel | ValueModel
"""A pipeline stage, or one of its chunks."""

__all__ = [
    "Model",
    "PackedInput",
    "PolicyModel",
    "Scoring",
    "ValueModel",
    "VocabShard",
    "build_policy",
    "build_value",
    "fits_transformer_engine",
    "has_transformer_engine",
    "layer_spec",
    "pack_input",
    "split_layers",
    "token_log_probs",
    "transformer_config",
]
