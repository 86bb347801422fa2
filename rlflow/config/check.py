"""Every rule between keys, and between keys, the model, the files and the number of ranks.

`check` collects all faults and loads nothing: of a model it reads config.json and tokenizer.json, of a data file its
schema. Types and unknown keys are found by `load`. Rules on models and grids are in `check_roles` and `check_rollout`,
those on files in `check_files`, those on keys that have no effect in `check_unread`.
"""

import operator
from collections.abc import Iterator
from dataclasses import fields
from typing import Literal, get_args

from rlflow.config.check_files import evaluation_faults, file_faults, reward_faults, training_faults
from rlflow.config.check_roles import read_model, role_faults, without_repeats
from rlflow.config.check_rollout import engine_faults, length_faults, replica_faults
from rlflow.config.check_unread import unread_faults, unread_with_model
from rlflow.config.faults import Fault, independent
from rlflow.config.schema import Config

Purpose = Literal["train", "evaluate", "generate", "verify"]

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
    arch, faults = read_model("model.path", config.model.path)
    faults += [*replica_faults(config, world_size), *file_faults(config)]
    if arch is not None:
        faults += [*engine_faults(config, arch), *length_faults(config, arch), *unread_with_model(config, arch)]
    if purpose in ("train", "evaluate"):
        faults += [*reward_faults(config), *evaluation_faults(config, required=purpose == "evaluate")]
    if purpose in ("train", "verify"):  # a model may be evaluated on fewer ranks than it was trained on
        faults += role_faults(config, arch, world_size)
    if purpose == "train":
        faults += [*algorithm_faults(config), *unread_faults(config)]
        faults += [*optimizer_faults(config), *training_faults(config), *profile_faults(config)]
    faults = without_repeats(out_of_range) + independent(faults, out_of_range)
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
                        rule = f"must be {words} {limit}" + (", or null" if type(None) in get_args(item.type) else "")
                        yield Fault(f"{section.name}.{item.name}", value, rule, close)


def algorithm_faults(config: Config) -> Iterator[Fault]:
    """Combinations of advantage, loss, KL and sampling that have no meaning or a wrong one."""
    algorithm, rollout = config.algorithm, config.rollout
    if rollout.n == 1 and algorithm.advantage in GROUP_ADVANTAGES:
        rule = f"{algorithm.advantage} compares the responses to a prompt and needs at least 2"
        yield Fault("rollout.n", 1, rule, "2", ("algorithm.advantage",))
    in_loss = algorithm.kl_in == "loss"
    if algorithm.kl_coef > 0 and in_loss and algorithm.kl_estimator == "k1":
        rule, also = "k1 in the loss has a gradient of expectation zero", ("algorithm.kl_in", "algorithm.kl_coef")
        yield Fault("algorithm.kl_estimator", "k1", rule, "k1-straight-through", also)
    if algorithm.aggregation == "seq-mean-token-sum-norm" and algorithm.aggregation_length is None:
        rule = "seq-mean-token-sum-norm divides by this length, which padding must not decide"
        nearest = str(rollout.max_response_length)
        yield Fault("algorithm.aggregation_length", "null", rule, nearest, ("algorithm.aggregation",))
    if config.actor.cuda_graphs and algorithm.kl_controller == "adaptive" and algorithm.kl_coef and in_loss:
        rule = "the coefficient in the loss is part of what was captured: take algorithm.kl_in reward"
        yield Fault("actor.cuda_graphs", "true", rule, "false", ("algorithm.kl_controller", "algorithm.kl_in"))
    step = config.trainer.prompts_per_step * rollout.n
    if algorithm.kl_controller == "adaptive" and algorithm.kl_coef > 0 and step >= 5 * algorithm.kl_horizon:
        rule = f"must be above a fifth of the {step} samples of a step, or the coefficient may become negative"
        reads = ("algorithm.kl_controller", "rollout.n", "trainer.prompts_per_step")
        yield Fault("algorithm.kl_horizon", algorithm.kl_horizon, rule, str(step), reads)
    yield from sampling_faults(config)


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
    """Schedules that contradict themselves or outlast the run, and weights that the host cannot update.

    Of the actor and, where there is one, of the critic.
    """
    steps, with_critic = config.trainer.steps, config.algorithm.advantage == "gae"
    warmups = {"optimizer": config.optimizer.warmup_steps}
    schedules = {"optimizer": config.optimizer}
    if with_critic:
        schedules["critic_optimizer"] = config.critic_optimizer
        warmups |= {"critic_optimizer": config.critic_optimizer.warmup_steps, "critic": config.critic.warmup_steps}
    for section, optimizer in schedules.items():
        if optimizer.min_lr > optimizer.lr:
            rule = f"must be at most {section}.lr = {optimizer.lr}"
            yield Fault(f"{section}.min_lr", optimizer.min_lr, rule, str(optimizer.lr), (f"{section}.lr",))
        if optimizer.cpu_offload and config.model.dtype != "bfloat16":
            rule = "the host updates float32 weights of a bfloat16 model; megatron-core cannot resume those of another"
            yield Fault(f"{section}.cpu_offload", optimizer.cpu_offload, rule, "0.0", ("model.dtype",))
    for section, warmup in warmups.items():
        most = None if steps is None else steps - (section == "critic")  # whose warm-up must leave the actor a step
        if most is not None and warmup > most:
            rule = f"must be {'at most' if most == steps else 'below'} trainer.steps = {steps}"
            yield Fault(f"{section}.warmup_steps", warmup, rule, str(most), ("trainer.steps",))


def profile_faults(config: Config) -> Iterator[Fault]:
    """Steps to profile that the run has not."""
    steps = config.trainer.steps
    for step in config.profile.steps:
        if step < 1:
            yield Fault("profile.steps", step, "must be at least 1: the first step has this number", "1")
        elif steps is not None and step > steps:
            rule = f"must be at most trainer.steps = {steps}"
            yield Fault("profile.steps", step, rule, str(steps), ("trainer.steps",))
