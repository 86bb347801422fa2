"""Random prompts and responses, the same on every rank, and their log-probs under transformers."""

from pathlib import Path

import torch
from torch import Tensor

from rlflow.batch import Batch, Ragged

VOCAB = 500


def random_batch(
    prompt_lengths: tuple[int, ...] = (7, 20, 13), responses: int = 4, longest: int = 30, seed: int = 0
) -> Batch:
    """`responses` responses of 1 … `longest` tokens to each prompt, with random weights and advantages."""
    draw = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(4, VOCAB, (length,), generator=draw).tolist() for length in prompt_lengths]
    count = len(prompts) * responses
    lengths = torch.randint(1, longest + 1, (count,), generator=draw).tolist()
    rows = [torch.randint(4, VOCAB, (length,), generator=draw).tolist() for length in lengths]
    prompt_of = torch.arange(len(prompts)).repeat_interleave(responses)
    tokens = sum(lengths)
    return Batch(
        prompts=Ragged.from_rows(prompts),
        responses=Ragged.from_rows(rows),
        prompt_of=prompt_of,
        samples={"group": prompt_of.clone(), "index": torch.arange(count) % responses},
        tokens={
            "mask": torch.rand(tokens, generator=draw) > 0.2,
            "advantages": torch.randn(tokens, generator=draw),
            "weights": torch.full((tokens,), 1.0 / tokens),
        },
    )


def reference_scores(folder: Path, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all response tokens by transformers, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    log_probs, entropies = [], []
    for sample, prompt in enumerate(batch.prompt_of.tolist()):
        ids = torch.cat([batch.prompts.row(prompt), batch.responses.row(sample)])
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        predictions = torch.log_softmax(logits[len(batch.prompts.row(prompt)) - 1 : -1] / temperature, -1)
        log_probs.append(predictions.gather(1, batch.responses.row(sample)[:, None])[:, 0])
        entropies.append(-(predictions.exp() * predictions).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)
