"""The experts to which the rollout sent each token, as fields of a batch: for a trainer that sends tokens there again.

They are moved and cut like any other field of prompt and response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from rlflow.batch.batch import Batch
from rlflow.batch.sample import Sample

ROUTING = "routing"
"""Name of the fields in `tokens` and `prompt_tokens`: [tokens, layers with experts · experts per token]."""


class RoutingShape(NamedTuple):
    """What a model's routing of a token looks like."""

    layers: int  # those with experts
    per_token: int
    experts: int


def routing_dtype(experts: int) -> torch.dtype:
    """The smallest integers that number so many experts, of those that every collective moves."""
    return torch.uint8 if experts <= 256 else torch.int16


def add_routing(batch: Batch, samples: Sequence[Sample], shape: RoutingShape) -> None:
    """Put the samples' routing into the batch that was made from them; empty fields where there are none.

    A prompt's is that of its first sample. The last token of a response was sent nowhere: it has the experts of the
    one before. Raises ValueError for a sample whose routing does not fit.
    """
    nothing = torch.empty(0, shape.layers * shape.per_token, dtype=routing_dtype(shape.experts))
    firsts = {sample.prompt.id: sample for sample in reversed(samples)}
    prompts = list(dict.fromkeys(sample.prompt.id for sample in samples))
    flat = {id(sample): _flat(sample, nothing) for sample in samples}
    batch.prompt_tokens[ROUTING] = torch.cat([nothing, *(flat[id(firsts[prompt])][0] for prompt in prompts)])
    batch.tokens[ROUTING] = torch.cat([nothing, *(flat[id(sample)][1] for sample in samples)])


def without_routing(batch: Batch) -> Batch:
    """The batch for those who have no routers to tell."""
    tokens, prompt_tokens = (
        {name: values for name, values in fields.items() if name != ROUTING}
        for fields in (batch.tokens, batch.prompt_tokens)
    )
    return replace(batch, tokens=tokens, prompt_tokens=prompt_tokens)


def _flat(sample: Sample, like: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of prompt and response, of the dtype and width of `like`."""
    prompt, response = len(sample.prompt.token_ids), len(sample.response_ids)
    rows = torch.empty(0, 1, 1) if sample.routing is None else sample.routing
    if len(rows) != prompt + response - 1 or rows[0].numel() != like.shape[1]:
        shape = f"[{prompt + response - 1}, {like.shape[1]}]"
        raise ValueError(f"sample {sample.index} of {sample.prompt.id}: routing of {tuple(rows.shape)}, not {shape}")
    whole = torch.cat([rows, rows[-1:]]).flatten(1).to(like.dtype)
    return whole[:prompt], whole[prompt:]
