"""Keys that nothing would read beside the values of others: what was set has its effect or is refused.

Keys that keep their default are never reported; the default of a key that a role shares with the actor is the actor's.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from megatron_bridge.families import Architecture
from rlflow.config.document import write
from rlflow.config.faults import Fault, as_written
from rlflow.config.roles import FOLLOWERS, SHARED, role_sections
from rlflow.config.schema import Config, Model

NEEDS = {"critic": "algorithm.advantage", "reference": "algorithm.kl_coef", "reward_model": "reward_model.path"}
"""Role -> the key that says whether there is one."""
FROZEN = ("reference", "reward_model")
ONLY_TRAINED = ("recompute", "overlap")
SCORING = ("critic", "reward_model")


def unread_faults(config: Config) -> Iterator[Fault]:
    """Values other than the default of keys that are not read; where another key decides that, it is named."""
    yield from _undecided_faults(config)
    exist = role_sections(config)
    for name in FOLLOWERS:
        role = getattr(config, name)
        for item in fields(role):
            default = getattr(config.actor if item.name in SHARED else type(role)(), item.name)
            if name not in exist:
                yield from _unread(config, f"{name}.{item.name}", default, NEEDS[name])
            elif (reason := _unread_by(name, item.name)) and getattr(role, item.name) != default:
                rule = f"is not read: the {name.replace('_', ' ')} {reason}"
                yield Fault(f"{name}.{item.name}", getattr(role, item.name), rule, _words(default))
    if "critic" not in exist:
        default_optimizer = type(config.critic_optimizer)()
        for item in fields(default_optimizer):
            default = getattr(default_optimizer, item.name)
            yield from _unread(config, f"critic_optimizer.{item.name}", default, NEEDS["critic"])


def unread_with_model(config: Config, arch: Architecture) -> Iterator[Fault]:
    """Keys for experts, of a model that has none."""
    if arch.experts is None:
        for name in ("moe_aux_loss_coef", "router_replay"):
            value, default = getattr(config.actor, name), getattr(type(config.actor)(), name)
            if value != default:
                yield Fault(f"actor.{name}", value, f"{arch.family} has no experts", _words(default))


def value_at(config: Config, path: str) -> Any:
    """The value of the key `section.name`."""
    section, _, name = path.partition(".")
    return getattr(getattr(config, section), name)


def _unread_by(role: str, name: str) -> str | None:
    """Why a role does not read one of the keys that all have, None where it does."""
    if role in FROZEN and name in ONLY_TRAINED:
        return "is not trained"
    return "has no logits" if role in SCORING and name == "logprob_chunk_tokens" else None


def _undecided_faults(config: Config) -> Iterator[Fault]:
    defaults = Config(Model(""))
    for (key, decider), read in {**_conditions_of_algorithm(config), **_conditions(config)}.items():
        if not read:
            yield from _unread(config, key, value_at(defaults, key), decider)


def _conditions_of_algorithm(config: Config) -> dict[tuple[str, str], bool]:
    """(key, the key that decides) -> whether it is read."""
    algorithm = config.algorithm
    with_critic, with_reference = algorithm.advantage == "gae", algorithm.kl_coef > 0
    return {
        ("algorithm.normalize_std", "algorithm.advantage"): algorithm.advantage == "grpo",
        ("algorithm.gamma", "algorithm.advantage"): with_critic,
        ("algorithm.lam", "algorithm.advantage"): with_critic,
        ("algorithm.bootstrap_truncated", "algorithm.advantage"): with_critic,
        ("algorithm.whiten_advantages", "algorithm.advantage"): with_critic,
        ("algorithm.clip_low", "algorithm.policy_loss"): algorithm.policy_loss != "reinforce",
        ("algorithm.clip_high", "algorithm.policy_loss"): algorithm.policy_loss != "reinforce",
        ("algorithm.dual_clip", "algorithm.policy_loss"): algorithm.policy_loss in ("ppo", "gspo"),
        ("algorithm.aggregation_length", "algorithm.aggregation"): algorithm.aggregation.endswith("-norm"),
        ("algorithm.kl_in", "algorithm.kl_coef"): with_reference,
        ("algorithm.kl_estimator", "algorithm.kl_coef"): with_reference,
        ("algorithm.kl_controller", "algorithm.kl_coef"): with_reference,
        ("algorithm.kl_target", "algorithm.kl_controller"): algorithm.kl_controller == "adaptive",
        ("algorithm.kl_horizon", "algorithm.kl_controller"): algorithm.kl_controller == "adaptive",
        ("algorithm.importance_cap", "algorithm.importance_correction"): bool(algorithm.importance_correction),
    }  # fmt: skip


def _conditions(config: Config) -> dict[tuple[str, str], bool]:
    """As `_conditions_of_algorithm`, for the other sections."""
    with_critic, with_reference = config.algorithm.advantage == "gae", config.algorithm.kl_coef > 0
    held_out = config.data.evaluation is not None
    return {
        ("actor.moe_aux_loss", "actor.moe_aux_loss_coef"): config.actor.moe_aux_loss_coef > 0,
        ("reference.ema", "reference.update_every"): not with_reference or config.reference.update_every > 0,
        ("optimizer.min_lr", "optimizer.schedule"): config.optimizer.schedule != "constant",
        ("critic_optimizer.min_lr", "critic_optimizer.schedule"):
            not with_critic or config.critic_optimizer.schedule != "constant",
        ("rollout.stop_token_ids", "rollout.ignore_eos"): not config.rollout.ignore_eos,
        ("evaluation.n", "data.evaluation"): held_out,
        ("evaluation.temperature", "data.evaluation"): held_out,
        ("evaluation.max_prompts", "data.evaluation"): held_out,
        ("evaluation.at_start", "data.evaluation"): held_out,
        ("trainer.epochs", "trainer.steps"): config.trainer.steps is None,
        ("trainer.keep", "trainer.save_every"): config.trainer.save_every > 0,
        ("tracking.samples_per_step", "tracking.tensorboard"): config.tracking.tensorboard,
        ("profile.trace", "profile.steps"): bool(config.profile.steps),
    }  # fmt: skip


def _unread(config: Config, key: str, default: Any, decider: str) -> Iterator[Fault]:
    value = value_at(config, key)
    if value != default:
        rule = f"is not read where {decider} = {as_written(value_at(config, decider))}"
        yield Fault(key, value, rule, _words(default), (decider,))


def _words(value: Any) -> str:
    """A value as it is written in a file, on one line."""
    return str(list(value)) if isinstance(value, tuple) else write(value).splitlines()[0]
