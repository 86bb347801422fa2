"""Reading: types, overrides, the environment, unknown keys, and text that loads as what was dumped."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.config import Config, Model, Optimizer, Reward, Rollout, Trainer, assemble, dump, load
from rlflow.config.document import parse
from rlflow.config.load import interpret
from rlflow.errors import UserError
from tests.config.examples import tree, write_config


def faults_of(sections: dict[str, Any], *overrides: str) -> list[str]:
    return [str(fault) for fault in interpret({"model": {"path": "m"}, **sections}, overrides)[1]]


def value_of(key: str, *overrides: str, **sections: Any) -> Any:
    config, faults = interpret({"model": {"path": "m"}, **sections}, overrides)
    assert not faults
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def test_yaml_numbers_are_numbers() -> None:
    assert parse("[1e-6, 1E5, .5, 1., 012, -3, 0x1f]") == [1e-6, 1e5, 0.5, 1.0, 12, -3, 31]
    assert parse("[yes, off, 1:30, 2026-01-01, 1_000]") == ["yes", "off", "1:30", "2026-01-01", "1_000"]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("optimizer.lr", "1e-6", 1e-6),
        ("optimizer.lr", "1", 1.0),
        ("evaluation.temperature", "0", 0.0),
        ("trainer.seed", "0", 0),
        ("trainer.export", "false", False),
        ("tracking.wandb", "null", None),
        ("tracking.wandb", "123", "123"),
        ("data.system_prompt", "Answer: yes", "Answer: yes"),
        ("data.system_prompt", "a=b", "a=b"),
        ("rollout.stop_token_ids", "[3, 4]", (3, 4)),
        ("actor.ranks", "all", "all"),
        ("actor.ranks", "[0, 1]", (0, 1)),
        ("rollout.dtype", "float32", "float32"),
    ],
)
def test_overrides_have_the_type_of_their_key(key: str, text: str, value: Any) -> None:
    found = value_of(key, f"{key}={text}")
    assert found == value
    assert type(found) is type(value)


def test_quoted_values_in_a_file_are_read_as_the_key_demands() -> None:
    assert value_of("trainer.export", trainer={"export": "false"}) is False
    assert value_of("optimizer.lr", optimizer={"lr": "1e-6"}) == 1e-6
    assert value_of("tracking.wandb", tracking={"wandb": "null"}) == "null"


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("rollout", "n", 2.5, "rollout.n = 2.5: must be a whole number; nearest: 2"),
        ("rollout", "n", True, "rollout.n = true: must be a whole number"),
        ("rollout", "n", None, "rollout.n = null: must be a whole number"),
        ("optimizer", "lr", False, "optimizer.lr = false: must be a finite number"),
        ("optimizer", "lr", float("nan"), "optimizer.lr = nan: must be a finite number"),
        ("trainer", "export", "yes", "trainer.export = yes: must be true or false"),
        ("trainer", "export", 1, "trainer.export = 1: must be true or false"),
        ("actor", "transformer_engine", "yes", "actor.transformer_engine = yes: must be true, false or null"),
        ("trainer", "output_dir", 7, "trainer.output_dir = 7: must be text; write '7' in quotes"),
        ("rollout", "stop_token_ids", 3, "rollout.stop_token_ids = 3: must be a list"),
        ("model", "path", None, "model.path = null: must be given: Folder with config.json, tokenizer and weights: "
         "safetensors, or a Megatron checkpoint (torch_dist)."),
        ("data", "train", None, "data.train = null: must be given: Training file; needed to train."),
        ("tracking", "wandb", 7, "tracking.wandb = 7: must be text or null; write '7' in quotes"),
        ("algorithm", "dual_clip", "maybe", "algorithm.dual_clip = maybe: must be a finite number or null"),
        ("trainer", "steps", 2.5, "trainer.steps = 2.5: must be a whole number or null; nearest: 2"),
        ("algorithm", "importance_correction", True,
         "algorithm.importance_correction = true: must be one of tis, or null"),
        ("rollout", "quantization", "fp4", "rollout.quantization = fp4: must be one of fp8, or null; nearest: fp8"),
        ("actor", "recompute", None, "actor.recompute = null: must be one of none, selective, full; nearest: none"),
        ("algorithm", "kl_in", "lose", "algorithm.kl_in = lose: must be one of loss, reward; nearest: loss"),
        ("model", "dtype", "bf16", "model.dtype = bf16: must be one of float32, bfloat16; nearest: bfloat16"),
    ],
)  # fmt: skip
def test_wrong_types(section: str, key: str, value: Any, message: str) -> None:
    assert faults_of({section: {"path": "m", key: value} if section == "model" else {key: value}}) == [message]


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("trainer.lerning_rate=1", "optimizer.lr"),
        ("trainer.lr=1", "optimizer.lr"),
        ("trainer.save-every=1", "trainer.save_every"),
        ("trainer.save_frq=1", "trainer.save_every"),
        ("trainr.steps=1", "trainer.steps"),
        ("+trainer.steps=1", "trainer.steps"),
        ("--trainer.steps=1", "trainer.steps"),
        ("steps=1", "trainer.steps or profile.steps"),
        ("model.n=1", "rollout.n or evaluation.n"),
        ("actor.tp=1", "actor.tensor_parallel_size"),
        ("rewards.0.wieght=1", "rewards.0.weight"),
        ("data.batch_size=1", "trainer.prompts_per_step"),
        ("critic.lr=1", "critic_optimizer.lr"),
        ("critic.warmup_step=1", "critic.warmup_steps"),
        ("critic.optimizer=1", "critic_optimizer"),
    ],
)
def test_unknown_keys_name_the_nearest(override: str, nearest: str) -> None:
    """cases.md H01, on the command line and in the file."""
    rewards = {"rewards": [{"function": "a:b"}]}
    faults = faults_of(rewards, override)
    assert len(faults) == 1
    assert faults[0].startswith(override.replace("=", " = ") + ": unknown ")
    assert faults[0].endswith(f"; nearest: {nearest}")


def test_unknown_keys_without_a_near_one_list_what_there_is() -> None:
    (fault,) = faults_of({"bridge": {"zzz": 1}})
    assert fault == "bridge.zzz = 1: unknown key; bridge has bucket_mib, startup_proof, checksum, placement"
    (fault,) = faults_of({}, "+x.y=1")
    assert fault.startswith("+x.y = 1: unknown section; sections are model, actor, ")


def test_unknown_keys_in_the_file_are_found_at_every_depth() -> None:
    sections = {
        "trainer": {"lerning_rate": 1},
        "trainr": {"steps": 2, "keep": 3},
        "rewards": [{"function": "a", "f": 0}],
    }
    starts = [fault.partition(" = ")[0] for fault in faults_of(sections)]
    assert starts == ["trainr.steps", "trainr.keep", "rewards.0.f", "trainer.lerning_rate"]


def test_overrides_reach_into_lists_and_make_what_is_missing() -> None:
    sections = {"model": {"path": "m"}, "rewards": [{"function": "a:b"}]}
    config, faults = interpret(sections, ["rewards.0.weight=2", "rewards.1.function=c:d", "rewards.1.args.x=[1, no]"])
    assert not faults
    assert config.rewards == (Reward("a:b", 2.0), Reward("c:d", args={"x": [1, "no"]}))
    assert sections == {"model": {"path": "m"}, "rewards": [{"function": "a:b"}]}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rewards.2.weight=1", "rewards.2.weight = 1: 2 is no index of a list of 0"),
        ("model.path.x=1", "model.path.x = 1: m has no key x"),
        ("trainer.steps", "trainer.steps: must be written section.key=value"),
        ("=3", "=3: must be written section.key=value"),
        ("trainer=3", "trainer = 3: must hold keys and values"),
        ("model=3", "model = 3: must hold keys and values"),
        ("rewards=[3]", "rewards.0 = 3: must hold keys and values"),
        ("data.train=null", "data.train = null: must be given: Training file; needed to train."),
        ("actor.recompute=null", "actor.recompute = null: must be one of none, selective, full; nearest: none"),
        ("model.dtype=null", "model.dtype = null: must be one of float32, bfloat16"),
        ("rollout.stop_token_ids=[1", "rollout.stop_token_ids = [1: cannot be read as YAML"),
    ],
)
def test_overrides_that_fit_nowhere(override: str, message: str) -> None:
    assert faults_of({"rewards": []}, override) == [message]


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_TEST", "7")
    monkeypatch.delenv("RLFLOW_ABSENT", raising=False)
    assert value_of("trainer.seed", trainer={"seed": "${RLFLOW_TEST}"}) == 7
    assert value_of("trainer.seed", trainer={"seed": "${RLFLOW_ABSENT:-3}"}) == 3
    assert value_of("trainer.output_dir", "trainer.output_dir=runs/${RLFLOW_TEST}/x") == "runs/7/x"
    assert value_of("trainer.output_dir", trainer={"output_dir": "$${RLFLOW_TEST} $1"}) == "${RLFLOW_TEST} $1"
    assert value_of("tracking.wandb", tracking={"wandb": "${RLFLOW_ABSENT:-}"}) is None
    message = "trainer.seed = ${RLFLOW_ABSENT}: the environment variable RLFLOW_ABSENT is not set"
    assert faults_of({"trainer": {"seed": "${RLFLOW_ABSENT}"}})[0] == message
    assert value_of("trainer.seed", "trainer.seed=5", trainer={"seed": "${RLFLOW_ABSENT}"}) == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {steps: 1}\ntrainer: {seed: 1}", r"(?s)trainer is given twice.*line 2, column 1"),
        ("trainer: [", "is not valid YAML"),
        ("- 1", "must hold sections"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="is a folder; a YAML file in it is due"):
        load(tmp_path)


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    """A wrong type in the file, an unknown override and broken rules, but no follow-up of a fault already named."""
    sections = tree(tmp_path)
    sections["rollout"] = {"n": "many", "max_prompt_length": 0}
    with pytest.raises(UserError) as raised:
        assemble(sections, ["trainer.lerning_rate=1", "algorithm.mini_batches=7"], source="c.yaml")
    assert raised.value.where == "c.yaml"
    lines = raised.value.message.splitlines()
    assert lines[0] == "3 faults"
    assert [line.partition(" = ")[0].strip() for line in lines[1:]] == [
        "rollout.n", "trainer.lerning_rate", "rollout.max_prompt_length",
    ]  # fmt: skip


def test_what_is_saved_is_what_runs(tmp_path: Path) -> None:
    """cases.md H08: keys that default to others are filled in, and the text loads as an equal configuration."""
    config = load(write_config(tmp_path), ["model.dtype=float32"])
    assert (config.model.tokenizer, config.rollout.dtype) == (config.model.path, "float32")
    assert config.rewards[0].name == "integer_answer"
    assert assemble(parse(dump(config))) == config


def test_zero_is_a_value() -> None:
    """cases.md H06."""
    zeros = ("algorithm.kl_coef", "evaluation.temperature", "trainer.seed", "trainer.keep", "optimizer.warmup_steps")
    for key in zeros:
        assert value_of(key, f"{key}=0") == 0
        section, name = key.split(".")
        assert value_of(key, **{section: {name: 0}}) == 0


text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20)
number = st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=3,
)
configs = st.builds(
    Config,
    model=st.builds(Model, path=text, tokenizer=st.none() | text),
    optimizer=st.builds(Optimizer, lr=number, warmup_steps=st.integers()),
    rollout=st.builds(Rollout, ranks=st.just("all") | st.lists(st.integers()).map(tuple), dtype=st.none()),
    trainer=st.builds(Trainer, steps=st.none() | st.integers(), output_dir=text, export=st.booleans()),
    rewards=st.lists(
        st.builds(Reward, function=text, weight=number, args=st.dictionaries(text, plain, max_size=3)), max_size=2
    ).map(tuple),
)


@settings(max_examples=30, deadline=None)
@given(configs)
def test_dumped_text_loads_as_an_equal_config(config: Config) -> None:
    assert interpret(parse(dump(config))) == (config, [])


@settings(max_examples=60, deadline=None)
@given(st.builds(Optimizer, lr=number, beta1=number, warmup_steps=st.integers()), text)
def test_overrides_equal_the_file(optimizer: Optimizer, path: str) -> None:
    """Any value, written as an override, gives what the file would have given."""
    overrides = [f"optimizer.{item.name}={getattr(optimizer, item.name)}" for item in fields(optimizer)]
    path = path.replace("${", "$")
    config, faults = interpret({"model": {"path": "m"}}, [*overrides, f"trainer.output_dir={path}"])
    assert not faults
    assert config.optimizer == optimizer
    assert config == replace(config, trainer=Trainer(output_dir=path))
