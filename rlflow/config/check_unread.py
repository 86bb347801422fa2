"""Keys that nothing would read beside the values of others: what was set has its effect or is refused.

Keys that keep their default are never reported; the default of a key that a role shares with the actor is the actor's.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from megatron_bridge.families import Architecture
from rlflow.config.document import write
from rlflow.config.faults import Fault
from rlflow.config.roles import FOLLOWERS, SHARED, role_sections
from rlflow.config.schema import Config, Model

NEEDS = {"critic": "algorithm.advantage", "reference": "algorithm.kl_coef", "reward_model": "reward_model.path"}
"""Role -> the key that says whether there is one."""
FROZEN = ("reference", "reward_model")
ONLY_TRAINED = ("recompute", "overlap")


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
            elif name in FROZEN and item.name in ONLY_TRAINED and getattr(role, item.name) != default:
                rule = f"is not read: the {name.replace('_', ' ')} is not trained"
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


def _undecided_faults(config: Config) -> Iterator[Fault]:
    algorithm, defaults = config.algorithm, Config(Model(""))
    with_critic = algorithm.advantage == "gae"
    conditions = {
        ("algorithm.normalize_std", "algorithm.advantage"): algorithm.advantage == "grpo",
        ("algorithm.gamma", "algorithm.advantage"): with_critic,
        ("algorithm.lam", "algorithm.advantage"): with_critic,
        ("algorithm.bootstrap_truncated", "algorithm.advantage"): with_critic,
        ("algorithm.whiten_advantages", "algorithm.advantage"): with_critic,
        ("algorithm.dual_clip", "algorithm.policy_loss"): algorithm.policy_loss in ("ppo", "gspo"),
        ("algorithm.aggregation_length", "algorithm.aggregation"): algorithm.aggregation.endswith("-norm"),
        ("algorithm.kl_controller", "algorithm.kl_coef"): algorithm.kl_coef > 0,
        ("algorithm.kl_target", "algorithm.kl_controller"): algorithm.kl_controller == "adaptive",
        ("algorithm.kl_horizon", "algorithm.kl_controller"): algorithm.kl_controller == "adaptive",
        ("algorithm.importance_cap", "algorithm.importance_correction"): bool(algorithm.importance_correction),
        ("actor.moe_aux_loss", "actor.moe_aux_loss_coef"): config.actor.moe_aux_loss_coef > 0,
        ("reference.ema", "reference.update_every"): algorithm.kl_coef == 0 or config.reference.update_every > 0,
        ("optimizer.min_lr", "optimizer.schedule"): config.optimizer.schedule != "constant",
        ("critic_optimizer.min_lr", "critic_optimizer.schedule"):
            not with_critic or config.critic_optimizer.schedule != "constant",
        ("rollout.stop_token_ids", "rollout.ignore_eos"): not config.rollout.ignore_eos,
        ("trainer.epochs", "trainer.steps"): config.trainer.steps is None,
    }  # fmt: skip
    for (key, decider), read in conditions.items():
        if not read:
            yield from _unread(config, key, value_at(defaults, key), decider)


def _unread(config: Config, key: str, default: Any, decider: str) -> Iterator[Fault]:
    value = value_at(config, key)
    if value != default:
        rule = f"is not read where {decider} = {value_at(config, decider)}"
        yield Fault(key, value, rule, _words(default), (decider,))


def _words(value: Any) -> str:
    """A value as it is written in a file, on one line."""
    return str(list(value)) if isinstance(value, tuple) else write(value).splitlines()[0]
