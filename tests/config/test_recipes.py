"""Every recipe in `configs` is good at the number of ranks that it is written for."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rlflow.config import Config, assemble, load
from rlflow.config.load import read
from rlflow.errors import UserError
from tests.config.examples import QWEN, ROOT, write_data

SMOLLM2 = {  # SmolLM2-135M-Instruct
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576,
    "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {**SMOLLM2, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {"quickstart": SMOLLM2, "quickstart_ppo": SMOLLM2, "reasoning_gym": SMOLLM2, "tiny": TINY}
TWO_NODES = {"qwen2.5-7b-2x8a100", "qwen2.5-7b-ppo-2x8a100"}


def test_all_recipes_are_tested_here() -> None:
    assert {path.stem for path in (ROOT / "configs").iterdir()} == {*MODELS, *TWO_NODES}


@pytest.mark.parametrize("name", MODELS)
def test_small_recipes_are_good(name: str, tmp_path: Path) -> None:
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    data = write_data(tmp_path / "data.jsonl", question="", metadata={"source_dataset": "chain_sum"})
    paths = {"model.path": tmp_path, "data.train": data, "data.evaluation": data, "trainer.output_dir": tmp_path}
    overrides = [f"{key}={path}" for key, path in paths.items()]
    config = assemble(read(ROOT / f"configs/{name}.yaml"), overrides, world_size=2)
    assert config.trainer.steps is not None


def test_ppo_learns_from_as_many_samples_as_grpo() -> None:
    grpo, ppo = (read(ROOT / f"configs/{name}.yaml") for name in ("quickstart", "quickstart_ppo"))
    for section in ("model", "data", "rewards", "evaluation"):
        assert ppo[section] == grpo[section]
    sampled = [
        ("rollout", "n"),
        ("rollout", "max_response_length"),
        ("trainer", "steps"),
        ("trainer", "prompts_per_step"),
    ]
    for section, key in sampled:
        assert ppo[section][key] == grpo[section][key]


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that the recipes for two nodes name."""
    for name in ("train", "test"):
        table = pyarrow.table({"prompt": ["1 + 1"] * 256, "answer": ["2"] * 256})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    for variable, path in (("MODEL", QWEN), ("DATA", tmp_path), ("RUNS", tmp_path)):
        monkeypatch.setenv(variable, str(path))


def on_two_nodes(name: str) -> Config:
    return load(ROOT / f"configs/{name}.yaml", world_size=16, ranks_per_node=8)


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("name", sorted(TWO_NODES))
def test_recipes_for_two_nodes_are_good(name: str) -> None:
    """At world size 16, as they say themselves."""
    config = on_two_nodes(name)
    assert config.optimizer.lr == 1e-6


@pytest.mark.usefixtures("two_nodes")
def test_ppo_keeps_actor_and_critic_apart() -> None:
    config = on_two_nodes("qwen2.5-7b-ppo-2x8a100")
    assert (config.actor.ranks, config.critic.ranks) == (tuple(range(8)), tuple(range(8, 16)))
    assert config.critic.tensor_parallel_size == config.actor.tensor_parallel_size == 4


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("name", sorted(TWO_NODES))
def test_everything_that_is_absent_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "/nowhere")
    monkeypatch.delenv("DATA")
    with pytest.raises(UserError) as raised:
        on_two_nodes(name)
    assert [line.split()[0].rstrip(":") for line in raised.value.message.splitlines()[1:]] == [
        "data.train", "data.evaluation", "model.path",
    ]  # fmt: skip
