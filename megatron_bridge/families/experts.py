"""Routed experts as families have them: one gated feed-forward part each, chosen by a router."""

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


ROUTED = routed("gate_proj", "up_proj", "down_proj")
STACKED = (
    Parameter("gate_up_proj", ROUTED.vllm[0].tensors, interleave="experts"),
    Parameter("down_proj", ROUTED.vllm[1].tensors, interleave="experts"),
)


def router(name: str) -> Block:
    """The router's scores of each expert, whole on every rank."""
    return plain(name, "experts", "hidden", megatron="mlp.router.weight")
