"""Rules on what the configuration names outside itself: folders, data files, reward functions, packages."""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_bridge.families import load_architecture
from rlflow.config.faults import Fault, nearest
from rlflow.config.schema import Config, Data
from rlflow.errors import UserError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""Of which a tokenizer's folder has at least one."""


def file_faults(config: Config) -> Iterator[Fault]:
    """Paths and settings that every command reads."""
    tokenizer = config.model.tokenizer
    if tokenizer not in (None, config.model.path):
        yield from _tokenizer_faults(Path(tokenizer))
    if config.data.system_prompt is not None and not config.data.chat_template:
        rule = "only a chat template can hold it"
        yield Fault("data.chat_template", "false", rule, "true", ("data.system_prompt",))


def training_faults(config: Config) -> Iterator[Fault]:
    """The training file, the folder of the run, the checkpoint to resume from and the tracker's package."""
    trainer, rows_needed = config.trainer, config.trainer.prompts_per_step
    if not config.data.train:
        yield Fault("data.train", None, "must be given: the training file")
    else:
        yield from _data_faults(config, "data.train", config.data.train, rows_needed)
    if not trainer.output_dir:
        yield Fault("trainer.output_dir", None, "must be given: the folder of the run")
    elif trainer.output_dir.startswith("~"):
        yield Fault("trainer.output_dir", trainer.output_dir, "~ is not replaced", f"${{HOME}}{trainer.output_dir[1:]}")
    elif trainer.output_dir.partition("://")[1]:
        rule = "must be a folder of this machine or mounted on it, not a URL"
        yield Fault("trainer.output_dir", trainer.output_dir, rule)
    elif problem := _unwritable(Path(trainer.output_dir)):
        yield Fault("trainer.output_dir", trainer.output_dir, problem)
    if trainer.resume == "never" and any(Path(trainer.output_dir).glob("checkpoints/step_*")):
        rule = "trainer.output_dir has checkpoints of an earlier run, which `auto` would mix with those of this one"
        yield Fault("trainer.resume", "never", f"{rule}: choose another folder or remove them", "auto")
    if trainer.resume not in ("auto", "never") and not Path(trainer.resume).is_dir():
        close = nearest(trainer.resume, ("auto", "never"))
        yield Fault("trainer.resume", trainer.resume, "must be auto, never or the folder of a checkpoint", close)
    if config.tracking.wandb is not None and importlib.util.find_spec("wandb") is None:
        yield Fault("tracking.wandb", config.tracking.wandb, "the package wandb is not installed", "null")


def evaluation_faults(config: Config, *, required: bool) -> Iterator[Fault]:
    """The held-out file, and how it is sampled."""
    path, evaluation = config.data.evaluation, config.evaluation
    if path is not None:
        yield from _data_faults(config, "data.evaluation", path, rows_needed=1)
    elif required or evaluation.every > 0:
        rule = "must be given: the held-out file" + ("" if required else f", for evaluation.every = {evaluation.every}")
        yield Fault("data.evaluation", None, rule, None, ("evaluation.every",))
    if not required and evaluation.n > 1 and evaluation.temperature == 0:  # `eval` samples at the rollout's then
        rule = "greedy decoding gives the same response each time; set evaluation.temperature above 0"
        yield Fault("evaluation.n", evaluation.n, rule, "1", ("evaluation.temperature",))


def reward_faults(config: Config) -> Iterator[Fault]:
    """Reward functions that cannot be imported or called with their arguments, or that lack the answer to compare with.

    Also names used twice, and no weight at all.
    """
    from rlflow.rewards.columns import needs_answer

    if not any(reward.weight for reward in config.rewards) and not _has_reward_model(config):
        yield Fault("rewards", None, "at least one reward with a weight other than 0 must be given")
    elif not config.rewards and config.data.evaluation is not None:
        rule = "only functions score data.evaluation: at least one must be given, of weight 0 if it is a metric only"
        yield Fault("rewards", None, rule, None, ("data.evaluation",))
    names = [reward.label for reward in config.rewards]
    for number, reward in enumerate(config.rewards):
        try:
            if needs_answer(reward) and config.data.answer_key is None:
                key = f"rewards.{number}.function"
                rule = f"{key} = {reward.function} compares with the answer, and none is given"
                yield Fault("data.answer_key", "null", rule, Data.answer_key, (key,))
        except UserError as error:
            yield Fault(f"rewards.{number}.{error.where}", None, error.message)
        first = names.index(names[number])
        if first != number:
            yield Fault(f"rewards.{number}.name", names[number], f"is the name of rewards.{first} too")
        if names[number] == "reward_model" and config.reward_model.path is not None:
            yield Fault(f"rewards.{number}.name", "reward_model", "is the reward model's name", None)


def vocabulary_difference(tokenizer: str, model: str, other: str) -> str | None:
    """What the model in the folder `other` lacks of the vocabulary of `model`, whose tokenizer is given.

    Read from both tokenizer.json; where one is missing, sizes in config.json must be equal. Tokens beyond those of the
    given tokenizer, such as one for padding, never occur.
    """
    here, there = _tokens(tokenizer), _tokens(other)
    if here is None or there is None:
        sizes = [load_architecture(folder).vocab for folder in (model, other)]
        return None if len(set(sizes)) == 1 else f"{sizes[1]} tokens instead of {sizes[0]}"
    different = [token for token in sorted(here) if here[token] != there.get(token)]
    if not different:
        return None
    token = different[0]
    found = repr(there[token]) if token in there else "missing"
    return f"token {token} is {found} instead of {here[token]!r}"


def _tokens(folder: str) -> dict[int, str] | None:
    """Token ids and their texts by a folder's tokenizer.json; None where there is none of the usual form."""
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:  # what is no JSON is said when the tokenizer is loaded
        return None
    vocabulary = content.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # unigram models have pairs of a token and its score
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    added = {token["id"]: token["content"] for token in content.get("added_tokens", ())}
    return {number: token for token, number in vocabulary.items()} | added or None


def _tokenizer_faults(folder: Path) -> Iterator[Fault]:
    if not folder.is_dir():
        yield Fault("model.tokenizer", folder, "no such folder")
    elif not any((folder / name).exists() for name in TOKENIZER_FILES):
        yield Fault("model.tokenizer", folder, f"holds no tokenizer: none of {', '.join(TOKENIZER_FILES)}")


def _has_reward_model(config: Config) -> bool:
    return config.reward_model.path is not None and config.reward_model.weight != 0


def _data_faults(config: Config, key: str, path: str, rows_needed: int) -> Iterator[Fault]:
    from rlflow.data.readers import describe

    try:
        file = describe(path)
    except UserError as error:
        yield Fault(key, error.where, error.message)
        return
    if file.rows is not None and file.rows < rows_needed:
        rule = f"has {file.rows} rows, fewer than the {rows_needed} of a step"
        yield Fault(key, path, rule, None, ("trainer.prompts_per_step",))
    for selector in ("prompt_key", "answer_key"):
        column = getattr(config.data, selector)
        if column is not None and column not in file.columns:
            rule = f"no such column in {path}, which has {', '.join(file.columns) or 'no rows'}"
            yield Fault(f"data.{selector}", column, rule, nearest(column, file.columns), (key,))
    for column, reader in _columns_read(config) if file.columns else ():
        if column.partition(".")[0] not in file.columns:
            yield Fault(reader, None, f"reads {column} of each row; {path} has {', '.join(file.columns)}", None, (key,))


def _columns_read(config: Config) -> list[tuple[str, str]]:
    from rlflow.rewards.columns import columns_read

    try:
        return columns_read(config.rewards)
    except UserError:  # a function that cannot be had is a fault of its own
        return []


def _unwritable(folder: Path) -> str | None:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is a file"
    return None if os.access(existing, os.W_OK) else f"{existing} cannot be written to"
