"""Every rule between keys, and between keys, the model, the files and the number of ranks.

`check` collects all faults and loads nothing: of the model it reads config.json, of a data file its schema. Types and
unknown keys are found by `load`. Rules on the parallel layout are in `check_grid`, those on files in `check_files`.
"""

import operator
from collections.abc import Iterator
from dataclasses import fields
from typing import Literal, get_args

from rlflow.config.check_files import evaluation_faults, file_faults, reward_faults, training_faults
from rlflow.config.check_grid import (
    batch_faults,
    checkpoint_faults,
    engine_faults,
    expert_faults,
    grid_faults,
    length_faults,
    limit_faults,
    model_faults,
    read_model,
)
from rlflow.config.document import write
from rlflow.config.faults import Fault, independent
from rlflow.config.schema import Config, Model

Purpose = Literal["train", "evaluate", "generate"]

LIMITS = {
    "minimum": (operator.ge, "at least"),
    "above": (operator.gt, "above"),
    "maximum": (operator.le, "at most"),
    "below": (operator.lt, "below"),
}
GROUP_ADVANTAGES = ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo")
"""Advantages that compare a response with the others to its prompt."""


def check(config: Config, world_size: int | None, purpose: Purpose = "train") -> list[Fault]:
    """All faults of `config`, in the order of the schema; rules that need an unknown `world_size` are skipped."""
    assert purpose in get_args(Purpose)
    out_of_range = list(range_faults(config))
    arch, faults = read_model(config)
    faults += [*grid_faults(config, world_size), *file_faults(config)]
    if arch is not None:
        faults += [*model_faults(config, arch), *expert_faults(config, arch, world_size)]
        faults += [*engine_faults(config, arch), *length_faults(config, arch)]
    if purpose != "generate":
        faults += [*reward_faults(config), *evaluation_faults(config, required=purpose == "evaluate")]
    if purpose == "train":
        faults += [] if arch is None else limit_faults(config, arch)
        faults += [*algorithm_faults(config), *optimizer_faults(config)]
        faults += [*batch_faults(config, world_size), *checkpoint_faults(config, world_size), *training_faults(config)]
    else:  # without training there is no actor: a model may be evaluated on fewer ranks than it was trained on
        faults = [fault for fault in faults if not fault.key.startswith("actor.")]
    faults = out_of_range + independent(faults, out_of_range)
    order = {section.name: number for number, section in enumerate(fields(Config))}
    return sorted(faults, key=lambda fault: order[fault.key.partition(".")[0]])


def range_faults(config: Config) -> Iterator[Fault]:
    """Values outside the limits that the schema declares."""
    for section in fields(config):
        if section.name != "rewards":
            part = getattr(config, section.name)
            for item in fields(part):
                value = getattr(part, item.name)
                for name, limit in item.metadata["limits"].items():
                    holds, words = LIMITS[name]
                    if value is not None and not holds(value, limit):
                        close = str(limit) if name in ("minimum", "maximum") else None
                        yield Fault(f"{section.name}.{item.name}", value, f"must be {words} {limit}", close)


def algorithm_faults(config: Config) -> Iterator[Fault]:
    """Combinations of advantage, loss, KL and sampling that have no meaning or a wrong one."""
    algorithm, rollout = config.algorithm, config.rollout
    if rollout.n == 1 and algorithm.advantage in GROUP_ADVANTAGES:
        rule = f"{algorithm.advantage} compares the responses to a prompt and needs at least 2"
        yield Fault("rollout.n", 1, rule, "2", ("algorithm.advantage",))
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        rule, reads = "k1 in the loss has a gradient of expectation zero", ("algorithm.kl_in", "algorithm.kl_coef")
        yield Fault("algorithm.kl_estimator", "k1", rule, "k1-straight-through", reads)
    if algorithm.aggregation == "seq-mean-token-sum-norm" and algorithm.aggregation_length is None:
        rule = "seq-mean-token-sum-norm divides by this length, which padding must not decide"
        nearest = str(rollout.max_response_length)
        yield Fault("algorithm.aggregation_length", "null", rule, nearest, ("algorithm.aggregation",))
    yield from sampling_faults(config)
    yield from unread_faults(config)


def unread_faults(config: Config) -> Iterator[Fault]:
    """Values other than the default of keys that nothing reads beside another key's value: never ignored in silence."""
    algorithm, defaults = config.algorithm, Config(Model(""))
    conditions = {
        ("algorithm", "normalize_std", "algorithm.advantage"): algorithm.advantage == "grpo",
        ("algorithm", "dual_clip", "algorithm.policy_loss"): algorithm.policy_loss in ("ppo", "gspo"),
        ("algorithm", "aggregation_length", "algorithm.aggregation"): algorithm.aggregation.endswith("-norm"),
        ("algorithm", "importance_cap", "algorithm.importance_correction"): bool(algorithm.importance_correction),
        ("optimizer", "min_lr", "optimizer.schedule"): config.optimizer.schedule != "constant",
        ("rollout", "stop_token_ids", "rollout.ignore_eos"): not config.rollout.ignore_eos,
        ("trainer", "epochs", "trainer.steps"): config.trainer.steps is None,
    }
    for (section, name, decider), read in conditions.items():
        value, default = (getattr(getattr(part, section), name) for part in (config, defaults))
        if not read and value != default:
            decides = getattr(getattr(config, decider.partition(".")[0]), decider.partition(".")[2])
            shown = write(default).splitlines()[0]
            yield Fault(f"{section}.{name}", value, f"is not read where {decider} = {decides}", shown, (decider,))


def sampling_faults(config: Config) -> Iterator[Fault]:
    """Truncated sampling makes the engine's log-probs differ from the trainer's, which only a correction allows."""
    rollout, corrected = config.rollout, config.algorithm.importance_correction is not None
    rule = "log-probs of truncated sampling differ from the trainer's: set algorithm.importance_correction, or leave it"
    if rollout.top_k == 0:
        yield Fault("rollout.top_k", 0, "must be -1 (all tokens) or at least 1", "-1")
    if rollout.top_p != 1 and not corrected:
        yield Fault("rollout.top_p", rollout.top_p, rule, "1.0", ("algorithm.importance_correction",))
    if rollout.top_k not in (-1, 0) and not corrected:
        yield Fault("rollout.top_k", rollout.top_k, rule, "-1", ("algorithm.importance_correction",))


def optimizer_faults(config: Config) -> Iterator[Fault]:
    """Schedules that contradict themselves."""
    optimizer, steps = config.optimizer, config.trainer.steps
    if optimizer.min_lr > optimizer.lr:
        rule = f"must be at most optimizer.lr = {optimizer.lr}"
        yield Fault("optimizer.min_lr", optimizer.min_lr, rule, str(optimizer.lr), ("optimizer.lr",))
    if steps is not None and optimizer.warmup_steps > steps:
        rule = f"must be at most trainer.steps = {steps}"
        yield Fault("optimizer.warmup_steps", optimizer.warmup_steps, rule, str(steps), ("trainer.steps",))
