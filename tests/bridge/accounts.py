"""What Megatron and vLLM hold, by chunk and cat of whole Hugging Face tensors: it shares no code with layouts.

Llama, Qwen2, Qwen3, Qwen3-MoE, Mixtral, Gemma-3 and GLM; parameters are named without Transformer Engine.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.families import Architecture

Part = tuple[int, int]  # one of so many equal parts: (how many, which)
WHOLE = (1, 0)

NORMS = ["input_layernorm", "pre_mlp_layernorm"]  # Megatron's, and behind attention and feed-forward part:
NORMS_BEHIND = ["self_attention.linear_proj.post_layernorm", "mlp.linear_fc2.post_layernorm"]
USUAL = ["input_layernorm", "post_attention_layernorm"]
FOUR_NORMS = {
    "gemma3_text": [
        "input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
    ],
    "glm4": [*USUAL, "post_self_attn_layernorm", "post_mlp_layernorm"],
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """What of a model a rank holds: layers in order, whether embedding and head, and its parts of what is cut."""

    layers: Sequence[int]
    first: bool = True
    last: bool = True
    tensor: Part = WHOLE
    expert: Part = WHOLE
    expert_tensor: Part = WHOLE
    vocab_rows: int = 0  # padded rows of the whole vocabulary


def rows(tensor: Tensor, part: Part) -> Tensor:
    return tensor.chunk(part[0])[part[1]]


def columns(tensor: Tensor, part: Part) -> Tensor:
    return tensor.chunk(part[0], 1)[part[1]]


def vocabulary(tensor: Tensor, place: Place) -> Tensor:
    padding = tensor.new_zeros(place.vocab_rows - len(tensor), tensor.shape[1])
    return rows(torch.cat([tensor, padding]), place.tensor)


def experts_of(checkpoint: Mapping[str, Tensor], layer: str, part: Part) -> Iterator[list[Tensor]]:
    """Gate, up and down projection of every expert in a part of them."""
    held = {name.removeprefix(layer): tensor for name, tensor in checkpoint.items() if name.startswith(layer)}
    prefix = "block_sparse_moe.experts." if "block_sparse_moe.gate.weight" in held else "mlp.experts."
    names = ("w1", "w3", "w2") if prefix.startswith("block") else ("gate_proj", "up_proj", "down_proj")
    count = 1 + max(int(name.removeprefix(prefix).split(".")[0]) for name in held if name.startswith(prefix))
    for number in torch.arange(count).chunk(part[0])[part[1]].tolist():
        yield [held[f"{prefix}{number}.{name}.weight"] for name in names]


def dense(checkpoint: Mapping[str, Tensor], layer: str) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up and down projection, of which GLM keeps the first two in one tensor."""
    both, down = f"{layer}mlp.gate_up_proj.weight", checkpoint[f"{layer}mlp.down_proj.weight"]
    if both in checkpoint:
        gate, up = checkpoint[both].chunk(2)
        return gate, up, down
    return checkpoint[f"{layer}mlp.gate_proj.weight"], checkpoint[f"{layer}mlp.up_proj.weight"], down


def megatron(checkpoint: Mapping[str, Tensor], arch: Architecture, place: Place, prefix: str = "") -> dict[str, Tensor]:
    """Parameters of a GPTModel of the local spec."""
    found: dict[str, Tensor] = {}
    if place.first:
        found["embedding.word_embeddings.weight"] = vocabulary(checkpoint["model.embed_tokens.weight"], place)
    for local, layer in enumerate(place.layers):
        for name, tensor in _megatron_layer(checkpoint, arch, f"model.layers.{layer}.", place):
            found[f"decoder.layers.{local}.{name}"] = tensor
    if place.last:
        found["decoder.final_layernorm.weight"] = checkpoint["model.norm.weight"]
        if "lm_head.weight" in checkpoint:
            found["output_layer.weight"] = vocabulary(checkpoint["lm_head.weight"], place)
        elif not place.first:
            found["output_layer.weight"] = vocabulary(checkpoint["model.embed_tokens.weight"], place)
    return {prefix + name: tensor for name, tensor in found.items()}


def _megatron_layer(
    checkpoint: Mapping[str, Tensor], arch: Architecture, layer: str, place: Place
) -> Iterator[tuple[str, Tensor]]:
    for megatron_norm, norm in zip(NORMS + NORMS_BEHIND, FOUR_NORMS.get(arch.family, USUAL), strict=False):
        yield f"{megatron_norm}.weight", checkpoint[f"{layer}{norm}.weight"]
    for suffix in ("weight", "bias"):
        if f"{layer}self_attn.q_proj.{suffix}" in checkpoint:
            parts = [checkpoint[f"{layer}self_attn.{x}_proj.{suffix}"].chunk(arch.kv_heads) for x in "qkv"]
            fused = torch.cat([part[group] for group in range(arch.kv_heads) for part in parts])
            yield f"self_attention.linear_qkv.{suffix}", rows(fused, place.tensor)
    for x in "qk":
        if f"{layer}self_attn.{x}_norm.weight" in checkpoint:
            yield f"self_attention.{x}_layernorm.weight", checkpoint[f"{layer}self_attn.{x}_norm.weight"]
    yield "self_attention.linear_proj.weight", columns(checkpoint[f"{layer}self_attn.o_proj.weight"], place.tensor)
    if f"{layer}mlp.down_proj.weight" in checkpoint:
        gate, up, down = dense(checkpoint, layer)
        yield "mlp.linear_fc1.weight", torch.cat([rows(gate, place.tensor), rows(up, place.tensor)])
        yield "mlp.linear_fc2.weight", columns(down, place.tensor)
        return
    (router,) = (name for name in checkpoint if name.startswith(layer) and name.endswith(".gate.weight"))
    yield "mlp.router.weight", checkpoint[router]
    for local, (gate, up, down) in enumerate(experts_of(checkpoint, layer, place.expert)):
        fc1 = torch.cat([rows(gate, place.expert_tensor), rows(up, place.expert_tensor)])
        yield f"mlp.experts.local_experts.{local}.linear_fc1.weight", fc1
        yield f"mlp.experts.local_experts.{local}.linear_fc2.weight", columns(down, place.expert_tensor)


def vllm(checkpoint: Mapping[str, Tensor], arch: Architecture, place: Place) -> dict[str, Tensor]:
    """Parameters of a vLLM worker."""
    found: dict[str, Tensor] = {}
    if place.first or (place.last and arch.tied):
        found["model.embed_tokens.weight"] = vocabulary(checkpoint["model.embed_tokens.weight"], place)
    for number in place.layers:
        layer = f"model.layers.{number}."
        found |= {layer + name: tensor for name, tensor in _vllm_layer(checkpoint, arch, layer, place)}
    if place.last:
        found["model.norm.weight"] = checkpoint["model.norm.weight"]
        if "lm_head.weight" in checkpoint:
            found["lm_head.weight"] = vocabulary(checkpoint["lm_head.weight"], place)
    return found


def _vllm_layer(checkpoint: Mapping[str, Tensor], arch: Architecture, layer: str, place: Place) -> Iterator[Any]:
    tp, index = place.tensor
    for name, tensor in checkpoint.items():
        short = name.removeprefix(layer)
        if name.startswith(layer) and short.endswith(("norm.weight", ".gate.weight")):
            yield short, tensor
    kv = (min(tp, arch.kv_heads), index * min(tp, arch.kv_heads) // tp)  # fewer heads than ranks: neighbours share one
    for suffix in ("weight", "bias"):
        if f"{layer}self_attn.q_proj.{suffix}" in checkpoint:
            q, k, v = (checkpoint[f"{layer}self_attn.{x}_proj.{suffix}"] for x in "qkv")
            yield f"self_attn.qkv_proj.{suffix}", torch.cat([rows(q, place.tensor), rows(k, kv), rows(v, kv)])
    yield "self_attn.o_proj.weight", columns(checkpoint[f"{layer}self_attn.o_proj.weight"], place.tensor)
    if f"{layer}mlp.down_proj.weight" in checkpoint:
        gate, up, down = dense(checkpoint, layer)
        apart = torch.cat([rows(gate, place.tensor), rows(up, place.tensor)])
        yield "mlp.gate_up_proj.weight", rows(torch.cat([gate, up]), place.tensor) if arch.family == "glm" else apart
        yield "mlp.down_proj.weight", columns(down, place.tensor)
        return
    prefix = "block_sparse_moe" if arch.family == "mixtral" else "mlp"
    part, held = place.expert_tensor, list(experts_of(checkpoint, layer, place.expert))
    yield f"{prefix}.experts.w13_weight", torch.stack([torch.cat([rows(g, part), rows(u, part)]) for g, u, _ in held])
    yield f"{prefix}.experts.w2_weight", torch.stack([columns(d, part) for *_, d in held])
