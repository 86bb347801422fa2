"""Routed experts as families have them: one gated feed-forward part each, chosen by a router."""

from collections.abc import Mapping
from typing import Any

from megatron_bridge.families.declare import Block, Parameter, Tensor
from megatron_bridge.families.llama import plain


def routed(gate: str, up: str, down: str) -> Block:
    """The experts of one layer, whose projections have these names: `gate_proj`, `w1`, ….

    Megatron keeps each expert apart, vLLM all that a rank has in two parameters.
    """
    names = gate, up, down = tuple(f"{{}}.{name}.weight" for name in (gate, up, down))
    return Block(
        (
            Tensor(gate, "experts expert_ffn", "hidden"),
            Tensor(up, "experts expert_ffn", "hidden"),
            Tensor(down, "experts hidden", "expert_ffn"),
        ),
        (
            Parameter("local_experts.{}.linear_fc1.weight", names[:2]),
            Parameter("local_experts.{}.linear_fc2.weight", (down,)),
        ),
        (
            Parameter("w13_weight", names[:2], interleave="experts"),
            Parameter("w2_weight", (down,), interleave="experts"),
        ),
    )


def stacked(experts: Block) -> tuple[Parameter, ...]:
    """The experts of one layer as transformers 5 holds them: [experts, 2 · ffn, hidden], [experts, hidden, ffn]."""
    gate_and_up, down = experts.vllm
    return (
        Parameter("gate_up_proj", gate_and_up.tensors, interleave="experts"),
        Parameter("down_proj", down.tensors, interleave="experts"),
    )


ROUTED = routed("gate_proj", "up_proj", "down_proj")


def router(name: str) -> Block:
    """The router's scores of each expert, whole on every rank."""
    return plain(name, "experts", "hidden", megatron="mlp.router.weight")


def size_faults(config: Mapping[str, Any], count: str, *others: str) -> list[str]:
    """Sizes of experts that a config does not give, and a choice of more experts than it has by the key `count`."""
    keys = (count, "num_experts_per_tok", *others)
    wrong = [key for key in keys if not isinstance(config.get(key), int) or config[key] < 1]
    if wrong:
        return [f"{key} is {config.get(key)!r}, not a positive integer" for key in wrong]
    chosen, held = config["num_experts_per_tok"], config[count]
    return [f"num_experts_per_tok {chosen} is more than {count} {held}"] if chosen > held else []
