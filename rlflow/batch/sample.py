"""Prompts and sampled responses as Python objects, one each, for data, rollout, rewards and tracking.

The training side works on `Batch`, which holds many of them as flat tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """A tokenised row of a data set."""

    id: str  # unique per data set and row ("train/17"): groups are keyed by it, never by text or position
    token_ids: list[int]
    row: dict[str, Any]  # the row as plain Python values
    answer: Any


@dataclass
class Sample:
    """One sampled response to one prompt."""

    prompt: Prompt
    index: int  # which of the n responses to this prompt
    response_ids: list[int]  # as sampled, the end-of-sequence token included where it was sampled
    log_probs: list[float]  # the engine's log-probs of response_ids, temperature included
    truncated: bool  # hit the length limit without a stop token
    text: str
    weights_version: int  # number of the weight sync that sampled it
    # uint8 or int16 [tokens of prompt and response but the last, layers with experts, experts per token]: where each
    # token was sent; None: not asked for
    routing: Tensor | None = None
    reward: float | None = None  # weighted total of all rewards; None: unscorable
    scores: dict[str, float] = field(default_factory=dict)  # every reward by name, and its further metrics
