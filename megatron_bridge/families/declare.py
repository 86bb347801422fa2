"""The vocabulary in which a model family is declared: tensors with named axes, and parameters that fuse them.

A declaration is data. It says what the Hugging Face tensors of a layer are, which axes they have, and which of them
each system keeps together in one parameter; how axes are cut over ranks is a layout's business, by the axes' names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_bridge.families.architecture import Architecture


@dataclass(frozen=True)
class Tensor:
    """A Hugging Face tensor, seen through its axes: `rows` and `columns` are axis names, split by blanks.

    The tensor on disk has one dimension for all of `rows` and one for all of `columns` (none without columns). A name
    with `{}` stands for as many tensors on disk as the first axis is long: one a routed expert.
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
    then of KV head 1, and so on; interleaved by `experts` the parameter has three dimensions. A name with `{}` stands
    for one parameter a local expert. `straight` is one tensor whose rows tensor parallelism cuts into equal runs, be
    they of several parts.
    """

    name: str
    tensors: tuple[str, ...]
    interleave: str = ""
    straight: bool = False


@dataclass(frozen=True)
class Block:
    """Tensors that lie together in a unit, and the parameters that Megatron and vLLM make of them.

    Blocks add up: a layer is its attention and its feed-forward part. Megatron's names are those of the local spec.
    """

    tensors: tuple[Tensor, ...]
    megatron: tuple[Parameter, ...]
    vllm: tuple[Parameter, ...]

    def __add__(self, other: "Block") -> "Block":
        return Block(self.tensors + other.tensors, self.megatron + other.megatron, self.vllm + other.vllm)


def no_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """A family of plain dense layers has nothing to add to the common sizes."""
    return {}


FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
ONLY_ATTENTION_FUSED = {"input_layernorm.weight": FUSED_NORMS["input_layernorm.weight"]}


@dataclass(frozen=True)
class Family:
    """One model family: its unit kinds, and what is to be known of its configs.

    `units` maps a kind to its block: `vocab` (embedding and head), `norm` (the final one), the kinds of layers
    (`layer`, `moe`, and others that begin so), `score` (a head of one output), and what layers with experts keep in
    units of their own, whose prefixes in the layer are `moe_parts`: `experts`, the routed ones, and `router_bias`.
    `transformer_engine` renames Megatron's parameters for its spec, kind by kind. `stacked` are the experts of
    checkpoints that keep them in one tensor, where `stacked_prefix` may rename what begins so in a layer: from, to.
    `facts` reads what only this family's config says, as fields of
    `Architecture`. `ignored` are regular expressions of tensors that checkpoints may hold and no one needs. `check`
    returns what a config asks for that the family does not do. `prediction` are the tensors that a layer behind the
    last one, which predicts further tokens, has besides those of a layer, `prediction_copies` those of them that
    repeat the model's embedding and head.
    """

    name: str
    units: Mapping[str, Block]
    check: Callable[[Mapping[str, Any]], list[str]]
    facts: Callable[[Mapping[str, Any]], dict[str, Any]] = no_facts
    moe_parts: Mapping[str, str] = field(default_factory=lambda: {"experts": "mlp.experts."})
    stacked: tuple[Parameter, ...] = ()
    stacked_prefix: tuple[str, str] = ("", "")
    transformer_engine: Mapping[str, Mapping[str, str]] = field(
        default_factory=lambda: {"layer": FUSED_NORMS, "moe": ONLY_ATTENTION_FUSED}
    )
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    prediction: tuple[str, ...] = ()
    prediction_copies: tuple[str, ...] = ()
