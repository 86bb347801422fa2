"""Samples with nothing but what rewards read."""

from typing import Any

from rlflow.batch.sample import Prompt, Sample


def sample(text: str, answer: Any = None, row: dict[str, Any] | None = None) -> Sample:
    prompt = Prompt("train/0", [1], row or {}, answer)
    return Sample(prompt, 0, [2], [-0.5], truncated=False, text=text, weights_version=1)
