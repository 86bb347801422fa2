"""Data of reasoning-gym's tasks: reproducible, disjoint, judged right; skipped where the package is not installed."""

import sys
from fractions import Fraction
from pathlib import Path

import pytest

from rlflow.data.readers import read_rows
from rlflow.errors import UserError

pytest.importorskip("reasoning_gym")

from rlflow.rewards.reasoning_gym import verified
from tools.make_arithmetic import write_jsonl
from tools.make_reasoning_gym import Row, main, make_task, read_back, setting, split

DIGITS = {"min_terms": 3, "max_terms": 3, "max_digits": 1}


def rows(seed: int = 5, settings: dict[str, int] = DIGITS) -> tuple[list[Row], list[Row]]:
    return split(make_task("chain_sum", settings, seed, size=1000), examples=2, train=200, held_out=50)


def test_no_question_is_on_both_sides_or_an_example() -> None:
    train, held_out = rows()
    examples = {message["content"] for message in train[0]["prompt"][:-1] if message["role"] == "user"}
    asked = [row["question"] for row in train + held_out]
    assert (len(train), len(held_out), len(examples)) == (200, 50, 2)
    assert len({*asked, *examples}) == 252


def test_a_prompt_is_its_question_after_the_worked_examples() -> None:
    train, held_out = rows()
    for row in train + held_out:
        *examples, last = row["prompt"]
        assert last == {"role": "user", "content": row["question"]}
        assert [message["role"] for message in examples] == ["user", "assistant"] * 2
        assert examples == train[0]["prompt"][:-1]
    question, answer = (message["content"] for message in train[0]["prompt"][:2])
    assert (question, answer) == ("State the final answer to the following arithmetic problem: 8 + 5 - 4 =", "9")


def test_rows_are_judged_from_their_file(tmp_path: Path) -> None:
    _, held_out = rows()
    write_jsonl(tmp_path / "held_out.jsonl", held_out)
    read = list(read_rows(str(tmp_path / "held_out.jsonl")))
    assert read == held_out
    assert all(verified(row["answer"], row["answer"], row=row)["score"] == 1 for row in read)


def test_seeds_give_the_same_rows_again_and_other_seeds_others() -> None:
    assert rows() == rows()
    first, other = ({row["question"] for row in rows(seed)[0]} for seed in (5, 6))
    assert len(first & other) < 30  # of 200 among 4000 by chance 10


def test_fractions_in_the_metadata_are_written_as_text() -> None:
    """gsm_symbolic has them among its variables; its verifier reads the answer alone."""
    row = {"question": "?", "answer": "8", "metadata": {"source_dataset": "gsm_symbolic", "part": Fraction(1, 2)}}
    assert read_back(row)["metadata"]["part"] == "1/2"


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("chain_sums", {}, "reasoning-gym has no task chain_sums; nearest: chain_sum"),
        ("quaternions", {}, "reasoning-gym has no task quaternions; it has ab, acre, advanced_geometry, "),
        ("chain_sum", {"terms": 3}, "unexpected keyword argument 'terms'"),
        ("chain_sum", {"min_terms": 9}, "max_terms must be >= min_terms"),
    ],
)
def test_unknown_tasks_and_settings_are_named(task: str, settings: dict[str, int], message: str) -> None:
    with pytest.raises(UserError) as raised:
        make_task(task, settings, seed=0, size=10)
    assert message in raised.value.message


def test_a_task_with_too_few_problems_is_an_error() -> None:
    """Two terms of one digit: at most 200 questions."""
    with pytest.raises(UserError, match=r"252 problems are wanted and only \d+ of 1000 problems drawn are different"):
        rows(settings={"max_terms": 2, "max_digits": 1})


def test_a_task_whose_answer_does_not_score_is_refused() -> None:
    """propositional_logic gives no answer of its own."""
    with pytest.raises(UserError, match=r"problem '.*"):
        split(make_task("propositional_logic", {}, 0, size=10), examples=0, train=2, held_out=0)


def test_settings_are_read_as_yaml() -> None:
    assert [setting(text) for text in ("min_terms=3", "styles=[plain]")] == [("min_terms", 3), ("styles", ["plain"])]


@pytest.mark.parametrize(
    ("option", "value", "least"), [("--examples", "-1", 0), ("--held-out", "-1", 0), ("--train", "0", 1)]
)
def test_numbers_that_cannot_be_are_refused(
    option: str, value: str, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(
        "sys.argv", ["make_reasoning_gym", "--task", "chain_sum", "--out", str(tmp_path), option, value]
    )
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"{option}: must be a whole number of at least {least}, not {value}" in capsys.readouterr().err


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # as where it is not installed
    with pytest.raises(UserError, match=r"not installed; it is rlflow's extra \[reasoning-gym\]"):
        make_task("chain_sum", DIGITS, seed=0, size=10)
