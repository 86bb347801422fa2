"""What a conversion notes of a model beside the weights in a Megatron folder, because the checkpoint does not tell it.

The vocabulary's size: Megatron's matrices have rows of padding, and nothing says where they begin.
"""

import json
from pathlib import Path

from megatron_bridge.errors import UserError
from megatron_bridge.families import Architecture, read_json

RECORD = "megatron_bridge.json"


def write_record(iteration: Path, arch: Architecture) -> None:
    """Note it in an iteration's folder."""
    (iteration / RECORD).write_text(json.dumps({"vocab_size": arch.vocab}) + "\n")


def has_record(iteration: Path) -> bool:
    """Whether an iteration's folder is one that a conversion wrote."""
    return (iteration / RECORD).is_file()


def check_record(iteration: Path, arch: Architecture) -> None:
    """UserError where a conversion noted another model than the config describes."""
    if has_record(iteration) and (size := read_json(iteration / RECORD).get("vocab_size")) != arch.vocab:
        message = f"the model has vocab_size {size}, but the config says {arch.vocab}: give its own config.json"
        raise UserError(iteration / RECORD, message)
