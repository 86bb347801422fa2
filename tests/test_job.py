"""What is refused before anything is started."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rlflow import job
from rlflow.config import Config, Model, RewardModel
from rlflow.errors import UserError


def test_weight_files_of_every_role_are_looked_at_first(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    score = shutil.copytree(tiny_model("qwen2", tied=False, score=True), tmp_path / "score")
    config = Config(Model(str(tiny_model("qwen2"))), reward_model=RewardModel(path=str(score)))
    job.look_at_weights(config)
    (score / "model.safetensors").unlink()
    with pytest.raises(UserError) as raised:
        job.look_at_weights(config)
    assert str(score) in str(raised.value)
