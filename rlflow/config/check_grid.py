"""Rules between the number of ranks, the grids of actor and rollout, the model's sizes and the batch."""

import math
from collections.abc import Iterator

from megatron_bridge.families import Architecture, load_architecture
from rlflow.config.faults import Fault
from rlflow.config.schema import Actor, Config, Ranks, Rollout
from rlflow.errors import UserError

DIMENSIONS = ("tp", "cp", "ep", "dp", "pp")
ACTOR_TP, ROLLOUT_TP = "actor.tensor_parallel_size", "rollout.tensor_parallel_size"


def read_model(config: Config) -> tuple[Architecture | None, list[Fault]]:
    """The model's sizes from its config.json, or None and why not."""
    if not config.model.path:
        return None, [Fault("model.path", None, "must be given")]
    try:
        return load_architecture(config.model.path), []
    except UserError as error:
        where = "" if error.where == config.model.path else f" ({error.where})"
        return None, [Fault("model.path", config.model.path, f"{error.message}{where}")]


def grid_faults(config: Config, world_size: int | None) -> Iterator[Fault]:
    """Rank lists and grids that do not fit into the job or into each other."""
    actor, rollout = config.actor, config.rollout
    block = actor.tensor_parallel_size * actor.pipeline_parallel_size
    sizes = (ACTOR_TP, "actor.pipeline_parallel_size")
    yield from _rank_faults("actor", actor, world_size, block, sizes, f"blocks of TP × PP = {block}")
    words = f"vLLM replicas of {rollout.tensor_parallel_size}"
    yield from _rank_faults("rollout", rollout, world_size, rollout.tensor_parallel_size, (ROLLOUT_TP,), words)
    if sorted(actor.order.split("-")) != sorted(DIMENSIONS):
        yield Fault("actor.order", actor.order, f"must name each of {', '.join(DIMENSIONS)} once", Actor.order)
    if actor.sequence_parallel and actor.tensor_parallel_size == 1:
        yield Fault("actor.sequence_parallel", "true", f"needs {ACTOR_TP} above 1", "false", (ACTOR_TP,))


def model_faults(config: Config, arch: Architecture) -> Iterator[Fault]:
    """Parallel sizes that cut the model unevenly."""
    actor_tp, rollout_tp = config.actor.tensor_parallel_size, config.rollout.tensor_parallel_size
    counts = {"attention heads": arch.heads, "key-value heads": arch.kv_heads, "feed-forward channels": arch.ffn}
    even = [size for size in _divisors(arch.heads) if arch.ffn % size == 0]
    for name, count in counts.items():
        yield from _uneven(ACTOR_TP, actor_tp, name, count, [size for size in even if arch.kv_heads % size == 0])
    counts.pop("key-value heads")  # vLLM copies them where there are fewer than ranks
    replicable = [size for size in even if arch.kv_heads % size == 0 or size % arch.kv_heads == 0]
    for name, count in counts.items():
        yield from _uneven(ROLLOUT_TP, rollout_tp, name, count, replicable)
    if rollout_tp in even and rollout_tp not in replicable:
        rule = f"{arch.kv_heads} key-value heads neither divide over {rollout_tp} ranks nor are divided by them"
        yield Fault(ROLLOUT_TP, rollout_tp, f"{rule}: valid are {_words(replicable)}", _closest(rollout_tp, replicable))
    pp = config.actor.pipeline_parallel_size
    yield from _uneven("actor.pipeline_parallel_size", pp, "layers", arch.layers, _divisors(arch.layers))


def length_faults(config: Config, arch: Architecture) -> Iterator[Fault]:
    """Sequences longer than the model's positions or the KV cache, and token ids outside the vocabulary."""
    rollout = config.rollout
    total = rollout.max_prompt_length + rollout.max_response_length
    spare, half = arch.max_positions - rollout.max_prompt_length, arch.max_positions // 2
    lengths = ("rollout.max_prompt_length", "rollout.max_response_length")
    if total > arch.max_positions:
        rule = f"with rollout.max_prompt_length = {rollout.max_prompt_length} it is {total} tokens"
        yield Fault(
            "rollout.max_response_length", rollout.max_response_length, f"{rule}; the model has {arch.max_positions}",
            str(spare) if spare > 0 else f"{half} with rollout.max_prompt_length={half}", lengths,
        )  # fmt: skip
    kv_heads = max(1, arch.kv_heads // max(1, rollout.tensor_parallel_size))
    number_bytes = 4 if (rollout.dtype or config.model.dtype) == "float32" else 2
    needed = total * 2 * arch.layers * kv_heads * arch.head_dim * number_bytes / 2**30
    if rollout.kv_cache_gib < needed:
        rule = f"one sequence of {total} tokens needs {needed:.3g} GiB"
        reads = (*lengths, "rollout.dtype", "model.dtype", ROLLOUT_TP)
        yield Fault("rollout.kv_cache_gib", rollout.kv_cache_gib, rule, f"{math.ceil(needed * 100) / 100}", reads)
    for token_id in rollout.stop_token_ids:
        if not 0 <= token_id < arch.vocab:
            yield Fault("rollout.stop_token_ids", token_id, f"must be in the vocabulary: 0 to {arch.vocab - 1}")


def batch_faults(config: Config, world_size: int | None) -> Iterator[Fault]:
    """A step's samples must divide evenly over mini-batches and data-parallel ranks."""
    prompts, n, parts = config.trainer.prompts_per_step, config.rollout.n, config.algorithm.mini_batches
    dp = data_parallel_size(config, world_size) or 1
    if min(prompts, n, parts) < 1 or prompts * n % (parts * dp) == 0:
        return
    unit = parts * dp // math.gcd(parts * dp, n)
    rule = (
        f"{prompts} prompts × {n} responses = {prompts * n} samples do not divide over "
        f"{parts} mini-batches × {dp} data-parallel ranks = {parts * dp}"
    )
    nearest = " or ".join(str(k * unit) for k in (prompts // unit, prompts // unit + 1) if k)
    reads = ("rollout.n", "algorithm.mini_batches", ACTOR_TP, "actor.pipeline_parallel_size", "actor.ranks")
    yield Fault("trainer.prompts_per_step", prompts, rule, nearest, reads)


def checkpoint_faults(config: Config, world_size: int | None) -> Iterator[Fault]:
    """megatron-core writes a checkpoint on all ranks of the job, each of which must hold a part of the actor."""
    ranks, every = rank_list(config.actor.ranks, world_size), config.trainer.save_every
    if every > 0 and ranks is not None and world_size is not None and len(ranks) < world_size:
        rule = f"checkpoints need the actor on all {world_size} ranks of the job"
        yield Fault("trainer.save_every", every, rule, "0", ("actor.ranks",))


def rank_list(ranks: Ranks, world_size: int | None) -> tuple[int, ...] | None:
    """The ranks that a role names; None where `all` of an unknown number."""
    if ranks == "all":
        return None if world_size is None else tuple(range(world_size))
    return ranks


def data_parallel_size(config: Config, world_size: int | None) -> int | None:
    """Replicas of the actor; None where the number of ranks is unknown or no multiple of one replica."""
    ranks = rank_list(config.actor.ranks, world_size)
    block = config.actor.tensor_parallel_size * config.actor.pipeline_parallel_size
    return len(ranks) // block if ranks is not None and block > 0 and len(ranks) % block == 0 else None


def _rank_faults(
    section: str, role: Actor | Rollout, world_size: int | None, block: int, sizes: tuple[str, ...], blocks: str
) -> Iterator[Fault]:
    ranks = rank_list(role.ranks, world_size)
    if ranks is None:
        return
    if role.ranks != "all":
        if not ranks or list(ranks) != sorted(set(ranks)) or min(ranks) < 0:
            yield Fault(f"{section}.ranks", list(ranks), "must be different ranks in ascending order", "all")
        elif world_size is not None and max(ranks) >= world_size:
            yield Fault(f"{section}.ranks", list(ranks), f"the job has the ranks 0 to {world_size - 1}", "all")
    if block > 0 and len(ranks) % block:
        fitting = [size for size in _divisors(len(ranks)) if role.tensor_parallel_size % size == 0 or size == 1]
        nearest = f"{sizes[0]} = {max(fitting)}" if block == role.tensor_parallel_size else None
        rule = f"{len(ranks)} ranks do not divide into {blocks}"
        if role.ranks == "all" and len(ranks) < block:
            rule += f": start at least {block} processes, for example with --nproc {block}"
        yield Fault(sizes[0], role.tensor_parallel_size, rule, nearest, (*sizes[1:], f"{section}.ranks"))


def _uneven(key: str, size: int, name: str, count: int, valid: list[int]) -> Iterator[Fault]:
    if size > 0 and count % size:
        rule = f"{count} {name} do not divide over {size}: divisors are {_words(_divisors(count))}"
        yield Fault(key, size, rule, _closest(size, valid))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _words(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:16])) + (", …" if len(numbers) > 16 else "")


def _closest(size: int, valid: list[int]) -> str:
    return str(min(valid, key=lambda other: (abs(other - size), -other)))
