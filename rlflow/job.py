"""Puts a run together from its configuration: the one place that knows every part.

`train`, `evaluate` and `generate` are what the commands of these names do on every rank with a good configuration.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_bridge.checkpoints import open_source
from megatron_bridge.export import exported_bytes
from megatron_bridge.families import Architecture, load_architecture
from megatron_bridge.layouts import HFLayout
from megatron_bridge.placement import Placement
from rlflow import parallel
from rlflow.algorithms import PolicyObjective, ValueObjective
from rlflow.batch.sample import Prompt
from rlflow.checkpoint import Checkpoints, State, folders
from rlflow.config import Config, dump
from rlflow.config.ranks import rank_list
from rlflow.config.roles import changing_roles, role_path, role_sections
from rlflow.config.schema import Algorithm
from rlflow.config.summary import replica_words, role_words
from rlflow.data.encode import Encoder, load_tokenizer
from rlflow.data.loader import Loader
from rlflow.data.prompts import load_prompts
from rlflow.errors import UserError
from rlflow.models import split_layers
from rlflow.rewards.columns import columns_read
from rlflow.rewards.scorer import Scorer
from rlflow.roles import build_roles
from rlflow.roles.engine import takes_transformer_engine
from rlflow.rollout.engine import RolloutEngine
from rlflow.rollout.placement import choose
from rlflow.rollout.vllm_engine import VLLMRollout
from rlflow.run_folder import alone_in, check_space
from rlflow.tracking import Tracker
from rlflow.tracking.table import show
from rlflow.trainers import held_out, online
from rlflow.trainers.passes import resumed_kl_coef

log = logging.getLogger(__name__)


def train(config: Config) -> int:
    """Train, evaluate, save and export; returns the exit code."""
    run: online.Run | None = None
    with parallel.reporting(lambda: run.tracker.running if run else "start"):
        start(config)
        with parallel.Watchdog(config.trainer.timeout_seconds) as watchdog, writing_folder(config):
            run = assemble(config, watchdog.enter)
            online.train(run)
            online.finish(run)
        if is_main(config):
            show(Path(config.trainer.output_dir))
        stop(run.rollout)
    return 0


def evaluate(config: Config) -> int:
    """Print accuracy on the held-out file, greedy and sampled, with pass@k for the samples; returns the exit code."""
    with parallel.reporting(lambda: "evaluate"):
        start(config)
        with parallel.Watchdog(config.trainer.timeout_seconds) as watchdog:
            watchdog.enter("evaluate")
            tokenizer = load_tokenizer(config.model.tokenizer or config.model.path)
            prompts = held_out_prompts(config, tokenizer)
            rollout = start_rollout(config, load_architecture(config.model.path), tokenizer)
            rollout.sync_from_hf(config.model.path)
            report = held_out.report(rollout, Scorer(config.rewards), prompts, config)
        if is_main(config):
            print(held_out.table(report), flush=True)
        stop(rollout)
    return 0


def generate(config: Config, prompts: Sequence[str]) -> int:
    """Print `rollout.n` responses to each prompt; returns the exit code."""
    with parallel.reporting(lambda: "generate"):
        start(config)
        tokenizer = load_tokenizer(config.model.tokenizer or config.model.path)
        encoder = Encoder(tokenizer, chat_template=config.data.chat_template, system_prompt=config.data.system_prompt)
        encoded = encoder.encode(prompts)
        asked = [Prompt(f"prompt/{number}", ids, {}, None) for number, ids in enumerate(encoded)]
        rollout = start_rollout(config, load_architecture(config.model.path), tokenizer)
        rollout.sync_from_hf(config.model.path)
        samples = rollout.generate(asked, n=config.rollout.n, temperature=config.rollout.temperature, step=0)
        for sample in samples:
            print(f"{sample.prompt.id} response {sample.index}: {sample.text}", flush=True)
        stop(rollout)
    return 0


def assemble(config: Config, entered: Callable[[str], None] = lambda phase: None) -> online.Run:
    """Build every part of a training run and bring it to where it starts, or goes on from a checkpoint. Collective.

    The process must be one of the job's (`start`). `entered` is told which phase the run is in.
    """
    architecture = load_architecture(config.model.path)
    announce(config, architecture)
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path)
    loader, held_out_set = start_data(config, tokenizer)
    scorer = Scorer(config.rewards)
    checkpoints = Checkpoints(Path(config.trainer.output_dir) / "checkpoints", config.trainer.keep)
    checkpoint = checkpoints.find(config.trainer.resume, changing_roles(config))
    steps = run_length(config, loader.steps_per_epoch)
    if checkpoint is not None:
        state = checkpoints.state(checkpoint)
        look_at_end(config, steps, checkpoint, state.step)
        if state.loader is not None:
            loader.load_state(state.loader, checkpoint)
    look_at_weights(config)
    look_at_layers(config)
    make_room(config, architecture)
    save_config(config)  # what is refused above leaves the folder of an earlier run as it was
    # The rollout first: what vLLM takes must not depend on what else is on the device.
    placement = place(config, architecture)
    rollout = start_rollout(
        config, architecture, tokenizer, placement.rollout.ranks, with_routing=config.actor.router_replay
    )
    run = online.Run(
        config=config,
        steps=steps,
        loader=loader,
        held_out=held_out_set,
        rollout=rollout,
        scorer=scorer,
        roles=build_roles(config, architecture, placement.train),
        objective=objective(config.algorithm),
        value_objective=ValueObjective(config.critic.value_clip),
        tracker=Tracker(config, config.trainer.output_dir, is_main(config), steps, entered),
        checkpoints=checkpoints,
        state=State(kl_coef=config.algorithm.kl_coef),
    )
    if checkpoint is not None:
        resume(run, checkpoint)
    report_first_sync(online.hand_over(run))
    return run


def run_length(config: Config, steps_per_epoch: int) -> int:
    """Steps of the whole run. Raises UserError where they would end before every trained role has learned."""
    steps = config.trainer.steps or config.trainer.epochs * steps_per_epoch
    if config.algorithm.advantage == "gae" and config.critic.warmup_steps >= steps:
        raise UserError(
            "critic.warmup_steps", f"{config.critic.warmup_steps} of {steps} steps leave the actor none to learn in"
        )
    return steps


def look_at_end(config: Config, steps: int, checkpoint: Path, done: int) -> None:
    """Refuse to go on from a checkpoint, `done` steps after the run's start, where the run is to end before it."""
    if steps < done:
        key = "trainer.steps" if config.trainer.steps else "trainer.epochs"
        rule = f"{steps} steps end before {checkpoint}, which is of step {done}: take at least {done} steps"
        raise UserError(key, f"{rule}, an earlier checkpoint as trainer.resume, or another trainer.output_dir")


def start(config: Config) -> None:
    """Make the process one of the job's."""
    parallel.initialize(config.trainer.timeout_seconds, config.trainer.seed)
    level = logging.INFO if is_main(config) else logging.WARNING
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    for package in ("rlflow", "megatron_bridge"):
        logging.getLogger(package).setLevel(level)
    if config.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


def writing_folder(config: Config) -> contextlib.AbstractContextManager[None]:
    """The run's folder as this rank's own; on ranks that do not keep the records nothing."""
    return alone_in(Path(config.trainer.output_dir)) if is_main(config) else contextlib.nullcontext()


def make_room(config: Config, architecture: Architecture) -> None:
    """Remove checkpoints that were not finished; refuse a disk that could not take the trained model at the end."""
    if not is_main(config):
        return
    folder = Path(config.trainer.output_dir)
    folders.remove_unfinished(folder / "checkpoints")
    if config.trainer.export:
        needed = exported_bytes(config.model.path, architecture)
        check_space(folder, needed, "the trained model, which trainer.export writes at the end,")


def save_config(config: Config) -> None:
    """Leave the resolved configuration, which is what runs, in the run's folder."""
    if is_main(config):
        folder = Path(config.trainer.output_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(dump(config))
        except OSError as error:
            raise UserError("trainer.output_dir", f"cannot be written to: {error}") from error


def stop(rollout: RolloutEngine) -> None:
    """End this process's part of a job that went well; vLLM's groups go before those they were made from."""
    rollout.shutdown()
    parallel.shutdown()


def start_data(config: Config, tokenizer: Any) -> tuple[Loader, Sequence[Prompt]]:
    """The training prompts in their order, and the held-out ones."""
    prompts = load_prompts(
        config.data.train, tokenizer, config.data, max_length=config.rollout.max_prompt_length, name="train",
        reads=columns_read(config.rewards),
    )  # fmt: skip
    if prompts.dropped or prompts.truncated:
        log.info("of %d prompts %d are left out and %d cut", prompts.rows_read, prompts.dropped, prompts.truncated)
    seed = parallel.derive_seed(config.trainer.seed, "data")
    loader = Loader(prompts, config.trainer.prompts_per_step, seed, config.data.shuffle)
    return loader, held_out_prompts(config, tokenizer)


def held_out_prompts(config: Config, tokenizer: Any) -> Sequence[Prompt]:
    """The first `evaluation.max_prompts` held-out prompts; none without a file of them."""
    if config.data.evaluation is None:
        return []
    return load_prompts(
        config.data.evaluation, tokenizer, config.data, max_length=config.rollout.max_prompt_length,
        name="evaluation", limit=config.evaluation.max_prompts, reads=columns_read(config.rewards),
    )  # fmt: skip


def look_at_weights(config: Config) -> None:
    """Refuse what is wrong with the weight files of roles before vLLM starts; `start_rollout` looks at the actor's."""
    for folder in {role_path(config, name) for name in role_sections(config)} - {config.model.path}:
        open_source(folder, load_architecture(folder))


def look_at_layers(config: Config) -> None:
    """Refuse Transformer Engine where it cannot be had before vLLM starts."""
    for name, role in role_sections(config).items():
        architecture = load_architecture(role_path(config, name))
        dtype = getattr(torch, config.model.dtype)
        takes_transformer_engine(role.transformer_engine, architecture, dtype, f"{name}.transformer_engine")


def place(config: Config, architecture: Architecture) -> Placement:
    """Which rank trains and which samples which slice: the same on every rank."""
    stages, world = split_layers(architecture, config.actor.pipeline_parallel_size), dist.get_world_size()
    return choose(config, architecture, stages, world, parallel.ranks_per_node())


def start_rollout(
    config: Config, architecture: Architecture, tokenizer: Any, ranks: tuple[int, ...] | None = None, *,
    with_routing: bool = False,
) -> VLLMRollout:  # fmt: skip
    """vLLM on `rollout.ranks`, taken in the order of `ranks` if that is given, without weights so far. Collective.

    With routing its samples tell to which experts their tokens were sent.
    """
    open_source(config.model.path, architecture)  # what is wrong with the files is said before vLLM starts
    return VLLMRollout(
        architecture, config.model.path, config.rollout, tokenizer, dtype=config.model.dtype,
        seed=config.trainer.seed, timeout_seconds=config.trainer.timeout_seconds,
        bucket_bytes=config.bridge.bucket_mib << 20, prove=config.bridge.startup_proof,
        checksum=config.bridge.checksum, ranks=ranks, with_routing=with_routing,
    )  # fmt: skip


def objective(algorithm: Algorithm) -> PolicyObjective:
    """The actor's objective; a KL penalty that is part of the reward is none of the loss."""
    return PolicyObjective(
        policy_loss=algorithm.policy_loss,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        kl_coef=algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0,
        kl_estimator=algorithm.kl_estimator,
        entropy_coef=algorithm.entropy_coef,
        importance_correction=algorithm.importance_correction,
        importance_cap=algorithm.importance_cap,
    )


def announce(config: Config, architecture: Architecture) -> None:
    """Say in a line what is about to be trained, and where."""
    world, device = dist.get_world_size(), parallel.device()
    parameters = sum(math.prod(parameter.shape) for parameter in HFLayout(architecture, (0,)).parameters(0).values())
    rollout = config.rollout
    size = rollout.tensor_parallel_size * rollout.pipeline_parallel_size
    log.info(
        "%s of %s parameters in %s; %s; rollout %d × %s; %d ranks on %s",
        architecture.family, f"{parameters:,}", config.model.dtype,
        ", ".join(f"{name} {words}" for name, words in role_words(config, world).items()),
        len(rank_list(rollout.ranks, world)) // size, replica_words(rollout), world,
        torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
    )  # fmt: skip


def report_first_sync(metrics: Mapping[str, float]) -> None:
    """Say in a line how many bytes the first hand-over of weights moved, from this rank's `metrics`. Collective."""
    names = ("sync/received_bytes", "sync/local_bytes")
    total = torch.tensor([metrics[name] for name in names], dtype=torch.float64, device=parallel.device())
    dist.all_reduce(total)
    received, local = (f"{value / 1e6:,.1f} MB" for value in total.tolist())
    log.info("first sync: %s between ranks, %s copied where they were", received, local)


def resume(run: online.Run, folder: Path) -> None:
    """Go on from a complete checkpoint."""
    run.state = run.checkpoints.load(run.changing(), folder)
    run.state.kl_coef = resumed_kl_coef(run.config.algorithm, run.state.kl_coef)
    log.info("going on from %s at step %d", folder, run.state.step)
    if run.state.step == run.steps:
        log.info("nothing is left to train: a larger trainer.steps goes on, another trainer.output_dir starts anew")


def is_main(config: Config) -> bool:
    """Whether this rank shows and writes what the run has to say: the first that samples, so that it can show some."""
    return dist.get_rank() == rank_list(config.rollout.ranks, dist.get_world_size())[0]
