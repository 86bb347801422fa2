"""What a configuration would run, in a few lines for people."""

from rlflow.config.check_grid import data_parallel_size
from rlflow.config.ranks import rank_list
from rlflow.config.schema import Config, Rollout


def summarize(config: Config, world_size: int | None) -> str:
    """Model, grids and batch; the numbers that depend on the ranks are left out where `world_size` is None."""
    actor, rollout, trainer = config.actor, config.rollout, config.trainer
    grid = f"TP{actor.tensor_parallel_size} × PP{actor.pipeline_parallel_size}"
    actor_ranks = rank_list(actor.ranks, world_size)
    dp = data_parallel_size(actor, None if actor_ranks is None else len(actor_ranks))
    ranks = rank_list(rollout.ranks, world_size)
    size = rollout.tensor_parallel_size * rollout.pipeline_parallel_size
    replicas = "" if ranks is None else f"{len(ranks) // size} replicas of "
    samples = trainer.prompts_per_step * rollout.n
    updates = config.algorithm.epochs * config.algorithm.mini_batches
    length = f"{trainer.steps} steps" if trainer.steps is not None else f"{trainer.epochs} epochs"
    lines = {
        "model": f"{config.model.path} in {config.model.dtype}",
        "actor": grid + ("" if dp is None else f" × DP{dp}"),
        "rollout": f"{replicas}{replica_words(rollout)}, {rollout.max_prompt_length} + "
        f"{rollout.max_response_length} tokens",
        "step": f"{trainer.prompts_per_step} prompts × {rollout.n} responses = {samples} samples, "
        f"{updates} optimizer steps of {samples // config.algorithm.mini_batches} samples",
        "run": f"{config.algorithm.advantage}, {config.algorithm.policy_loss}, {length}, to {trainer.output_dir}",
    }
    return "\n".join(f"  {name:8} {words}" for name, words in lines.items())


def replica_words(rollout: Rollout) -> str:
    """How one vLLM replica is cut, and into which number format if another than the run's."""
    pipeline = f" × PP{rollout.pipeline_parallel_size}" if rollout.pipeline_parallel_size > 1 else ""
    experts = " with whole experts" if rollout.expert_parallel else ""
    return f"TP{rollout.tensor_parallel_size}{pipeline}{experts}" + (f" in {q}" if (q := rollout.quantization) else "")
