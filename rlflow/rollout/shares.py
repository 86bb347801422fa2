"""Which replica samples which responses: pure arithmetic that every rank repeats alike."""

import math
from dataclasses import dataclass

from rlflow.batch.balance import balance


@dataclass(frozen=True)
class Share:
    """Responses `first` … `first + count − 1` to the prompt at position `prompt` of the global list."""

    prompt: int
    first: int
    count: int


def split(prompt_lengths: list[int], n: int, response_length: int, replicas: int) -> list[list[Share]]:
    """Every replica's work, in prompt order, balanced by tokens: a prompt's own and n responses of the length limit.

    A prompt's responses stay together, because they share its key-value cache, unless there are too few prompts to fill
    the replicas evenly; then they are cut into runs.
    """
    pieces = 1
    if len(prompt_lengths) < 8 * replicas:
        pieces = min(n, replicas // math.gcd(len(prompt_lengths), replicas))
    shares = [
        Share(prompt, n * piece // pieces, n * (piece + 1) // pieces - n * piece // pieces)
        for prompt in range(len(prompt_lengths))
        for piece in range(pieces)
    ]
    costs = [prompt_lengths[share.prompt] + share.count * response_length for share in shares]
    return [[shares[item] for item in sorted(part)] for part in balance(costs, replicas, equal_counts=n % pieces == 0)]
