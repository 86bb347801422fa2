"""Types and ranges of the values in a model's config, by key: a key means the same in every family that has it.

Null is absent where transformers takes it so, and a fault where transformers refuses it. Which keys a family needs, and
which values it can do, is left to the family.
"""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

LAYERS, EXPERTS, SIZE, TOKENS = 10_000, 16_384, 2**31, 2**40  # what nothing real comes near, and nothing hangs at
ALL_EXPERTS = 2**18  # of all layers: each has tensors of its own
SAID_BY_NULL = ("q_lora_rank",)  # queries are not compressed
REFUSED_AS_NULL = (  # by transformers 5, whose configs check types; or its models cannot compute with it
    "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act",
    "hidden_activation", "use_sliding_window", "decoder_sparse_step", "norm_topk_prob", "first_k_dense_replace",
    "n_group", "topk_group", "routed_scaling_factor", "query_pre_attn_scalar",
)  # fmt: skip
KINDS_OF_LAYERS = ("full_attention", "sliding_attention")  # each may have a rotation of its own


class Value(NamedTuple):
    """What a key's value has to be: in words, as a predicate, and what stands for a wrong one while others are read."""

    words: str
    fits: Callable[[Any], bool]
    instead: Any = None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(least: int, most: int) -> Value:
    words = "a positive integer" if least else "a whole number of at least 0"
    return Value(
        f"{words} of at most {most}", lambda value: type(value) is int and least <= value <= most, least or None
    )


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list | tuple) and all(type(item) is kind for item in value)


COUNT, LAYER, SIZED, POSITION = _whole(1, EXPERTS), _whole(1, LAYERS), _whole(1, SIZE), _whole(1, TOKENS)
NO_LAYERS, NO_SIZE = _whole(0, LAYERS), _whole(0, SIZE)
POSITIVE = Value("a positive number", lambda value: _is_number(value) and 0 < value <= 1e30)
NUMBER = Value("a number", lambda value: _is_number(value) and abs(value) <= 1e30)
PART = Value("a number above 0 and up to 1", lambda value: _is_number(value) and 0 < value <= 1)
FLAG = Value("true or false", lambda value: value in (True, False) and type(value) in (bool, int))
TEXT = Value("a text", lambda value: type(value) is str)
TEXTS = Value("a list of texts", lambda value: _is_list_of(value, str))
INTEGERS = Value("a list of integers", lambda value: _is_list_of(value, int))
TOKEN = Value("a token's number", lambda value: type(value) is int)
STOPS = Value("a token's number or a list of them", lambda value: type(value) is int or _is_list_of(value, int))
OBJECT = Value("an object", lambda value: isinstance(value, Mapping))

VALUES: dict[str, Value] = {
    **dict.fromkeys(("num_hidden_layers", "decoder_sparse_step", "sliding_window_pattern"), LAYER),
    **dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers"), NO_LAYERS),
    **dict.fromkeys(
        ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size",
         "moe_intermediate_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), SIZED,
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "n_group",
         "topk_group"), COUNT,
    ),
    **dict.fromkeys(("q_lora_rank", "sliding_window", "num_labels"), NO_SIZE),
    **dict.fromkeys(
        ("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "routed_scaling_factor"),
        POSITIVE,
    ),
    **dict.fromkeys(
        ("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob", "use_sliding_window"), FLAG
    ),
    **dict.fromkeys(("hidden_act", "hidden_activation", "scoring_func", "topk_method"), TEXT),
    **dict.fromkeys(("layer_types", "architectures"), TEXTS),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "id2label"), OBJECT),
    "max_position_embeddings": POSITION, "partial_rotary_factor": PART, "mlp_only_layers": INTEGERS,
    "bos_token_id": TOKEN, "eos_token_id": STOPS,
}  # fmt: skip
ROPE_VALUES: dict[str, Value] = {
    **dict.fromkeys(("rope_type", "type"), TEXT),
    **dict.fromkeys(
        ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), POSITIVE
    ),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"), NUMBER),
    **dict.fromkeys(KINDS_OF_LAYERS, OBJECT),
    "original_max_position_embeddings": POSITION, "partial_rotary_factor": PART,
}  # fmt: skip


def read_values(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A config without nulls and wrong values, and a fault for each of the latter; sizes that are wrong read as 1."""
    faults: list[str] = []
    values = _checked(config, VALUES, "", faults)
    for key in ("rope_scaling", "rope_parameters"):
        if key in values:
            values[key] = _checked(values[key], ROPE_VALUES, f"{key}.", faults)
            for kind in values[key].keys() & set(KINDS_OF_LAYERS):
                values[key][kind] = _checked(values[key][kind], ROPE_VALUES, f"{key}.{kind}.", faults)
    return values, faults


def _checked(config: Mapping[str, Any], table: Mapping[str, Value], prefix: str, faults: list[str]) -> dict[str, Any]:
    checked = {}
    for key, value in config.items():
        wanted = table.get(key)
        if value is None and key not in SAID_BY_NULL + REFUSED_AS_NULL:
            continue
        if wanted is None or (value is None and key in SAID_BY_NULL) or wanted.fits(value):
            checked[key] = value
            continue
        shown = "null" if value is None else reprlib.repr(value)
        faults.append(f"{prefix}{key} is {shown}, not {wanted.words}")
        if wanted.instead is not None:
            checked[key] = wanted.instead
    return checked
