"""The CPU benchmark does the peer's work, and measures it in processor time."""

import argparse
import json
from pathlib import Path

import pytest

from rlflow.config.load import assemble
from tools import bench_grpo_cpu
from tools.bench_grpo_cpu import ProcessorTracker, make_model, make_tokenizer, prepare, prompts

WORK = argparse.Namespace(
    preset="1m", prompts=4, group=2, response=8, steps=3, lr=1e-3, dtype="float32", micro_batch_tokens=512
)


@pytest.mark.parametrize(("preset", "weights"), [("1m", 1_001_600), ("5m", 4_756_992)])
def test_models_are_those_of_the_peer(preset: str, weights: int) -> None:
    assert sum(parameter.numel() for parameter in make_model(preset).parameters()) == weights


def test_prompts_are_short_sums() -> None:
    texts = list(prompts(3))
    assert texts[0] == "Compute: 137 + 582 ="
    lengths = [len(ids) for ids in make_tokenizer()(texts).input_ids]
    assert max(lengths) <= bench_grpo_cpu.LONGEST_PROMPT


def test_the_configuration_fixes_the_work(tmp_path: Path) -> None:
    config = assemble(prepare(tmp_path, WORK), world_size=1)
    assert config.rollout.ignore_eos
    assert (config.rollout.max_response_length, config.trainer.steps, config.data.shuffle) == (8, 3, False)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == list(prompts(12))


def test_phases_are_timed_by_the_processor_too(tmp_path: Path) -> None:
    config = assemble(prepare(tmp_path, WORK), world_size=1)
    tracker = ProcessorTracker(config, tmp_path / "run", True, 3)
    tracker.begin(1)
    with tracker.phase("update"):
        sum(range(100_000))
    tracker.end(1, {"train/reward": 0.5})
    (record,) = (json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert record["cpu/step"] >= record["cpu/update"] > 0
    assert record["time/step"] >= record["time/update"] > 0
