"""Roles: which exist, and the values that they take from the actor."""

from dataclasses import fields
from typing import Any

import pytest

from rlflow.config import Actor, Algorithm, Config, Critic, Model, RewardModel, Role, role_sections
from rlflow.config.document import parse
from rlflow.config.load import dump, interpret


def interpreted(*overrides: str, **sections: Any) -> Config:
    config, faults = interpret({"model": {"path": "m"}, **sections}, overrides)
    assert not faults
    return config


def test_roles_exist_where_the_algorithm_asks_for_them() -> None:
    assert list(role_sections(Config(Model("m")))) == ["actor"]
    everything = Config(
        Model("m"), algorithm=Algorithm(advantage="gae", kl_coef=0.1), reward_model=RewardModel(path="r")
    )
    assert list(role_sections(everything)) == ["actor", "critic", "reference", "reward_model"]
    assert role_sections(everything)["critic"] is everything.critic


def test_absent_keys_take_the_actors_values() -> None:
    config = interpreted(
        "actor.context_parallel_size=2", "critic.order=pp-tp-cp-ep-dp", critic={"tensor_parallel_size": 1},
        actor={"tensor_parallel_size": 4, "ranks": [0, 1], "moe_aux_loss_coef": 0.1},
    )  # fmt: skip
    assert config.critic == Critic(ranks=(0, 1), context_parallel_size=2, order="pp-tp-cp-ep-dp")
    for role in (config.reference, config.reward_model):
        assert all(getattr(role, item.name) == getattr(config.actor, item.name) for item in fields(Role))


def test_a_saved_configuration_keeps_what_was_taken() -> None:
    config = interpreted("algorithm.advantage=gae", actor={"tensor_parallel_size": 4}, reference={"update_every": 2})
    assert interpret(parse(dump(config))) == (config, [])
    assert parse(dump(config))["critic"]["tensor_parallel_size"] == 4


def test_a_saved_configuration_has_no_sections_of_absent_roles() -> None:
    """So that another actor's grid, given to a saved configuration, is no key that nothing reads."""
    config = interpreted(actor={"tensor_parallel_size": 4}, reference={"update_every": 2})
    saved = parse(dump(config))
    assert not {"critic", "critic_optimizer", "reward_model"} & saved.keys()
    assert saved["reference"]["update_every"] == 2
    assert interpret(saved) == (config, [])


def test_sections_may_be_given_as_text() -> None:
    config = interpreted("actor={tensor_parallel_size: 2}", "critic={warmup_steps: 3}")
    assert (config.actor, config.critic) == (
        Actor(tensor_parallel_size=2),
        Critic(tensor_parallel_size=2, warmup_steps=3),
    )


def test_a_fault_of_the_actor_is_reported_once() -> None:
    _, faults = interpret({"model": {"path": "m"}, "actor": {"recompute": "some", "tp": 2}})
    assert [fault.key for fault in faults] == ["actor.tp", "actor.recompute"]
    _, faults = interpret({"model": {"path": "m"}, "critic": {"recompute": "some"}})
    assert [fault.key for fault in faults] == ["critic.recompute"]


@pytest.mark.parametrize(("key", "nearest"), [("critic.tp", "critic.tensor_parallel_size"), ("model.cp", "actor.con"),
                                              ("critic.lr", "critic_optimizer.lr")])  # fmt: skip
def test_a_shared_key_is_suggested_where_it_was_looked_for(key: str, nearest: str) -> None:
    (fault,) = interpret({"model": {"path": "m"}}, [f"{key}=1"])[1]
    assert str(fault.nearest).startswith(nearest)
