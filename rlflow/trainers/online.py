"""The online loop: sample, score, learn, and hand the new weights over; PPO, GRPO and their kin.

Every rank runs it. Which advantage, loss and KL form are used, and which roles there are, are lookups by the names in
the configuration; what the parts are, and on which ranks, is decided in `job`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlflow.algorithms import PolicyObjective, ValueObjective
from rlflow.batch.sample import Prompt, Sample
from rlflow.checkpoint import Checkpoints, State
from rlflow.config.roles import changing_roles
from rlflow.config.schema import Config
from rlflow.data.loader import Loader
from rlflow.rewards.scorer import Scorer
from rlflow.roles import Engine, Roles
from rlflow.rollout.engine import RolloutEngine
from rlflow.rollout.lengths import expected_lengths, learn_lengths
from rlflow.tracking import Tracker
from rlflow.trainers import held_out
from rlflow.trainers.experience import add_advantages, collect
from rlflow.trainers.measure import sample_metrics, sum_over_ranks
from rlflow.trainers.passes import Metrics, Passes, next_kl_coef
from rlflow.trainers.workload import workload_metrics

log = logging.getLogger(__name__)


@dataclass
class Run:
    """The parts of a run, put together by `job.assemble`."""

    config: Config
    steps: int
    loader: Loader
    held_out: Sequence[Prompt]
    rollout: RolloutEngine
    scorer: Scorer
    roles: Roles
    objective: PolicyObjective
    value_objective: ValueObjective
    tracker: Tracker
    checkpoints: Checkpoints
    state: State = field(default_factory=State)

    @property
    def passes(self) -> Passes:
        """The passes over the roles' models."""
        return Passes(self.config, self.roles, self.objective, self.value_objective, self.tracker, self.steps)

    def changing(self) -> dict[str, Engine]:
        """The engines that the run changes and a checkpoint must hold, by their role's name."""
        engines = self.roles.by_name()
        return {name: engines[name] for name in changing_roles(self.config)}


def train(run: Run) -> None:
    """Train from `run.state.step` to `run.steps`.

    One step is one batch of prompts, `rollout.n` responses to each, and `algorithm.epochs` × `algorithm.mini_batches`
    optimizer steps of each trained role.
    """
    config, track, roles, state, passes = run.config, run.tracker, run.roles, run.state, run.passes
    if state.step == 0 and config.evaluation.at_start:
        track.evaluation(0, evaluate(run))
    while state.step < run.steps:
        track.begin(state.step + 1)
        with track.phase("generate"):
            prompts = run.loader.next()
            expected = expected_lengths(state.lengths, prompts, config.rollout.max_response_length)
            samples = run.rollout.generate(
                prompts, n=config.rollout.n, temperature=config.rollout.temperature, step=state.step, expected=expected
            )
            run.rollout.sleep()
        with track.phase("score"):
            counts = run.scorer.score(samples)
        with track.phase("exchange"):
            experience = collect(samples, prompts, roles.by_name(), mini_batches=config.algorithm.mini_batches)
            state.lengths = learn_lengths(state.lengths, prompts, experience.known)
        with track.phase("predict"):
            passes.predict(experience, samples, state.step)
        with track.phase("advantages"):
            metrics = sample_metrics(samples, "train") | sum_over_ranks(counts)
            metrics |= workload_metrics(experience, roles.actor, run.rollout, prompts, expected, config.rollout)
            metrics |= add_advantages(experience, config.algorithm, roles.actor.grid, kl_coef=state.kl_coef)
        with track.phase("update"):
            updates: dict[str, Metrics] = {}
            for role, batch, how in passes.optimizer_steps(experience, state):
                updates.setdefault(role, []).append(roles.by_name()[role].train_step(batch, **how))
            passes.follow(state.step)
            metrics |= passes.report(updates, state)
        with track.phase("sync"):
            metrics |= hand_over(run)
        state.step += 1
        state.kl_coef = next_kl_coef(config, state.kl_coef, metrics)
        finish_step(run, samples, metrics)


def hand_over(run: Run) -> dict[str, float]:
    """Give the rollout the actor's weights, in the order that needs least memory: its weights, then its cache."""
    actor = run.roles.actor
    with run.tracker.phase("sync/weights"):
        actor.residency.load("weights")
        run.rollout.wake_weights()
        traffic = run.rollout.sync(actor.layout, actor.parameters_by_name())
        actor.residency.offload()
    with run.tracker.phase("sync/cache"):
        run.rollout.wake_kv_cache()
    return {"sync/local_bytes": traffic.local, "sync/received_bytes": traffic.received, "sync/sent_bytes": traffic.sent}


def evaluate(run: Run) -> dict[str, float]:
    """Scores of the present weights on the held-out prompts."""
    with run.tracker.phase("evaluate"):
        return held_out.measure(run.rollout, run.scorer, run.held_out, run.config, run.state.step)


def finish_step(run: Run, samples: list[Sample], metrics: dict[str, float]) -> None:
    """Evaluate and save where it is time, then record the step."""
    state, every = run.state, run.config.evaluation.every
    if "train/reward" not in metrics:
        log.info("step %d: no sample could be scored, so nothing was learnt from it", state.step)  # on one rank
    last = state.step == run.steps
    if last or (every and state.step % every == 0):
        metrics = metrics | evaluate(run)
    save_every = run.config.trainer.save_every
    if save_every and (last or state.step % save_every == 0):
        with run.tracker.phase("save"):
            state.loader = run.loader.state()
            run.checkpoints.save(run.changing(), state)
    run.tracker.end(state.step, metrics, samples)


def finish(run: Run) -> None:
    """Write the summary, and the trained model as a Hugging Face folder, each of whose files has one writer."""
    run.tracker.finish()
    trainer = run.config.trainer
    if trainer.export:
        run.roles.actor.export_hf(run.config.model.path, Path(trainer.output_dir) / "model")
