"""Digests of plain records and layouts, the same in all processes: by them ranks tell whether they planned alike.

Of an architecture only what shapes weights counts, so that two jobs whose folders differ in a generation config, or in
what else a config says beside the sizes, may still exchange weights. Comparing is left to `agreement`.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from megatron_bridge.families import Architecture
from megatron_bridge.layouts.layout import weight_shapes


def fingerprint(*facts: Any) -> int:
    """63 bits that differ, almost surely, where any of the facts do."""
    return int.from_bytes(hashlib.sha256(repr(_ordered(facts)).encode()).digest()[:8], "big") >> 1


def _ordered(value: Any) -> Any:
    """A value whose representation is the same in all processes: sets come in an order of each process's own."""
    if isinstance(value, Architecture):
        return value.family, _ordered(weight_shapes(value))
    if dataclasses.is_dataclass(value):
        return type(value).__name__, [_ordered(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, frozenset | set):
        return sorted(map(repr, value))
    if isinstance(value, Mapping):
        return [(key, _ordered(inner)) for key, inner in value.items()]
    return [_ordered(inner) for inner in value] if isinstance(value, tuple | list) else value
