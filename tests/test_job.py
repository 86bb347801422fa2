"""What is refused before anything is started."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rlflow import job
from rlflow.config import Config, Model, RewardModel
from rlflow.config.schema import Actor, Algorithm, Critic, Trainer
from rlflow.errors import UserError


def test_weight_files_of_every_role_are_looked_at_first(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    score = shutil.copytree(tiny_model("qwen2", tied=False, score=True), tmp_path / "score")
    config = Config(Model(str(tiny_model("qwen2"))), reward_model=RewardModel(path=str(score)))
    job.look_at_weights(config)
    (score / "model.safetensors").unlink()
    with pytest.raises(UserError) as raised:
        job.look_at_weights(config)
    assert str(score) in str(raised.value)


def test_layers_that_cannot_be_had_are_refused_by_their_role_s_key(tiny_model: Callable[..., Path]) -> None:
    """Transformer Engine needs a GPU; without being asked for its layers are left out."""
    model = Model(str(tiny_model("qwen2")))
    job.look_at_layers(Config(model))
    with pytest.raises(UserError, match=r"actor\.transformer_engine.*is not installed for the device and dtype"):
        job.look_at_layers(Config(model, actor=Actor(transformer_engine=True)))


def test_a_run_must_outlast_the_critic_s_warm_up() -> None:
    """Two epochs of three steps are known only when the data are read."""
    trainer, algorithm = Trainer(epochs=2), Algorithm(advantage="gae")
    long, short = (
        Config(Model(""), trainer=trainer, algorithm=algorithm, critic=Critic(warmup_steps=n)) for n in (6, 5)
    )
    assert job.run_length(short, steps_per_epoch=3) == 6
    with pytest.raises(UserError, match="6 of 6 steps leave the actor none"):
        job.run_length(long, steps_per_epoch=3)
