"""The vocabulary in which a model family is declared: tensors with named axes, and parameters that fuse them.

A declaration is data. It says what the Hugging Face tensors of a layer are, which axes they have, and which of them
each system keeps together in one parameter; how axes are cut over ranks is a layout's business, by the axes' names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_bridge.families.architecture import Architecture


@dataclass(frozen=True)
class Tensor:
    """A Hugging Face tensor, seen through its axes: `rows` and `columns` are axis names, split by blanks.

    The tensor on disk has one dimension for all of `rows` and one for all of `columns` (none without columns).
    """

    name: str
    rows: str
    columns: str = ""

    @property
    def axes(self) -> tuple[str, ...]:
        return (*self.rows.split(), *self.columns.split())

    def view(self, arch: Architecture) -> tuple[int, ...]:
        """The N-d shape in which shards are boxes."""
        return tuple(arch.size(axis) for axis in self.axes)


@dataclass(frozen=True)
class Parameter:
    """A parameter of Megatron or vLLM: the parts of a rank's shard, one tensor after another along the rows.

    With `interleave` the tensors alternate inside each index of that (first) axis instead: q, k, v of KV head 0,
    then of KV head 1, and so on.
    """

    name: str
    tensors: tuple[str, ...]
    interleave: str = ""


@dataclass(frozen=True)
class Family:
    """One model family: its unit kinds (`vocab`, `layer`, `norm`) and what each system makes of them.

    `tensors`, `megatron` and `vllm` map a unit kind to its declarations. Megatron's names are those of the local
    layer spec; the Megatron layout renames for Transformer Engine. `ignored` are regular expressions of tensors that
    checkpoints may hold and no one needs. `check` returns what a config asks for that the family does not do.
    """

    name: str
    tensors: Mapping[str, tuple[Tensor, ...]]
    megatron: Mapping[str, tuple[Parameter, ...]]
    vllm: Mapping[str, tuple[Parameter, ...]]
    qkv_bias: bool
    check: Callable[[Mapping[str, Any]], list[str]]
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
