"""The online loop: sample, score, learn, and hand the new weights over; GRPO and its kin.

Every rank runs it. Which advantage, loss and KL form are used are lookups by the names in the configuration; what the
parts are, and on which ranks, is decided in `job`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlflow.algorithms import PolicyObjective, is_maximum, summarize
from rlflow.batch.sample import Prompt, Sample
from rlflow.checkpoint import Checkpoints, State
from rlflow.config.schema import Config
from rlflow.data.loader import Loader
from rlflow.rewards.scorer import Scorer
from rlflow.roles import Engine, learning_rate
from rlflow.rollout.engine import RolloutEngine
from rlflow.tracking import Tracker
from rlflow.trainers import held_out
from rlflow.trainers.experience import Experience, add_advantages, collect, mini_batch
from rlflow.trainers.measure import sample_metrics, sum_over_ranks

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
    actor: Engine
    reference: Engine | None
    objective: PolicyObjective
    tracker: Tracker
    checkpoints: Checkpoints
    state: State = field(default_factory=State)


def train(run: Run) -> None:
    """Train from `run.state.step` to `run.steps`.

    One step is one batch of prompts, `rollout.n` responses to each, and `algorithm.epochs` × `algorithm.mini_batches`
    optimizer steps.
    """
    config, track, actor, state = run.config, run.tracker, run.actor, run.state
    if state.step == 0 and config.evaluation.at_start:
        track.evaluation(0, evaluate(run))
    while state.step < run.steps:
        track.begin()
        with track.phase("generate"):
            prompts = run.loader.next()
            samples = run.rollout.generate(
                prompts, n=config.rollout.n, temperature=config.rollout.temperature, step=state.step
            )
            run.rollout.sleep()
        with track.phase("score"):
            counts = run.scorer.score(samples)
        with track.phase("exchange"):
            metrics = sample_metrics(samples, "train") | sum_over_ranks(counts)
            experience = collect(
                samples, prompts, actor.grid, mini_batches=config.algorithm.mini_batches,
                hidden=actor.architecture.hidden, share=actor.share_prompts,
            )  # fmt: skip
        with track.phase("log_probs"):
            add_log_probs(run, experience)
        with track.phase("advantages"):
            metrics |= add_advantages(experience, config.algorithm, actor.grid)
        with track.phase("update"):
            lr, updates = learning_rate(config.optimizer, state.step, run.steps), []
            for _ in range(config.algorithm.epochs):
                for rows in experience.mini_batches:
                    batch = mini_batch(experience, rows, config.algorithm, run.objective, actor.grid)
                    updates.append(actor.train_step(
                        batch, run.objective, temperature=config.rollout.temperature, lr=lr,
                        with_entropy=config.algorithm.entropy_coef > 0,
                    ))  # fmt: skip
        with track.phase("sync"):
            metrics |= hand_over(run)
        state.step, state.updates = state.step + 1, state.updates + len(updates)
        finish_step(run, samples, metrics | update_metrics(updates) | {"actor/lr": lr})


def add_log_probs(run: Run, experience: Experience) -> None:
    """Log-probs of the samples under the reference, and under the actor where they must be known before its update.

    With one optimizer step per rollout the actor's are those of the update itself, so that no pass is needed.
    """
    algorithm, temperature = run.config.algorithm, run.config.rollout.temperature
    tokens = experience.batch.tokens
    if run.reference is not None:
        tokens["ref_log_probs"] = run.reference.log_probs(experience.batch, temperature)
    several = algorithm.epochs * algorithm.mini_batches > 1
    if several or (run.reference is not None and algorithm.kl_in == "reward"):
        tokens["old_log_probs"] = run.actor.log_probs(experience.batch, temperature)


def update_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of a step's optimizer steps: means over their tokens, and the first one's ratio, which must be 1."""
    sums = [{name: value for name, value in update.items() if not name.startswith("actor/")} for update in updates]
    combined = {name: (max if is_maximum(name) else sum)(part[name] for part in sums) for name in sums[0]}
    shown = summarize(combined, len(updates))
    direct = [name for name in updates[0] if name.startswith("actor/")]
    shown |= {name: sum(update[name] for update in updates) / len(updates) for name in direct}
    return shown | {"actor/first_ratio_error": updates[0]["ratio_error_max"]}


def hand_over(run: Run) -> dict[str, float]:
    """Give the rollout the actor's weights, in the order that needs least memory: weights, then the cache."""
    run.rollout.wake_weights()
    traffic = run.rollout.sync(run.actor.layout, run.actor.parameters_by_name())
    run.rollout.wake_kv_cache()
    return {"sync/local_bytes": traffic.local, "sync/received_bytes": traffic.received, "sync/sent_bytes": traffic.sent}


def evaluate(run: Run) -> dict[str, float]:
    """Scores of the present weights on the held-out prompts."""
    return held_out.measure(run.rollout, run.scorer, run.held_out, run.config, run.state.step)


def finish_step(run: Run, samples: list[Sample], metrics: dict[str, float]) -> None:
    """Evaluate and save where it is time, then record the step."""
    state, every = run.state, run.config.evaluation.every
    if "train/reward" not in metrics:
        log.warning("step %d: no sample could be scored, so nothing was learnt from it", state.step)
    last = state.step == run.steps
    if last or (every and state.step % every == 0):
        with run.tracker.phase("evaluate"):
            metrics = metrics | evaluate(run)
    save_every = run.config.trainer.save_every
    if save_every and (last or state.step % save_every == 0):
        with run.tracker.phase("save"):
            state.loader = run.loader.state()
            run.checkpoints.save(run.actor, state)
    run.tracker.end(state.step, metrics, samples)


def finish(run: Run) -> None:
    """Write the summary, and the trained model as a Hugging Face folder, each of whose files has one writer."""
    run.tracker.finish()
    trainer = run.config.trainer
    if trainer.export:
        run.actor.export_hf(run.config.model.path, Path(trainer.output_dir) / "model")
