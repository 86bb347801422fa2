"""Warnings of libraries that tell the user of a run nothing, each by module and message; all others stay.

They come from calls that megatron-core makes itself or that both supported versions of it need, once on every rank.
"""

from __future__ import annotations

import warnings

# module → how its messages begin
_KNOWN = {
    # Optional packages that are not there, or that have an equivalent of ours.
    r"megatron\.core\.": (
        r"Apex is not installed",
        r"Transformer Engine and Apex are not installed",
        r"full scope is deprecated",
        r"`load_state_dict` is deprecated",
        # The optimizer looks at the .grad of parameters whose gradients it keeps elsewhere.
        r"The \.grad attribute of a Tensor that is not a leaf",
    ),
    # torch 2.13 has new names for collectives that megatron-core calls by the old ones.
    r"torch\.distributed\.c10d_logger": (r"`torch\.distributed\.\w+` is deprecated",),
    # Its sharded checkpoints are ShardedTensors.
    r"torch\.distributed\.checkpoint\.": (r"Please use DTensor instead and we are deprecating ShardedTensor",),
}


def silence() -> None:
    """Filter the known warnings in this process."""
    for module, messages in _KNOWN.items():
        for message in messages:
            warnings.filterwarnings("ignore", message=message, module=module)
