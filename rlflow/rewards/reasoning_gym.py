"""The reward of reasoning-gym's tasks: each task's own verifier judges the response.

Rows are those that tools/make_reasoning_gym.py writes. The package, the extra `reasoning-gym`, is imported with this
module, so that `rlflow check` says where it is missing.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from rlflow.rewards.columns import compares_with_answer, reads

try:
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.utils import extract_answer
except ImportError as error:
    raise ImportError("reasoning-gym cannot be imported; install rlflow with its extra: [reasoning-gym]") from error


@compares_with_answer
@reads("question", "metadata.source_dataset")
def verified(
    response: str, answer: str, *, row: dict[str, Any], tag: str | None = None, exact: bool = False
) -> dict[str, float]:
    """The task's score of the answer, 0…1: the response, blanks at both ends aside; format 1 where there is one.

    With `tag` the answer is what the last <tag>…</tag> holds. Most tasks give a part of the score to what only contains
    the right answer; with `exact` that scores 0, and the mean score is an accuracy. The row's `metadata` name the task.
    """
    given = extract_answer(response, tag) if tag else response.strip()
    entry = {"question": row["question"], "answer": answer, "metadata": row["metadata"]}
    score = float(_verifier(row["metadata"]["source_dataset"])(given, entry)) if given else 0.0
    return {"score": float(score >= 1) if exact else score, "format": float(bool(given))}


@cache
def _verifier(task: str) -> Callable[[str, dict[str, Any]], float]:
    return get_score_answer_fn(task)
