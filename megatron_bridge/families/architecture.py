"""What a Hugging Face `config.json` says of a model, as a plain record.

Only facts that shape weights or the forward pass are kept; the config itself is carried along so that an export can
write it back. Turning the record into a Megatron config is left to whoever builds models; which config keys a family
allows is left to the family's declaration, which types they have to `values`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from megatron_bridge.errors import UserError

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
DEFAULT_ROPE_THETA = 10000.0  # what transformers takes where the config names none


@dataclass(frozen=True)
class Experts:
    """The routed experts of a layer, and how its router chooses among them.

    `normalize`: the chosen experts' scores are divided by their sum. `score_bias`: the router adds a trained bias to
    the scores when it chooses, not when it weighs. `groups`: experts are chosen from the best `groups_per_token` of so
    many groups only.
    """

    count: int
    per_token: int
    ffn: int
    shared_ffn: int = 0  # width of all shared experts together
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    score_bias: bool = False
    groups: int = 1
    groups_per_token: int = 1


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), heads' parts each."""

    query_rank: int  # 0: queries are not compressed
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Architecture:
    """Sizes and constants of one decoder-only model.

    `layer_kinds` names the kind of each layer as its family declares them, by default `layer` for all. `windows` holds
    the attention window of each layer in tokens, the token itself included, 0 for none; empty: no layer has one. `head`
    says what the last stage computes: logits (`lm`) or one number a token (`score`). `attention_scale` multiplies the
    products of queries and keys, None: 1 / √head_dim.

    Rotary embeddings turn the first `rotary_dim` channels of a head (by default all), as pairs (i, i + rotary_dim / 2)
    or, `rotary_interleaved`, of neighbours. `window_rope_theta` is the base in layers with a window, whose rotation
    `rope_scaling` leaves alone then; None: they are like the others.

    `rope_scaling` is None for plain rotary embeddings, else the config's dict with a `rope_type` key, without
    `rope_theta` and without null values: what is absent keeps the default of the scaling's own definition.
    `eos_token_ids` joins `generation_config.json` and `config.json`, in this order.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qkv_bias: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = field(hash=False)
    max_positions: int
    layer_kinds: tuple[str, ...] = ()
    experts: Experts | None = None
    latent: Latent | None = None
    head: Literal["lm", "score"] = "lm"
    qk_norm: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    windows: tuple[int, ...] = ()
    attention_scale: float | None = None
    rotary_dim: int = 0
    rotary_interleaved: bool = False
    window_rope_theta: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    hf_config: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_kinds", tuple(self.layer_kinds) or ("layer",) * self.layers)
        object.__setattr__(self, "rotary_dim", self.rotary_dim or self.head_dim)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        sizes = {"one": 1, "two": 2, "queries": self.heads // self.kv_heads}
        if (experts := self.experts) is not None:
            sizes |= {"experts": experts.count, "expert_ffn": experts.ffn, "shared_ffn": experts.shared_ffn}
        if (latent := self.latent) is not None:
            sizes |= {
                "query_rank": latent.query_rank,
                "query_latent": latent.query_rank,
                "kv_rank": latent.kv_rank,
                "kv_rank_and_rope": latent.kv_rank + latent.rope,
                "nope_and_rope": latent.nope + latent.rope,
                "nope_and_value": latent.nope + latent.value,
                "value": latent.value,
            }
        return sizes

    def has_experts(self, layer: int) -> bool:
        """Whether a layer (from 0) has routed experts."""
        return self.layer_kinds[layer].startswith("moe")

    @property
    def expert_layers(self) -> list[int]:
        """Numbers of the layers that have routed experts."""
        return [layer for layer in range(self.layers) if self.has_experts(layer)]

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer's feed-forward part is of the usual kind."""
        return len(self.expert_layers) < self.layers

    def cached_numbers(self, tp: int) -> int:
        """Numbers that an engine's cache holds of a token in a layer, on each of `tp` ranks."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope  # what all heads share
        return 2 * max(1, self.kv_heads // tp) * self.head_dim

    def size(self, axis: str) -> int:
        """Length of an axis by the name that family declarations use (`hidden`, `queries`, …)."""
        return self._sizes[axis] if axis in self._sizes else getattr(self, axis)


def read_architecture(
    family: str,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    facts: Callable[[Mapping[str, Any]], dict[str, Any]],
    where: str,
    known: Sequence[str] = (),
) -> Architecture:
    """The record of a `config.json` (and `generation_config.json`, may be empty), both as `read_values` has them.

    UserError lists every fault, `known` ones first. `facts` is called once there are none; what it returns goes into
    the record as it is.
    """
    faults = list(known)
    layers, hidden, heads, ffn, vocab = (_given(config, key, faults) for key in SIZES)
    kv_heads = int(config.get("num_key_value_heads", heads))
    if heads % kv_heads:
        faults.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if config.get("head_dim") is None and hidden % heads:
        faults.append(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is absent")
    head_dim = int(config.get("head_dim", max(1, hidden // heads)))
    if head_dim % 2:
        faults.append(f"head_dim {head_dim} is odd: rotary embeddings turn pairs")
    theta, scaling = _read_rope(config, faults)
    head = _read_head(config, faults)
    if faults:
        raise UserError(where, "; ".join(faults))
    common: dict[str, Any] = {
        "tied": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": False,
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_positions": int(config.get("max_position_embeddings", 2048)),
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_ids": _eos_ids(generation, config),
        "head": head,
    }
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return Architecture(family, **(sizes | {"ffn": ffn, "vocab": vocab} | common | facts(config)))


def _read_head(config: Mapping[str, Any], faults: list[str]) -> Literal["lm", "score"]:
    """`score` for a reward or value model: transformers calls it a classifier, of two labels unless its config says."""
    if not any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or ()):
        return "lm"
    labels = config.get("num_labels") or len(config.get("id2label") or (0, 1))
    if labels != 1:
        faults.append(f"a classifier of {labels} labels: a score model has one output (num_labels 1)")
    return "score"


def _given(config: Mapping[str, Any], key: str, faults: list[str]) -> int:
    if key not in config:
        faults.append(f"{key} is absent")
    return int(config.get(key, 1))


def _read_rope(config: Mapping[str, Any], faults: list[str]) -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling from either form: `rope_theta` with `rope_scaling`, or `rope_parameters` with both."""
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    if old and new and read_scaling(old) != read_scaling(new):
        faults.append("rope_scaling and rope_parameters differ")
    given = [source["rope_theta"] for source in (new, config) if source.get("rope_theta") is not None]
    if len(set(given)) > 1:
        faults.append(f"rope_theta is {given[1]} but rope_parameters.rope_theta is {given[0]}")
    return float(given[0]) if given else DEFAULT_ROPE_THETA, read_scaling(new or old)


def rotary_part(config: Mapping[str, Any], default: float = 1.0) -> float:
    """Which part of a head's channels a config says are turned."""
    new = config.get("rope_parameters") or {}
    return float(config.get("partial_rotary_factor", new.get("partial_rotary_factor", default)))


def read_scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """A config's dict about rotary embeddings as `Architecture.rope_scaling` has it."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    elsewhere = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
    rest = {k: v for k, v in rope.items() if v is not None and k not in elsewhere}
    return {"rope_type": kind, **rest}


def _eos_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for config in configs:
        value = config.get("eos_token_id")
        ids |= dict.fromkeys([value] if isinstance(value, int) else value or [])
    return tuple(ids)
