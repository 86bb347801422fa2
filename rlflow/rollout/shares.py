"""Which replica samples which responses: pure arithmetic that every rank repeats alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.batch.balance import balance, even_runs

EVEN_ENOUGH = 1.02  # the busiest replica over the mean, below which no group is cut for more evenness


@dataclass(frozen=True)
class Share:
    """Responses `first` … `first + count − 1` to the prompt at position `prompt` of the global list."""

    prompt: int
    first: int
    count: int


def split(
    prompt_lengths: Sequence[int], n: int, response_length: float | Sequence[float], replicas: int
) -> list[list[Share]]:
    """Every replica's work, in prompt order, balanced by tokens: a prompt's own and those of n responses.

    `response_length` is what each prompt's responses are expected to have, or one number for all. Where all expect the
    same, every replica gets as many responses as any other if that is possible. A prompt's responses stay together,
    because they share its key-value cache, unless that leaves the replicas uneven; then they are cut into runs.
    """
    prompts = len(prompt_lengths)
    expected = response_length if isinstance(response_length, Sequence) else [response_length] * prompts
    alike = len(set(expected)) <= 1

    def plan(pieces: int) -> tuple[float, list[list[Share]]]:
        shares = _cut(prompts, n, pieces)
        costs = [prompt_lengths[share.prompt] + share.count * expected[share.prompt] for share in shares]
        parts = balance(costs, replicas, equal_counts=alike and n % pieces == 0)
        busiest = max(sum(costs[item] for item in part) for part in parts)
        return busiest, [[shares[item] for item in sorted(part)] for part in parts]

    if alike:
        return plan(_pieces(prompts, n, replicas))[1]
    mean = sum(length + n * guess for length, guess in zip(prompt_lengths, expected, strict=True)) / replicas
    found = [plan(1)]
    while found[-1][0] > EVEN_ENOUGH * mean and 2 ** len(found) <= n:
        found.append(plan(2 ** len(found)))
    return min(found, key=lambda plan: plan[0])[1]


def _pieces(prompts: int, n: int, replicas: int) -> int:
    """Into how many runs the responses to a prompt are cut, so that few prompts fill the replicas evenly."""
    return min(n, replicas // math.gcd(prompts, replicas)) if prompts < 8 * replicas else 1


def _cut(prompts: int, n: int, pieces: int) -> list[Share]:
    """The responses to each prompt in runs whose sizes differ by at most one."""
    return [Share(prompt, a, b - a) for prompt in range(prompts) for a, b in even_runs(n, pieces)]
