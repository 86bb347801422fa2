"""Faults of paths, data, rewards and output folders, which a check finds without loading anything."""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.config.examples import faults, write_data


def test_a_folder_of_something_else_is_no_tokenizer(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, f"model.tokenizer={tmp_path}")
    assert fault.startswith(f"model.tokenizer = {tmp_path}: holds no tokenizer: none of tokenizer.json, ")
    (tmp_path / "tokenizer.json").touch()
    assert faults(tmp_path, f"model.tokenizer={tmp_path}") == []


def test_data_files(tmp_path: Path) -> None:
    table = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"] * 9, "label": [1] * 9}), table)
    assert faults(tmp_path, f"data.train={table}") == [
        f"data.answer_key = answer: no such column in {table}, which has prompt, label"
    ]
    (fault,) = faults(tmp_path, f"data.train={table}", "data.answer_key=null")  # no column is looked for
    assert fault.startswith("data.answer_key = null: rewards.0.function = rlflow.rewards:integer_answer compares with")
    found = faults(tmp_path, f"data.train={table}", "data.answer_key=label", "trainer.prompts_per_step=10",
                   "data.evaluation=null")  # fmt: skip
    assert found == [f"data.train = {table}: has 9 rows, fewer than the 10 of a step"]
    assert faults(tmp_path, "data.train=none.csv")[0].startswith("data.train = none.csv: unknown file format")
    assert faults(tmp_path, "data.train=none.jsonl") == ["data.train = none.jsonl: no such file"]
    assert faults(tmp_path, "data.evaluation=none.jsonl") == ["data.evaluation = none.jsonl: no such file"]


def test_a_missing_column_is_named_with_its_nearest(tmp_path: Path) -> None:
    """cases.md D03."""
    data = write_data(tmp_path / "d.jsonl")
    found = faults(tmp_path, f"data.train={data}", "data.prompt_key=promt", "data.evaluation=null")
    assert found == [f"data.prompt_key = promt: no such column in {data}, which has prompt, answer; nearest: prompt"]


def test_what_training_needs_and_generating_does_not(tmp_path: Path) -> None:
    bare = {"data": {"train": ""}, "trainer": {"output_dir": ""}, "rewards": []}
    keys = [fault.partition(":")[0] for fault in faults(tmp_path, **bare)]
    assert keys == ["data.train", "rewards", "trainer.output_dir"]
    assert faults(tmp_path, purpose="generate", **bare) == []
    keys = [fault.partition(":")[0] for fault in faults(tmp_path, "data.evaluation=null", purpose="evaluate", **bare)]
    assert keys == ["data.evaluation", "rewards"]


def test_evaluation_needs_a_file(tmp_path: Path) -> None:
    assert faults(tmp_path, "data.evaluation=null", "evaluation.every=5") == [
        "data.evaluation: must be given: the held-out file, for evaluation.every = 5"
    ]


def test_greedy_evaluation_has_one_response(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, "evaluation.n=8")
    assert fault.startswith("evaluation.n = 8: greedy decoding gives the same response each time")
    assert faults(tmp_path, "evaluation.n=8", "evaluation.temperature=0.7") == []
    assert faults(tmp_path, "evaluation.n=8", purpose="evaluate") == []  # samples at the rollout's temperature


def test_output_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (fault,) = faults(tmp_path, f"trainer.output_dir={tmp_path}/file/run")
    assert fault.endswith("/file is a file")
    (fault,) = faults(tmp_path, "trainer.output_dir=~/run")
    assert fault == "trainer.output_dir = ~/run: ~ is not replaced; nearest: ${HOME}/run"
    (fault,) = faults(tmp_path, "trainer.output_dir=s3://bucket/run")
    assert fault == (
        "trainer.output_dir = s3://bucket/run: must be a folder of this machine or mounted on it, not a URL"
    )


def test_a_fresh_start_needs_a_folder_without_checkpoints(tmp_path: Path) -> None:
    assert faults(tmp_path, "trainer.resume=never") == []
    (tmp_path / "run/checkpoints/step_000006").mkdir(parents=True)
    (fault,) = faults(tmp_path, "trainer.resume=never")
    assert fault.startswith("trainer.resume = never: trainer.output_dir has checkpoints of an earlier run")
    assert faults(tmp_path, "trainer.resume=auto") == []


def test_system_prompt_needs_a_template(tmp_path: Path) -> None:
    found = faults(tmp_path, "data.system_prompt=Hello", "data.chat_template=false")
    assert found == ["data.chat_template = false: only a chat template can hold it; nearest: true"]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"function": "exact_match"}, "rewards.0.function: 'exact_match' must be written module:function; nearest: "
                                      "rlflow.rewards:exact_match"),
        ({"function": "nowhere:f"}, "rewards.0.function: importing nowhere failed: ModuleNotFoundError: No module "
                                    "named 'nowhere'"),
        ({"function": "rlflow.rewards:exact_mach"}, "rewards.0.function: rlflow.rewards has no function exact_mach; "
                                                    "nearest: exact_match"),
        ({"function": "rlflow.rewards:exact_match", "args": {"ignore_cas": True}},
         "rewards.0.args: rlflow.rewards:exact_match takes no argument ignore_cas; nearest: ignore_case"),
        ({"function": "asyncio:sleep"}, "rewards.0.function: asyncio:sleep must return its score: no `async def`"),
        ({"function": "os.path:isdir"}, "rewards.0.function: os.path:isdir must be callable as"),
        ({"function": "rlflow.rewards:exact_match", "weight": 0}, "rewards: at least one reward with a weight"),
    ],
)  # fmt: skip
def test_rewards_that_cannot_be_used(tmp_path: Path, reward: dict[str, Any], message: str) -> None:
    (fault,) = faults(tmp_path, rewards=[reward])
    assert fault.startswith(message)


def test_rewards_need_different_names(tmp_path: Path) -> None:
    twice = [{"function": "rlflow.rewards:math"}, {"function": "rlflow.rewards:math"}]
    assert faults(tmp_path, rewards=twice) == ["rewards.1.name = math: is the name of rewards.0 too"]
