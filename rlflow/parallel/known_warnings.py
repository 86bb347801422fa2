"""Warnings and log messages of libraries that tell the user of a run nothing, each by its origin; all others stay.

They come from calls that megatron-core makes itself or that both supported versions of it need, once on every rank.
"""

from __future__ import annotations

import logging
import warnings
from functools import partial

# module → how its messages begin
_KNOWN = {
    # Optional packages that are not there, or that have an equivalent of ours.
    r"megatron\.core\.": (
        r"Apex is not installed",
        r"Transformer Engine and Apex are not installed",
        r"full scope is deprecated",
        r"MimoModelConfig is experimental",  # imported along with the optimizers of 0.19
        r"`load_state_dict` is deprecated",
        # The optimizer looks at the .grad of parameters whose gradients it keeps elsewhere.
        r"The \.grad attribute of a Tensor that is not a leaf",
    ),
    # torch 2.13 has new names for collectives that megatron-core calls by the old ones.
    r"torch\.distributed\.c10d_logger": (r"`torch\.distributed\.\w+` is deprecated",),
    # Its sharded checkpoints are ShardedTensors, which each rank reads for itself.
    r"torch\.distributed\.checkpoint\.": (
        r"Please use DTensor instead and we are deprecating ShardedTensor",
        r"torch\.distributed is disabled, unavailable or uninitialized",
        r"The argument order of load has been changed",
    ),
}
# logger → how its message begins
_KNOWN_MESSAGES = {
    # Its successor has the same layers; 0.16 does not know it yet.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
}


def silence() -> None:
    """Filter the known warnings and messages in this process."""
    for module, messages in _KNOWN.items():
        for message in messages:
            warnings.filterwarnings("ignore", message=message, module=module)
    for logger, beginning in _KNOWN_MESSAGES.items():
        logging.getLogger(logger).addFilter(partial(_is_news, beginning))


def _is_news(known: str, record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(known)
