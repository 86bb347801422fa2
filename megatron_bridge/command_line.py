"""What all commands have in common: paths and dtypes from words, and how a result is said. It needs no torch."""

import argparse
import os
import sys

from megatron_bridge.errors import UserError

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def path(text: str) -> str:
    """A path; a shell leaves `~` as it is where an option is written with `=`."""
    return os.path.expanduser(text)


def dtype(text: str) -> str:
    """torch's name of a dtype, from that or the short one."""
    if text not in DTYPES and text not in DTYPES.values():
        known = ", ".join(f"{short} or {name}" for short, name in DTYPES.items())
        raise argparse.ArgumentTypeError(f"must be {known}, not {text!r}")
    return DTYPES.get(text, text)


def say(text: str) -> None:
    """Print a result, as rank 0 of torchrun's processes only; UserError where it cannot be written."""
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_output()
        raise UserError("standard output", f"cannot be written: {error.strerror}") from error


def drop_output() -> None:
    """Let nothing more be written, so that what is left of a result is no second failure when the program ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
