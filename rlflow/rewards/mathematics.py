"""The reward for mathematical answers: what counts as the answer in a response, and when two answers are equal.

Equal are 1/2, 0.5 and \\frac{1}{2}; 1,000 and 1000; 50% and 0.5; pi and \\pi; a boxed label and a bare one. What needs
algebra is left to `grader`.
"""

import re
from fractions import Fraction
from typing import Any

from rlflow.rewards.columns import compares_with_answer
from rlflow.rewards.grader import Grader

NUMBER = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d*)(\.\d+)?(?<=\d)(/\d+)?")
GREEK_WORD = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
GRADER = Grader()
DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


@compares_with_answer
def math(response: str, answer: Any, *, row: dict[str, Any], timeout_seconds: float = 5.0) -> dict[str, float]:
    """Score 1 where the response's last \\boxed{…} equals the answer; format 1 where there is such a box.

    Without a box the last line, or the last expression that math-verify finds, is taken. Raises GradingError where the
    two cannot be compared within `timeout_seconds`: that is no wrong answer.
    """
    boxed, wanted = last_boxed(response), _content(str(answer))
    given = response.strip().rpartition("\n")[2] if boxed is None else boxed
    score = _same(_content(given), wanted)
    if not score:
        texts = [_latex(given)] + ([response] if boxed is None else [])
        score = GRADER.equal(texts, _latex(wanted), timeout_seconds)
    return {"score": float(score), "format": float(boxed is not None)}


def last_boxed(text: str) -> str | None:
    """What stands in the last complete \\boxed{…}, braces in it matched; None where there is none."""
    start = text.rfind(r"\boxed{")
    while start >= 0:
        content = _braced(text, start + len(r"\boxed{"))
        if content is not None:
            return content
        start = text.rfind(r"\boxed{", 0, start)
    return None


def _braced(text: str, start: int) -> str | None:
    """From `start` to the brace that closes the one before it; escaped braces come in pairs and so count too."""
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


def _content(text: str) -> str:
    """`text` without a box, dollar signs and the blanks around them."""
    boxed = last_boxed(text)
    text = (text if boxed is None else boxed).strip()
    for left, right in DELIMITERS:
        if text.startswith(left) and text.endswith(right) and len(text) >= len(left) + len(right):
            return text[len(left) : len(text) - len(right)].strip()
    return text


def _same(given: str, wanted: str) -> bool:
    """Equal as text, or as numbers: most answers need no algebra."""
    if given == wanted:
        return True
    numbers = [Fraction(text.replace(",", "")) for text in (given, wanted) if _is_number(text)]
    return len(numbers) == 2 and numbers[0] == numbers[1]


def _is_number(text: str) -> bool:
    match = NUMBER.fullmatch(text)
    return bool(match) and not re.search(r"/0+$", text) and not ("/" in text and "." in text)


def _latex(text: str) -> str:
    """`text` as boxed LaTeX, which math-verify reads in all of its notations."""
    return rf"$\boxed{{{GREEK_WORD.sub(lambda _: chr(92) + 'pi', _content(text))}}}$"
