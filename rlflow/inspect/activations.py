"""What a micro-batch takes on one rank besides the model: what a layer keeps, what passes through, the logits.

Numbers are counted from what the layers' backward passes need; a calibration corrects them where an implementation
keeps more or less. What the rank holds anyway, and which phase computes when, is left to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_bridge.families import Architecture
from rlflow.config.schema import Role


class Widths(NamedTuple):
    """Numbers that one row has on a rank at places inside a layer."""

    hidden: float  # between layers
    queries: float
    keys: float
    values: float
    outputs: float  # of the attention, behind which its projection comes
    neurons: float  # of the feed-forward part, all experts that a token meets together
    routed: float = 0.0  # copies of the hidden state on the way to experts

    @property
    def feed_forward(self) -> float:
        """Gate, up and their product, and experts' inputs and outputs."""
        return 3 * self.neurons + 2 * self.routed

    @property
    def projected(self) -> float:
        """Queries, keys and values."""
        return self.queries + self.keys + self.values

    @property
    def kept(self) -> float:
        """For the backward pass: the inputs of both norms and of the linear layers behind them, rotated queries and
        keys, values, the attention's output, and the feed-forward part.
        """
        return 4 * self.hidden + self.projected + self.outputs + self.feed_forward

    @property
    def passing(self) -> float:
        """At once in a forward that keeps nothing: the residual, the normed state and the wider part of the layer."""
        return 2 * self.hidden + max(2 * self.projected, self.feed_forward)

    @property
    def gradients(self) -> float:
        """At once in the backward pass of a layer: the gradients of the residual and of the wider part."""
        return 2 * self.hidden + max(2 * self.projected + self.outputs, self.feed_forward)


def widths(arch: Architecture, layer: int, role: Role, seen: float = 1.0) -> Widths:
    """A layer's widths on a rank of the role's grid, for each row of queries; all experts are met equally often.

    `seen`: rows of keys and values that the kernel is given, those of prompts for each response.
    """
    tensor = role.tensor_parallel_size
    hidden = arch.hidden / (tensor if role.sequence_parallel else 1)
    queries, keys, values, outputs = _attention_widths(arch, tensor)
    attention = (queries, keys * seen, values * seen, outputs)
    if (experts := arch.experts) is None or not arch.has_experts(layer):
        return Widths(hidden, *attention, neurons=arch.ffn / tensor)
    neurons = (experts.per_token * experts.ffn + experts.shared_ffn) / tensor
    cut = role.expert_tensor_parallel_size or tensor
    return Widths(hidden, *attention, neurons=neurons, routed=experts.per_token * arch.hidden * cut / tensor)


def _attention_widths(arch: Architecture, tensor: int) -> tuple[float, float, float, float]:
    """Of queries, keys, values and outputs."""
    heads = arch.heads / tensor
    if (latent := arch.latent) is not None:
        keys = heads * (latent.nope + latent.rope)
        return keys, keys, heads * latent.value, heads * latent.value
    shared = max(1.0, arch.kv_heads / tensor) * arch.head_dim
    return heads * arch.head_dim, shared, shared, heads * arch.head_dim


class Rows(NamedTuple):
    """What a rank computes of one micro-batch."""

    computed: int
    scored: int  # response tokens whose log-probs are wanted
    seen: float = 1.0  # rows of keys and values for each one that is computed


class Activations(NamedTuple):
    """Bytes of one micro-batch on a rank that holds some layers, each the most of its kind."""

    kept: float  # of all layers, until the backward pass
    again: float  # of the layer whose forward is computed again for its backward pass
    passing: float  # while one layer goes forward and keeps nothing
    gradients: float  # while one layer goes backward
    logits: float  # while the last stage scores tokens


def activations(
    arch: Architecture, role: Role, layers: Sequence[int], rows: Rows, itemsize: int, logit_bytes: int
) -> Activations:
    """Of a rank with these layers; numbers have `itemsize` bytes, a logit `logit_bytes`, 0 before the last stage."""
    each = [widths(arch, layer, role, rows.seen) for layer in layers]
    kept = sum(width.kept for width in each)
    again = 0.0
    if role.recompute == "full":  # of each layer its input stays
        again = max((width.kept for width in each), default=0.0)
        kept = sum(width.hidden for width in each)
    if logit_bytes:
        kept += 2 * arch.hidden  # before and behind the final norm
    passing = max((width.passing for width in each), default=0.0)
    gradients = max((width.gradients for width in each), default=0.0)
    unit = rows.computed * itemsize
    scored = min(rows.scored, role.logprob_chunk_tokens) if arch.head == "lm" else 0
    logits = scored * arch.vocab / role.tensor_parallel_size * logit_bytes
    return Activations(unit * kept, unit * again, unit * passing, unit * gradients, logits)
