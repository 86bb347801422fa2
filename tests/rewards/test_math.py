"""Mathematical answers: boxes, equal forms, graders in threads, and comparisons that do not end."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import pytest

from rlflow.rewards import exact_match, integer_answer, math
from rlflow.rewards.grader import Grader, GradingError
from rlflow.rewards.mathematics import last_boxed


def score(response: str, answer: object) -> float:
    return math(response, answer, row={})["score"]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),  # cases.md E01
        (r"so \boxed{\{1,\{2\}\}}.", r"\{1,\{2\}\}"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{1} and then \boxed{2", "1"),
        ("no box", None),
        (r"\boxed{", None),
    ],
)
def test_the_last_box_with_its_braces_matched(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


HALVES = ["1/2", "0.5", ".5", r"\frac12", r"\frac{1}{2}", r"\dfrac{1}{2}", r"$\tfrac12$"]


def test_forms_of_one_half() -> None:
    """cases.md E04: all equal to each other, boxed and bare."""
    for given, wanted in permutations(HALVES, 2):
        assert score(given, wanted) == 1, (given, wanted)
        assert score(rf"\boxed{{{given}}}", wanted) == 1, (given, wanted)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("1,000", "1000"),
        (r"\boxed{\text{E}}", "E"),
        (r"7.41\%", r"7.41\%"),
        ("50%", "0.5"),  # declared policy: a percentage is its hundredth
        ("pi/2", r"\dfrac{\pi}{2}"),  # declared policy: plain text counts
        ("-2*pi", r"-2\pi"),
        ("2x+1", "1+2x"),
        ("x=5", "5"),
        (r"\{1, 2\}", r"\{2, 1\}"),
    ],
)
def test_equal_answers(first: str, second: str) -> None:
    """cases.md E04."""
    assert score(first, second) == score(second, first) == 1


@pytest.mark.parametrize(
    ("response", "answer"),
    [("5", "-5"), ("0.5", "0.05"), (r"\boxed{4}", "5"), ("", "5"), (r"\frac{", "5"), ("1/0", "1")],
)
def test_different_answers(response: str, answer: str) -> None:
    assert score(response, answer) == 0


@pytest.mark.parametrize("label", ["5", r"\boxed{5}", 5, "$5$"])
def test_a_boxed_label_is_unwrapped_once(label: object) -> None:
    """cases.md E03, by every built-in that reads an answer out of a response."""
    response = r"Answer: \boxed{5}"
    assert math(response, label, row={}) == {"score": 1, "format": 1}
    if label in ("5", 5):
        assert integer_answer(response, label, row={})["score"] == 1
        assert exact_match("5", label, row={}) == 1


def test_without_a_box_the_answer_still_counts_but_not_the_format() -> None:
    assert math("So x = 3, hence the answer is 5.", "5", row={}) == {"score": 1, "format": 0}
    assert math("First, 3.\n5", "5", row={}) == {"score": 1, "format": 0}
    assert math(r"Not 5 but \boxed{3}", "5", row={}) == {"score": 0, "format": 1}


def test_threads_get_the_same_answers() -> None:
    """cases.md E06: the grader needs no signal in the thread that asks."""
    pairs = [("2x+1", "1+2x"), ("2x+1", "1+3x")] * 4
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda pair: score(*pair), pairs))
    assert found == [1, 0] * 4


def test_a_comparison_that_does_not_end_is_an_error_and_not_the_last() -> None:
    started = time.monotonic()
    with pytest.raises(GradingError, match=r"no result within 0\.5 s"):
        math(r"\boxed{9^{9^{9^{9^{9}}}}}", "3", row={}, timeout_seconds=0.5)
    assert time.monotonic() - started < 5
    assert score("2x+1", "1+2x") == 1


def test_an_answer_that_cannot_be_read_is_an_error_of_the_data() -> None:
    """cases.md E06: it must not make every response wrong."""
    grader = Grader()
    with pytest.raises(GradingError, match="cannot be read as mathematics"):
        grader.equal(["$5$"], "no mathematics here", timeout_seconds=5)
    assert grader.equal(["$1+1$"], "$2$", timeout_seconds=5)
    grader.close()
