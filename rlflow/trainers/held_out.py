"""Accuracy on held-out prompts, while training and by itself: greedy, sampled, and pass@k.

`accuracy` is the mean of the first reward's score; for pass@k a response is right when that score reaches 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from rlflow.batch.sample import Prompt, Sample
from rlflow.config.schema import Config
from rlflow.rewards.scorer import Scorer
from rlflow.rollout.engine import RolloutEngine
from rlflow.trainers.measure import from_all_ranks, pass_at, sample_metrics


def measure(
    rollout: RolloutEngine, scorer: Scorer, prompts: Sequence[Prompt], config: Config, step: int
) -> dict[str, float]:
    """`eval/…` metrics of the rollout's weights, sampled as `evaluation` says; {} without prompts. Collective."""
    if not prompts:
        return {}
    asked = config.evaluation
    samples = _respond(rollout, scorer, prompts, asked.n, asked.temperature, step)
    metrics = sample_metrics(samples, "eval")
    return metrics | {"eval/accuracy": metrics.get(f"eval/{config.rewards[0].label}", math.nan)}


def report(rollout: RolloutEngine, scorer: Scorer, prompts: Sequence[Prompt], config: Config) -> dict[str, float]:
    """Greedy and sampled accuracy, each score's mean, and pass@k for k = 1, 2, 4 … `evaluation.n`. Collective."""
    asked = config.evaluation
    temperature = asked.temperature or config.rollout.temperature
    name = config.rewards[0].label
    found = {"prompts": float(len(prompts))}
    for kind, n, heat in (("greedy", 1, 0.0), ("sampled", asked.n, temperature)):
        samples = _respond(rollout, scorer, prompts, n, heat, step=0)
        metrics = sample_metrics(samples, kind)
        found |= {f"{kind}/accuracy": metrics.get(f"{kind}/{name}", math.nan)} | metrics
    return found | _pass_at_k(samples, name, asked.n)


def table(found: dict[str, float]) -> str:
    """One line for each figure."""
    width = max(map(len, found))
    return "\n".join(f"{name:<{width}}  {value:.4g}" for name, value in found.items())


def _respond(
    rollout: RolloutEngine, scorer: Scorer, prompts: Sequence[Prompt], n: int, temperature: float, step: int
) -> list[Sample]:
    samples = rollout.generate(list(prompts), n=n, temperature=temperature or 1.0, step=step, greedy=not temperature)
    scorer.score(samples)
    return samples


def _pass_at_k(samples: Sequence[Sample], name: str, n: int) -> dict[str, float]:
    right: dict[str, list[bool]] = defaultdict(list)
    for sample in samples:
        right[sample.prompt.id].append(sample.scores.get(name, 0.0) >= 1)
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for part in from_all_ranks(dict(right)):  # a prompt's samples may lie on several ranks
        for prompt, flags in part.items():
            outcomes[prompt] += flags
    powers = [2**power for power in range(n.bit_length())]
    return {f"pass@{k}": sum(pass_at(k, flags) for flags in outcomes.values()) / max(len(outcomes), 1) for k in powers}
