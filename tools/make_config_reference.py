"""Writes docs/configuration.md from the dataclasses that declare the keys.

usage: python tools/make_config_reference.py
"""

from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rlflow.config.document import write
from rlflow.config.names import leader, sections
from rlflow.config.roles import FOLLOWERS

HEAD = "| key | type | default | meaning |\n|---|---|---|---|"
NAMES = {str: "text", int: "whole number", float: "number", bool: "boolean", NoneType: "`null`"}
SIGNS = {"minimum": "≥", "above": ">", "maximum": "≤", "below": "<"}
TARGET = Path(__file__).parent.parent / "docs" / "configuration.md"
INTRODUCTION = """\
# Configuration

A run is described by one YAML file of the sections below; `section.key=value` on the command line goes before it, and
reaches into lists too (`rewards.0.weight=2`). `${NAME}` and `${NAME:-default}` in a value are taken from the
environment, `$${` stands for `${`. `rlflow check CONFIG --world-size N` reports everything that is wrong at once, each
with the rule and the nearest valid key or value, without loading a model. What only reading tells (rows, tokenizer,
weight files) is found when a run starts, before vLLM does. The configuration as it runs, defaults included, is saved
with the run.

This page is written by `tools/make_config_reference.py` from `rlflow/config/schema.py`.
"""


def reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name, section in sections().items():
        parts += [f"\n## {name}\n", f"{(section.__doc__ or '').strip()}{_shared(name)}\n", HEAD]
        hints = get_type_hints(section)
        parts += [
            f"| `{item.name}` | {_type(hints[item.name])}{_limits(item)} | {_default(item)} | {item.metadata['doc']} |"
            for item in listed(name)
        ]
    return "\n".join(parts) + "\n"


def listed(section: str) -> list[Field]:
    """The keys that are described under `section`: those that an earlier section has not described like this."""
    first = leader(section)
    described = {item.name: item.metadata for item in fields(sections()[first])} if first else {}
    return [item for item in fields(sections()[section]) if item.metadata is not described.get(item.name)]


def _shared(section: str) -> str:
    """A sentence on the keys that an earlier section describes."""
    first = leader(section)
    if first is None:
        return ""
    shared = [item.name for item in fields(sections()[section]) if item not in listed(section)]
    takes = f"; those that are absent take the values that `{first}` has" if section in FOLLOWERS else ""
    return f" It has the keys `{shared[0]}` to `{shared[-1]}` of [{first}](#{first}) too{takes}."


def _type(hint: Any) -> str:
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in options)
    if get_origin(hint) is tuple:
        return f"list of {_type(options[0])}s"
    if get_origin(hint) is dict:
        return "mapping"
    if options:
        return " or ".join(_type(option) for option in options)
    return NAMES[hint]


def _default(item: Field) -> str:
    default = item.default if item.default_factory is MISSING else item.default_factory()
    if default is MISSING:
        return "needed"
    return f"`{write([default] if default != () else [[]]).strip().removeprefix('- ')}`"


def _limits(item: Field) -> str:
    return "".join(f" {SIGNS[name]} {limit}" for name, limit in item.metadata.get("limits", {}).items())


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
