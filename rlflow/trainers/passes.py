"""What the roles of an online run compute in a step: scores, log-probs, values, and optimizer steps.

Between two moves of samples no rank waits for another role's: roles on ranks of their own work at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from rlflow.algorithms import PolicyObjective, ValueObjective, is_maximum, kl_controller, summarize
from rlflow.batch import Batch, Sample, share_samples
from rlflow.checkpoint import State
from rlflow.config.roles import needs_old_log_probs
from rlflow.config.schema import Algorithm, Config
from rlflow.roles import Roles, learning_rate
from rlflow.roles.reference import update as update_reference
from rlflow.tracking import Tracker
from rlflow.trainers.experience import Experience, mini_batch, without_zero_gradient

Metrics = list[dict[str, float]]  # of one optimizer step after another
EVERYTHING = {"weights": True, "gradients": True, "optimizer": True}  # what steps need on the GPU


class OptimizerStep(NamedTuple):
    """One optimizer step of a role: what it learns from, and how (`Engine.train_step`'s other arguments)."""

    role: str
    batch: Batch
    how: dict[str, Any]


@dataclass
class Passes:
    """The roles of a run and how they are used; `steps` are the run's, for the schedules of learning rates."""

    config: Config
    roles: Roles
    objective: PolicyObjective
    value_objective: ValueObjective
    tracker: Tracker
    steps: int

    def predict(self, experience: Experience, samples: Sequence[Sample], step: int) -> None:
        """What models say of the samples before they learn from them, each on its own ranks; then to who needs it.

        The reward model's scores go into the rewards, also into those of `samples`, which this rank holds.
        """
        roles, temperature = self.roles, self.config.rollout.temperature
        batches = {name: share.batch for name, share in experience.shares.items()}
        if roles.reward_model is not None:
            with self.tracker.phase("predict/reward_model"):
                scores = roles.reward_model.values(batches["reward_model"]).last
        if roles.reference is not None:
            with self.tracker.phase("predict/reference"):
                batch = batches["reference"]
                batch.tokens["ref_log_probs"] = roles.reference.log_probs(batch, temperature)
        if roles.critic is not None:
            with self.tracker.phase("predict/critic"):
                batch = batches["critic"]
                batch.tokens["old_values"], batch.samples["last_values"] = roles.critic.values(batch)
        if needs_old_log_probs(self.config, learns=self._actor_learns(step)):
            with self.tracker.phase("predict/actor"):
                batch = batches["actor"]
                batch.tokens["old_log_probs"] = roles.actor.log_probs(batch, temperature)
        if roles.reward_model is not None:
            self._add_to_rewards(scores, experience, samples)
        if roles.reference is not None:
            experience.move("reference", "actor", tokens=["ref_log_probs"])
        if roles.critic is not None:
            experience.move("critic", "actor", tokens=["old_values"], samples=["last_values"])

    def _actor_learns(self, step: int) -> bool:
        """Whether step number `step` (from 0) is behind the warm-up of the critic."""
        return self.roles.critic is None or step >= self.config.critic.warmup_steps

    def _add_to_rewards(self, scores: Tensor, experience: Experience, samples: Sequence[Sample]) -> None:
        share, known, weight = experience.shares["reward_model"], experience.known, self.config.reward_model.weight
        everywhere = share_samples(scores, share.placement, len(known)).cpu()
        known.samples["rewards"] += weight * everywhere
        own = known.placement(dist.get_world_size())[dist.get_rank()]
        for sample, score in zip(samples, everywhere[list(own)].tolist(), strict=True):
            sample.scores["reward_model"] = score
            if sample.reward is not None:
                sample.reward += weight * score

    def optimizer_steps(self, experience: Experience, state: State) -> Iterator[OptimizerStep]:
        """The critic's and the actor's optimizer steps, to be taken as they come; on disjoint ranks at the same time.

        While only the critic learns there are none of the actor's, and none at all where no sample could be scored:
        momentum would move the weights all the same. All ranks get all steps, with samples or without.
        """
        roles = self.roles
        if experience.known.samples["rewards"].isnan().all():
            return
        if roles.critic is not None:
            experience.move("actor", "critic", tokens=["mask", "returns"])
            lr = self._rate("critic", state.step)
            with self.tracker.phase("update/critic"), roles.critic.residency.using(**EVERYTHING):
                for batch in self._mini_batches("critic", experience):
                    yield OptimizerStep("critic", batch, {"objective": self.value_objective, "lr": lr})
        if self._actor_learns(state.step):
            objective = self.objective.with_kl_coef(state.kl_coef)
            how = {
                "objective": objective,
                "lr": self._rate("actor", state.step),
                "temperature": self.config.rollout.temperature,
                "with_entropy": self.config.algorithm.entropy_coef > 0,
            }
            roles.actor.residency.load("weights")  # and keep them there: the rollout takes them next
            with self.tracker.phase("update/actor"), roles.actor.residency.using(**EVERYTHING):
                # What the auxiliary loss of experts says of a sample does not depend on its advantage.
                skips = self.config.algorithm.skip_zero_advantage and not self.config.actor.moe_aux_loss_coef
                for batch in self._mini_batches("actor", experience):
                    yield OptimizerStep("actor", without_zero_gradient(batch, objective) if skips else batch, how)

    def _rate(self, role: str, step: int) -> float:
        """The learning rate in step number `step`; the actor's schedule begins when the critic's warm-up is over."""
        if role == "critic":
            return learning_rate(self.config.critic_optimizer, step, self.steps)
        idle = 0 if self.roles.critic is None else self.config.critic.warmup_steps
        return learning_rate(self.config.optimizer, step - idle, self.steps - idle)

    def _mini_batches(self, role: str, experience: Experience) -> Iterator[Batch]:
        algorithm, grid = self.config.algorithm, self.roles.by_name()[role].grid
        for _ in range(algorithm.epochs):
            for number in range(algorithm.mini_batches):
                yield mini_batch(experience.shares[role], number, algorithm, grid)

    def follow(self, step: int) -> None:
        """Bring the reference nearer to the actor, where step number `step` (from 0) is one for that."""
        reference, settings = self.roles.reference, self.config.reference
        if reference is not None and settings.update_every and (step + 1) % settings.update_every == 0:
            with self.tracker.phase("update/reference"):
                update_reference(reference, self.roles.actor, settings.ema)

    def report(self, updates: Mapping[str, Metrics], state: State) -> dict[str, float]:
        """Metrics of the optimizer steps that each role has taken in this step, the same on every rank of the job.

        Counts them in `state`, which is that before the step.
        """
        metrics: dict[str, float] = {} if self.roles.reference is None else {"actor/kl_coef": state.kl_coef}
        for role, steps in updates.items():
            state.updates[role] = state.updates.get(role, 0) + len(steps)
            metrics |= update_metrics(self.roles.by_name()[role].tell(steps), role)
            metrics[f"{role}/lr"] = self._rate(role, state.step)
        return metrics


def update_metrics(updates: Metrics, role: str) -> dict[str, float]:
    """Metrics of a role's optimizer steps in one step: means over their tokens, and the mean of the engine's own."""
    if not updates:
        return {}
    own = [name for name in updates[0] if name.startswith("engine/")]
    sums = [{name: value for name, value in update.items() if name not in own} for update in updates]
    combined = {name: (max if is_maximum(name) else sum)(part[name] for part in sums) for name in sums[0]}
    shown = summarize(combined, len(updates), role)
    shown |= {name.replace("engine", role, 1): sum(update[name] for update in updates) / len(updates) for name in own}
    if "ratio_error_max" in updates[0]:  # of the first step: there the policy is the one that sampled
        shown[f"{role}/first_ratio_error"] = updates[0]["ratio_error_max"]
    return shown


def resumed_kl_coef(algorithm: Algorithm, saved: float) -> float:
    """The KL coefficient that a run goes on with: what a checkpoint has counts only where a controller moved it."""
    return saved if saved and algorithm.kl_controller == "adaptive" else algorithm.kl_coef


def next_kl_coef(config: Config, kl_coef: float, metrics: dict[str, float]) -> float:
    """The KL coefficient of the next step, from the divergence that the actor's update has measured."""
    if "actor/kl" not in metrics:
        return kl_coef
    algorithm, samples = config.algorithm, config.trainer.prompts_per_step * config.rollout.n
    control = kl_controller[algorithm.kl_controller]
    return control(kl_coef, metrics["actor/kl"], samples, algorithm.kl_target, algorithm.kl_horizon)
