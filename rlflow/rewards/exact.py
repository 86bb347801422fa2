"""Rewards for answers that are one string or one whole number."""

import re
from typing import Any

from rlflow.rewards.columns import compares_with_answer

INTEGER = re.compile(r"(?<![\w.,])[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?!\w|[,.]\d)")


@compares_with_answer
def exact_match(response: str, answer: Any, *, row: dict[str, Any], ignore_case: bool = False) -> float:
    """1 where the response is the answer, blanks at both ends aside, else 0."""
    given, wanted = response.strip(), str(answer).strip()
    return float(given.casefold() == wanted.casefold() if ignore_case else given == wanted)


@compares_with_answer
def integer_answer(response: str, answer: Any, *, row: dict[str, Any], bare: bool = False) -> dict[str, float]:
    """Score 1 where the last whole number of the response is the answer; format 1 where there is one at all.

    With `bare` the number must be all that the response is, blanks at both ends aside. Thousands may be grouped by
    commas; a number with a decimal point, or part of a word, is none.
    """
    whole = INTEGER.fullmatch(response.strip())
    found = ([whole[0]] if whole else []) if bare else INTEGER.findall(response)
    given = int(found[-1].replace(",", "").replace("−", "-")) if found else None
    return {"score": float(given == int(answer)), "format": float(given is not None)}


@compares_with_answer
def character_share(response: str, answer: Any, *, row: dict[str, Any]) -> float:
    """Share of the response's characters that are `answer`, one character: what even a random model can learn."""
    return response.count(str(answer)) / max(1, len(response))
