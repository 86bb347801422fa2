"""The quickstart's data: reproducible, disjoint, right, and readable by the trainer's own reader."""

import re
from pathlib import Path
from typing import Any

import pytest

from rlflow.data.readers import read_rows
from tools.make_arithmetic import TASKS, split, write_jsonl

Row = dict[str, Any]


def problem(row: Row) -> tuple[int, int]:
    """The two numbers of the question, the smaller one first."""
    question = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
    first, second = sorted(int(number) for number in re.findall(r"\d+", question))
    return first, second


@pytest.mark.parametrize(("task", "train", "held_out"), [("quickstart", 7700, 200), ("tiny", 2000, 32)])
def test_held_out_problems_are_not_trained_on_in_either_order(task: str, train: int, held_out: int) -> None:
    seen, kept = split(TASKS[task], seed=0)
    assert (len(seen), len(kept)) == (train, held_out)
    assert not {problem(row) for row in seen} & {problem(row) for row in kept}


def test_answers_are_right_and_the_example_is_no_problem() -> None:
    for rows in split(TASKS["quickstart"], seed=0):
        for row in rows:
            assert int(row["answer"]) == sum(problem(row))
            assert problem(row) != (57, 86)


def test_a_seed_gives_the_same_rows_again() -> None:
    first, again, other = (split(TASKS["quickstart"], seed) for seed in (1, 1, 2))
    assert first == again != other


def test_the_files_hold_the_rows(tmp_path: Path) -> None:
    rows, _ = split(TASKS["tiny"], seed=0)
    write_jsonl(tmp_path / "train.jsonl", rows)
    assert list(read_rows(str(tmp_path / "train.jsonl"))) == rows
