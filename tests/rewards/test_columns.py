"""Columns that reward functions declare to read: which data are refused for want of them."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlflow.config import Data, Reward
from rlflow.data.prompts import load_prompts
from rlflow.errors import UserError
from rlflow.rewards.columns import columns_read, reads
from tests.config.examples import faults
from tests.data.tokenizers import make_tokenizer

REWARDS = [{"function": "given:plain"}, {"function": "given:judge", "args": {"factor": 2}}]


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `given` with a function that reads nothing of a row and one that does."""

    @reads("level", "metadata.source")
    def judge(response: str, answer: Any, *, row: dict[str, Any], factor: int) -> float:
        return float(factor)

    module = ModuleType("given")
    module.judge = judge  # type: ignore[attr-defined]
    module.plain = lambda response, answer, *, row: 1.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "given", module)


def test_a_function_says_what_it_reads() -> None:
    read = [("level", "rewards.1.function"), ("metadata.source", "rewards.1.function")]
    assert columns_read([Reward(**reward) for reward in REWARDS]) == read


def test_a_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    found = faults(tmp_path, rewards=REWARDS)
    assert found == [
        f"rewards.1.function: reads {column} of each row; {tmp_path / file} has prompt, answer"
        for file in ("test.jsonl", "train.jsonl")
        for column in ("level", "metadata.source")
    ]
    (fault,) = faults(tmp_path, rewards=[{"function": "given:judge"}])  # it cannot be had
    assert fault.startswith("rewards.0.function: given:judge must be callable as")


@pytest.mark.parametrize("name", ["exact_match", "integer_answer", "character_share", "math"])
def test_functions_that_compare_with_an_answer_are_refused_without_one(tmp_path: Path, name: str) -> None:
    rewards = [{"function": "given:plain"}, {"function": f"rlflow.rewards:{name}"}]
    compares = f"rewards.1.function = rlflow.rewards:{name} compares with the answer, and none is given"
    fault = f"data.answer_key = null: {compares}; nearest: answer"
    assert faults(tmp_path, "data.answer_key=null", rewards=rewards) == [fault]
    assert faults(tmp_path, "data.answer_key=null", rewards=rewards[:1]) == []
    assert faults(tmp_path, rewards=rewards) == []


@pytest.mark.parametrize(
    ("second", "column", "reason"),
    [
        ('{"prompt": "w1", "answer": 1, "metadata": {"source": "a"}}', "level", "there is prompt, answer, metadata"),
        ('{"prompt": "w1", "answer": 1, "level": null, "metadata": {"source": "a"}}', "level", "level is null"),
        ('{"prompt": "w1", "answer": 1, "level": 0, "metadata": {}}', "metadata.source", "metadata has no keys"),
        (
            '{"prompt": "w1", "answer": 1, "level": 0, "metadata": "a"}',
            "metadata.source",
            "metadata is 'a', which has no keys",
        ),
    ],
)
def test_the_first_row_without_them_is_named(tmp_path: Path, second: str, column: str, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "w1", "answer": 1, "level": 0, "metadata": {"source": "a"}}\n' + second)
    read = columns_read([Reward(**reward) for reward in REWARDS])
    data = Data(train=str(path), chat_template=False)
    with pytest.raises(UserError) as raised:
        load_prompts(str(path), make_tokenizer(), data, max_length=9, name="train", reads=read)
    assert str(raised.value) == f"{path}, line 2: no value of {column} (rewards.1.function); {reason}"
