"""Random samples of exact lengths to train on, for measurements that depend on sizes alone."""

from __future__ import annotations

import torch

from rlflow import parallel
from rlflow.batch import Batch, Ragged


def random_batch(vocab: int, *, prompts: int, prompt: int, response: int, n: int = 1) -> Batch:
    """`n` responses of `response` tokens to each of `prompts` prompts of `prompt` tokens, with advantages of one.

    On this process's device; the last token of a response is no row.
    """
    samples = prompts * n
    draw = torch.Generator().manual_seed(0)
    asked, answered = (
        Ragged.from_rows(torch.randint(4, vocab, (count, size), generator=draw).tolist())
        for count, size in ((prompts, prompt), (samples, response))
    )
    group, tokens = torch.arange(samples) // n, samples * response
    return Batch(
        prompts=asked,
        responses=answered,
        prompt_of=group,
        samples={"group": group, "index": torch.arange(samples) % n},
        tokens={
            "mask": torch.ones(tokens, dtype=torch.bool),
            "advantages": torch.ones(tokens),
            "weights": torch.full((tokens,), 1.0 / tokens),
        },
    ).to(parallel.device())
