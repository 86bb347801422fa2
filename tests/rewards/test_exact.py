"""Exact strings and whole numbers."""

from typing import Any

import pytest

from rlflow.rewards import character_share, exact_match, integer_answer


@pytest.mark.parametrize(
    ("response", "answer", "score"), [(" Paris\n", "Paris", 1), ("paris", "Paris", 0), ("42", 42, 1), ("", "x", 0)]
)
def test_exact_match(response: str, answer: Any, score: float) -> None:
    assert exact_match(response, answer, row={}) == score


def test_exact_match_may_ignore_case() -> None:
    assert exact_match("PARIS", "Paris", row={}, ignore_case=True) == 1


@pytest.mark.parametrize(
    ("response", "score", "form"),
    [
        ("42", 1, 1),
        ("17 + 25 = 42.", 1, 1),
        ("42 is 40 + 2", 0, 1),
        (r"\boxed{42}", 1, 1),
        ("**42**", 1, 1),
        ("-42", 0, 1),
        ("4 2", 0, 1),
        ("42.5", 0, 0),
        ("x42", 0, 0),
        ("forty-two", 0, 0),
        ("", 0, 0),
    ],
)
def test_integer_answer_reads_the_last_whole_number(response: str, score: float, form: float) -> None:
    for answer in (42, "42"):
        assert integer_answer(response, answer, row={}) == {"score": score, "format": form}


@pytest.mark.parametrize(
    ("response", "answer"), [("1,234,567", 1234567), ("= -7", -7), ("−7", -7), ("+7", 7), ("3-1", -1)]
)
def test_signs_and_thousands(response: str, answer: int) -> None:
    assert integer_answer(response, answer, row={})["score"] == (response != "3-1")


@pytest.mark.parametrize(
    ("response", "score", "form"), [(" 42\n", 1, 1), ("-42", 0, 1), ("= 42", 0, 0), ("17 + 25 = 42", 0, 0), ("", 0, 0)]
)
def test_a_bare_integer_answer_is_nothing_but_the_number(response: str, score: float, form: float) -> None:
    assert integer_answer(response, 42, row={}, bare=True) == {"score": score, "format": form}


@pytest.mark.parametrize(("response", "share"), [("7a77", 0.75), ("", 0.0), ("abc", 0.0)])
def test_character_share(response: str, share: float) -> None:
    assert character_share(response, "7", row={}) == share
