"""What responses are expected to be long, from those that a prompt got before, so that replicas end at the same time.

Pure functions of numbers that every rank knows; what was seen is kept in the trainer's state and so in checkpoints. How
replicas share the work is left to `shares`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlflow.batch import Catalogue, Prompt
from rlflow.rollout.shares import split

ALL = ""  # the key of the mean over all prompts; no prompt has an empty id
REMEMBERED = 50_000  # prompts; those that were not seen for longest are forgotten


def expected_lengths(seen: Mapping[str, float], prompts: Sequence[Prompt], limit: int) -> list[float]:
    """Expected response tokens of each prompt: what it had before, else the run's mean, else the limit."""
    usual = seen.get(ALL, float(limit))
    return [seen.get(prompt.id, usual) for prompt in prompts]


def learn_lengths(seen: Mapping[str, float], prompts: Sequence[Prompt], known: Catalogue) -> dict[str, float]:
    """`seen` with a step's responses: what was expected before counts half, as responses change with the policy.

    `known` holds the step's samples, whose groups number `prompts`.
    """
    means = _means(prompts, known)
    if not means:
        return dict(seen)
    means[ALL] = float(known.response_lengths.double().mean())
    kept = {name: length for name, length in seen.items() if name not in means}
    for name in list(kept)[: max(len(kept) + len(means) - REMEMBERED, 0)]:
        del kept[name]
    return kept | {name: (seen[name] + mean) / 2 if name in seen else mean for name, mean in means.items()}


def expectation_metrics(
    expected: Sequence[float], prompts: Sequence[Prompt], known: Catalogue, *, n: int, limit: int, replicas: int
) -> dict[str, float]:
    """How good the expectation was, and what it was worth.

    `rollout/length_error` is the mean over prompts of the distance between expected and mean length, over the mean
    length. `rollout/idle_tokens` is 1 − mean/max of the tokens that the replicas sampled as they shared the work by
    `expected`, and `rollout/idle_tokens_unforeseen` the same, had every response been expected to reach the limit.
    """
    means = _means(prompts, known)
    if not means:
        return {}
    errors = [abs(guess - means[prompt.id]) for guess, prompt in zip(expected, prompts, strict=True)]
    mean = float(known.response_lengths.double().mean())
    idle = {}
    for name, guess in (("rollout/idle_tokens", expected), ("rollout/idle_tokens_unforeseen", limit)):
        idle[name] = _idle_tokens(prompts, known, n, guess, replicas)
    return {"rollout/length_error": sum(errors) / len(errors) / max(mean, 1.0)} | idle


def idle_share(loads: Sequence[float]) -> float:
    """1 − mean/max: the share of time that workers of these loads wait for the busiest; 0 without any load."""
    return 1 - sum(loads) / len(loads) / max(loads) if any(loads) else 0.0


def _means(prompts: Sequence[Prompt], known: Catalogue) -> dict[str, float]:
    """Mean response length of each prompt by its id."""
    lengths: list[list[int]] = [[] for _ in prompts]
    for group, length in zip(known.groups, known.response_lengths.tolist(), strict=True):
        lengths[group].append(length)
    return {prompt.id: sum(own) / len(own) for prompt, own in zip(prompts, lengths, strict=True) if own}


def _idle_tokens(
    prompts: Sequence[Prompt], known: Catalogue, n: int, expected: float | Sequence[float], replicas: int
) -> float:
    places = zip(known.groups, known.samples["index"].tolist(), strict=True)
    length_of = dict(zip(places, known.response_lengths.tolist(), strict=True))
    parts = split([len(prompt.token_ids) for prompt in prompts], n, expected, replicas)
    responses = [
        [(share.prompt, index) for share in part for index in range(share.first, share.first + share.count)]
        for part in parts
    ]
    return idle_share([sum(length_of[place] for place in part) for part in responses])
