"""What a `config.json` may ask for that the trainer's model does not compute, though the bridge moves its weights.

Rules of the architecture alone, for the configuration's check before anything is loaded and for whoever builds a model;
what a grid must be like is left to them. No torch here.
"""

from collections.abc import Iterator

from megatron_bridge.families import Architecture
from rlflow.errors import UserError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def model_limits(arch: Architecture) -> list[str]:
    """What the trainer cannot do with a model, each with the key of its config.json and what would be right."""
    return [*_rope_limits(arch), *_router_limits(arch)]


def check_limits(arch: Architecture) -> None:
    """Raise one UserError for all that the trainer cannot do with a model."""
    if limits := model_limits(arch):
        raise UserError("config.json", "; ".join(limits))


def _rope_limits(arch: Architecture) -> Iterator[str]:
    kind = (arch.rope_scaling or {}).get("rope_type", "default")
    if kind not in ROPE_TYPES:
        section = "rope_parameters" if arch.hf_config.get("rope_parameters") else "rope_scaling"
        yield f"{section}: rope_type {kind!r} is not supported; known: {', '.join(ROPE_TYPES)}"
    if len(windows := set(arch.windows) - {0}) > 1:
        yield f"attention windows of {sorted(windows)} tokens: one model may have one size"


def _router_limits(arch: Architecture) -> Iterator[str]:
    """Routers that megatron-core would let choose or weigh otherwise, or not train."""
    if (experts := arch.experts) is None:
        return
    if experts.score == "sigmoid":
        if not experts.normalize:
            yield "norm_topk_prob is false, only true is supported: sigmoid scores are divided by their sum"
        if experts.per_token == 1:
            yield "num_experts_per_tok is 1: sigmoid scores are divided by their sum, which takes at least 2"
    elif experts.per_token == 1 and experts.normalize:
        other = ", or norm_topk_prob false" if "norm_topk_prob" in arch.hf_config else ""
        yield f"num_experts_per_tok is 1: a single normalized weight leaves its router untrained; at least 2{other}"
    if experts.groups > 1 and experts.per_token // experts.groups_per_token != 2:
        best = 2 * experts.groups_per_token
        yield (
            f"num_experts_per_tok {experts.per_token} is not twice topk_group {experts.groups_per_token}: groups are "
            f"compared by their best two experts; num_experts_per_tok {best} would be right"
        )
