"""What is refused before anything is started."""

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from megatron_bridge.families import load_architecture
from rlflow import job
from rlflow.checkpoint import State, folders
from rlflow.checkpoint.store import STATE
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
    """Transformer Engine needs a GPU; without being asked for it is left out."""
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


def checkpoint_of(root: Path, step: int) -> Path:
    """A complete checkpoint of a run without a critic, as far as it is looked at before models load."""
    partial = folders.begin(root, step)
    (partial / "actor").mkdir()
    torch.save(asdict(State(step)), partial / STATE)
    return folders.publish(partial, step)


def test_a_run_cannot_end_before_the_checkpoint_that_it_goes_on_from(
    tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the run left in its folder stays as it was."""

    class Data:
        steps_per_epoch = 3

    def untouched(config: Config) -> None:
        raise AssertionError("its configuration is written over")

    monkeypatch.setattr(job, "announce", lambda config, architecture: None)
    monkeypatch.setattr(job, "load_tokenizer", lambda folder: None)
    monkeypatch.setattr(job, "start_data", lambda config, tokenizer: (Data(), []))
    monkeypatch.setattr(job, "save_config", untouched)
    folder = str(checkpoint_of(tmp_path / "run" / "checkpoints", 4))
    for length, message in (
        ({"steps": 3}, r"trainer\.steps: 3 steps end before .*step_000004, which is of step 4"),
        ({"epochs": 1}, r"trainer\.epochs: 3 steps end before .*step_000004, which is of step 4"),
    ):
        trainer = Trainer(output_dir=str(tmp_path / "run"), resume=folder, **length)
        with pytest.raises(UserError, match=message):
            job.assemble(Config(Model(str(tiny_model("qwen2"))), trainer=trainer))
    job.look_at_end(Config(Model(""), trainer=trainer), 4, Path(folder), 4)


def test_a_disk_without_room_for_the_trained_model_is_refused_at_start(
    tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which the bytes are those of the tensors in the model's file; 8 bytes and a header come before them."""
    model = tiny_model("qwen2")
    file = (model / "model.safetensors").read_bytes()
    weights = len(file) - 8 - int.from_bytes(file[:8], "little")
    monkeypatch.setattr(job, "is_main", lambda config: True)
    config = Config(Model(str(model)), trainer=Trainer(output_dir=str(tmp_path)))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": weights}))
    job.make_room(config, load_architecture(model))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": weights - 1}))
    with pytest.raises(UserError, match=r"trainer\.output_dir: .* free, the trained model, which trainer\.export"):
        job.make_room(config, load_architecture(model))
