"""How many layers each pipeline stage gets, so that all take equally long although the last also scores tokens."""

from __future__ import annotations

from megatron_bridge.families import Architecture

SCORED_PART = 0.5
"""Assumed part of the rows that the head scores; the others are prompts."""


def split_layers(arch: Architecture, stages: int) -> tuple[int, ...]:
    """Layers of each stage. The first and the last may differ from the equal ones between: megatron-core allows that.

    Among the splits whose slowest stage is fastest, the most even one. The embedding costs nothing to speak of.
    """
    if stages == 1:
        return (arch.layers,)
    width = sum(_width(arch, layer) for layer in range(arch.layers)) / arch.layers
    head = SCORED_PART * arch.vocab / (_attention(arch) + 3 * width) if arch.head == "lm" else 0.0
    return min(_allowed(arch.layers, stages), key=lambda split: (max(*split[:-1], split[-1] + head), max(split)))


def _attention(arch: Architecture) -> float:
    """Weights of a layer's attention, by hidden channel."""
    if (latent := arch.latent) is None:
        return 2 * (arch.heads + arch.kv_heads) * arch.head_dim
    queries, keys = arch.heads * (latent.nope + latent.rope), arch.heads * (latent.nope + latent.value)
    down = latent.query_rank + latent.kv_rank + latent.rope
    up = queries * (latent.query_rank or arch.hidden) + keys * latent.kv_rank
    return down + up / arch.hidden + arch.heads * latent.value


def _width(arch: Architecture, layer: int) -> int:
    """Neurons that a token meets in a layer."""
    if arch.experts is None or not arch.has_experts(layer):
        return arch.ffn
    return arch.experts.per_token * arch.experts.ffn + arch.experts.shared_ffn


def _allowed(layers: int, stages: int) -> list[tuple[int, ...]]:
    """Every split with at least one layer a stage whose stages between first and last are equal."""
    splits = []
    for between in range(1, layers) if stages > 2 else (0,):
        rest = layers - between * (stages - 2)
        splits += [(rest - last, *[between] * (stages - 2), last) for last in range(1, rest)]
    return splits
