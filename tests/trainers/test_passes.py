"""Roles at work in a step: which compute at the same time, and what of them is counted and reported."""

import contextlib
import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlflow.algorithms import PolicyObjective, ValueObjective
from rlflow.batch import Prompt, Sample
from rlflow.checkpoint import State
from rlflow.config.schema import Algorithm, Config, Critic, Model, Optimizer
from rlflow.parallel import Grid
from rlflow.roles import Roles, Values
from rlflow.tracking.clock import StepClock
from rlflow.trainers.experience import add_advantages, collect
from rlflow.trainers.passes import Passes, next_kl_coef, resumed_kl_coef, update_metrics

PROMPTS = [Prompt(f"train/{number}", [7, 7], {}, None) for number in range(2)]
PATIENCE = datetime.timedelta(seconds=30)


class Role:
    """An engine on one rank whose work is done only when the other role's has begun."""

    def __init__(self, name: str, other: str, rank: int) -> None:
        self.name, self.other, self.grid = name, other, Grid([rank])
        self.architecture, self.share_prompts, self.routing = SimpleNamespace(hidden=8), True, None
        self.residency = SimpleNamespace(load=lambda *_: None, using=lambda **_: contextlib.nullcontext())
        self.lr: list[float] = []

    def meet(self, what: str) -> None:
        if self.grid.is_member:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"{what}/{self.name}", "at work")
            store.wait([f"{what}/{self.other}"], PATIENCE)

    def log_probs(self, batch: Any, temperature: float) -> Any:
        self.meet("predict")
        return torch.zeros(len(batch.responses.values))

    def values(self, batch: Any) -> Values:
        self.meet("predict")
        return Values(torch.full((len(batch.responses.values),), 0.25), torch.zeros(len(batch)))

    def train_step(self, batch: Any, objective: Any, *, lr: float, **_: Any) -> dict[str, float]:
        self.meet(f"update {len(self.lr)}")
        self.lr.append(lr)
        return {"tokens": 1.0, "loss": 2.0, "clipped": 0.0, "returns": float(batch.tokens["returns"].sum())}

    def tell(self, metrics: Any) -> Any:
        told = [metrics]
        dist.broadcast_object_list(told, self.grid.ranks[0])
        return told[0]


def one_step(warmup: int) -> tuple[dict[str, float], dict[str, int], list[float]]:
    """Actor on rank 0, critic on rank 1, two mini-batches; the critic's first step is number 0 of 2."""
    algorithm = Algorithm(advantage="gae", mini_batches=2, whiten_advantages=False)
    config = Config(Model(""), algorithm=algorithm, critic=Critic(warmup_steps=warmup))
    actor: Any = Role("actor", "critic", 0)
    critic: Any = Role("critic", "actor", 1)
    samples = [
        Sample(prompt, 0, [5, 5], [-1.0, -1.0], truncated=False, text="", weights_version=1, reward=1.0)
        for prompt in PROMPTS
    ]  # fmt: skip
    held = samples if dist.get_rank() == 0 else []
    roles = Roles(actor, critic)
    passes = Passes(config, roles, PolicyObjective(), ValueObjective(), StepClock(), steps=2)  # type: ignore[arg-type]
    state = State()
    experience = collect(held, PROMPTS, roles.by_name(), mini_batches=2)
    passes.predict(experience, held, state.step)
    add_advantages(experience, algorithm, actor.grid)
    updates: dict[str, Any] = {}
    for role, batch, how in passes.optimizer_steps(experience, state):
        updates.setdefault(role, []).append(roles.by_name()[role].train_step(batch, **how))
    advantages = experience.shares["actor"].batch.tokens["advantages"].tolist()
    return passes.report(updates, state), state.updates, advantages


def test_roles_on_ranks_of_their_own_compute_at_the_same_time(world: Any) -> None:
    """Each waits inside its work for the other's: one after the other they would never end."""
    (first, updates, advantages), (second, _, elsewhere) = world(2, one_step, 0)
    assert first == second
    assert updates == {"critic": 2, "actor": 2}
    assert advantages == pytest.approx([0.75] * 4)  # γ = λ = 1: the reward of 1 less the value of 0.25
    assert elsewhere == []
    assert first["actor/lr"] == 1e-6
    assert first["critic/lr"] == 1e-5
    assert first["critic/return"] == pytest.approx(2.0)  # of the fake: two tokens of each mini-batch, with returns of 1


class Alone(Role):
    def meet(self, what: str) -> None:
        pass


def while_the_critic_warms_up() -> tuple[dict[str, float], dict[str, int]]:
    globals()["Role"] = Alone
    metrics, updates, _ = one_step(1)
    return metrics, updates


def test_only_the_critic_learns_in_its_warm_up(world: Any) -> None:
    metrics, updates = world(2, while_the_critic_warms_up)[0]
    assert updates == {"critic": 2}
    assert not [name for name in metrics if name.startswith("actor/")]


def passes_of(config: Config) -> Passes:
    engine: Any = SimpleNamespace(tell=lambda steps: steps)
    return Passes(config, Roles(engine, engine), PolicyObjective(), ValueObjective(), StepClock(), steps=4)  # type: ignore[arg-type]


def test_the_actor_s_schedule_begins_behind_the_critic_s_warm_up() -> None:
    """Linear warm-up over one step: half the rate in the actor's first step, which is number 1, then all of it."""
    config = Config(Model(""), critic=Critic(warmup_steps=1), optimizer=Optimizer(lr=1e-6, warmup_steps=1))
    rates = [passes_of(config).report({"actor": []}, State(step=step))["actor/lr"] for step in (1, 2)]
    assert rates == pytest.approx([5e-7, 1e-6])


def test_nothing_is_learned_where_no_sample_could_be_scored() -> None:
    nothing: Any = SimpleNamespace(known=SimpleNamespace(samples={"rewards": torch.full((3,), torch.nan)}))
    assert list(passes_of(Config(Model(""))).optimizer_steps(nothing, State())) == []


def test_metrics_of_several_updates() -> None:
    """Means over all tokens, losses and norms over updates; the first update alone tells whether it was on-policy."""
    first = {"tokens": 2.0, "clipped": 1.0, "ratio_error_max": 0.0, "loss": 1.0, "engine/grad_norm": 1.0}
    second = {"tokens": 6.0, "clipped": 1.0, "ratio_error_max": 0.5, "loss": 3.0, "engine/grad_norm": 3.0}
    assert update_metrics([first, second], "actor") == pytest.approx(
        {
            "actor/trainable_tokens": 8.0,
            "actor/clip_fraction": 2 / 8,
            "actor/ratio_error_max": 0.5,
            "actor/first_ratio_error": 0.0,
            "actor/loss": 2.0,
            "actor/grad_norm": 2.0,
        }
    )


@pytest.mark.parametrize(("controller", "expected"), [("fixed", 0.1), ("adaptive", 0.1 * (1 + 0.2 * 512 / 10000))])
def test_the_kl_coefficient_follows_what_was_measured(controller: Any, expected: float) -> None:
    """KL twice its target of 0.1 is an error of 1, cut to 0.2; 64 prompts × 8 samples over a horizon of 10,000."""
    config = Config(Model(""), algorithm=Algorithm(kl_controller=controller))
    assert next_kl_coef(config, 0.1, {"actor/kl": 0.2}) == pytest.approx(expected)
    assert next_kl_coef(config, 0.1, {}) == 0.1  # the actor has not learned in this step


@pytest.mark.parametrize(
    ("controller", "saved", "expected"),
    [("fixed", 0.1, 0.3), ("adaptive", 0.1, 0.1), ("adaptive", 0.0, 0.3)],  # 0: the run was without a reference
)
def test_a_resumed_run_takes_what_its_configuration_says_unless_a_controller_moved_it(
    controller: Any, saved: float, expected: float
) -> None:
    assert resumed_kl_coef(Algorithm(kl_coef=0.3, kl_controller=controller), saved) == expected
