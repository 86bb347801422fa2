"""Rules between the number of ranks, the grids of actor and rollout, the model's sizes and the batch."""

import math
from collections.abc import Iterator
from pathlib import Path

from megatron_bridge.families import Architecture, load_architecture
from megatron_bridge.layouts.grid import expert_sizes, gathers_in_order, shares_stages
from rlflow.config.faults import Fault
from rlflow.config.ranks import rank_list
from rlflow.config.schema import Actor, Config, Rollout
from rlflow.errors import UserError
from rlflow.limits import model_limits

DIMENSIONS = ("tp", "cp", "ep", "dp", "pp")
ACTOR_TP, ROLLOUT_TP = "actor.tensor_parallel_size", "rollout.tensor_parallel_size"
ACTOR_EP, ACTOR_ETP = "actor.expert_parallel_size", "actor.expert_tensor_parallel_size"
ROLLOUT_PP, EXPERT_PARALLEL = "rollout.pipeline_parallel_size", "rollout.expert_parallel"


def read_model(config: Config) -> tuple[Architecture | None, list[Fault]]:
    """The model's sizes from its config.json, or None and why not."""
    if not config.model.path:
        return None, [Fault("model.path", None, "must be given")]
    try:
        return load_architecture(config.model.path), []
    except UserError as error:
        where = "" if error.where == config.model.path else f" ({error.where})"
        return None, [Fault("model.path", config.model.path, f"{error.message}{where}")]


def limit_faults(config: Config, arch: Architecture) -> Iterator[Fault]:
    """What the trainer does not compute of a model that can be read."""
    where = Path(config.model.path) / "config.json"
    yield from (Fault("model.path", config.model.path, f"{limit} ({where})") for limit in model_limits(arch))


def grid_faults(config: Config, world_size: int | None) -> Iterator[Fault]:
    """Rank lists and grids that do not fit into the job or into each other."""
    actor, rollout = config.actor, config.rollout
    block = actor.tensor_parallel_size * actor.pipeline_parallel_size
    sizes = (ACTOR_TP, "actor.pipeline_parallel_size")
    yield from _rank_faults("actor", actor, world_size, block, sizes, f"blocks of TP × PP = {block}")
    size = rollout.tensor_parallel_size * rollout.pipeline_parallel_size
    words = f"vLLM replicas of {'TP × PP = ' if rollout.pipeline_parallel_size > 1 else ''}{size}"
    yield from _rank_faults("rollout", rollout, world_size, size, (ROLLOUT_TP, ROLLOUT_PP), words)
    if sorted(actor.order.split("-")) != sorted(DIMENSIONS):
        yield Fault("actor.order", actor.order, f"must name each of {', '.join(DIMENSIONS)} once", Actor.order)
    elif config.bridge.placement == "aligned" and actor.order != Actor.order:
        rule = f"chooses the order of the actor's dimensions itself, and actor.order is {actor.order}"
        yield Fault("bridge.placement", "aligned", rule, "natural", ("actor.order",))
    if actor.sequence_parallel and actor.tensor_parallel_size == 1:
        yield Fault("actor.sequence_parallel", "true", f"needs {ACTOR_TP} above 1", "false", (ACTOR_TP,))


def model_faults(config: Config, arch: Architecture) -> Iterator[Fault]:
    """Parallel sizes that cut the model unevenly."""
    actor_tp, rollout_tp = config.actor.tensor_parallel_size, config.rollout.tensor_parallel_size
    if arch.head != "lm":
        yield Fault(
            "model.path", config.model.path, "is a score model, which generates nothing; a language model is due"
        )
    ffn = arch.ffn if arch.has_dense_layers else 0  # experts have rules of their own
    counts = {"attention heads": arch.heads, "feed-forward channels": ffn}
    even = [size for size in _divisors(arch.heads) if ffn % size == 0]
    sharing = [size for size in even if arch.kv_heads % size == 0 or size % arch.kv_heads == 0]
    for key, tp in ((ACTOR_TP, actor_tp), (ROLLOUT_TP, rollout_tp)):
        for name, count in counts.items():
            yield from _uneven(key, tp, name, count, sharing)
        if tp in even and tp not in sharing:
            rule = f"{arch.kv_heads} key-value heads neither divide over {tp} ranks nor are divided by them"
            yield Fault(key, tp, f"{rule}: valid are {_words(sharing)}", _closest(tp, sharing))
    rows, parts = (arch.heads // arch.kv_heads + 2) * arch.head_dim, max(1, actor_tp // arch.kv_heads)
    if actor_tp in sharing and arch.latent is None and rows % parts:
        rule = f"{rows} rows of a key-value head's projections do not divide over the {parts} ranks that share it"
        yield Fault(ACTOR_TP, actor_tp, rule, _closest(actor_tp, [s for s in sharing if s <= arch.kv_heads]))
    pp = config.actor.pipeline_parallel_size
    yield from _uneven("actor.pipeline_parallel_size", pp, "layers", arch.layers, _divisors(arch.layers))


def expert_faults(config: Config, arch: Architecture, world_size: int | None) -> Iterator[Fault]:
    """Grids that cannot hold the actor's routed experts."""
    actor, experts = config.actor, arch.experts
    ep, given = actor.expert_parallel_size, actor.expert_tensor_parallel_size
    if experts is None:
        values = ((ACTOR_EP, ep, 1, "1"), (ACTOR_ETP, given, None, "null"))
        yield from (Fault(key, value, f"{arch.family} has no experts", word)
                    for key, value, none, word in values if value != none)  # fmt: skip
        return
    tp, etp = actor.tensor_parallel_size, actor.tensor_parallel_size if given is None else given
    yield from _uneven(ACTOR_EP, ep, "experts", experts.count, _divisors(experts.count))
    yield from _uneven(ACTOR_ETP, etp, "channels of an expert", experts.ffn, _divisors(experts.ffn))
    if tp > 1 and not actor.sequence_parallel:
        yield Fault("actor.sequence_parallel", "false", f"experts need it where {ACTOR_TP} is above 1", "true")
    if (dp := data_parallel_size(config, world_size)) is None or min(ep, etp) < 1:
        return
    sizes = {"tp": tp, "dp": dp, "pp": actor.pipeline_parallel_size}
    if (spread := expert_sizes(sizes, ep, etp)) is None:
        rule = f"{ep} × {ACTOR_ETP} {etp} does not divide the {tp * dp} ranks of a pipeline stage"
        reads = (ACTOR_ETP, ACTOR_TP, "actor.pipeline_parallel_size", "actor.ranks")
        yield Fault(ACTOR_EP, ep, rule, _closest(ep, _divisors(max(1, tp * dp // etp))), reads)
    elif sorted(order := actor.order.split("-")) == sorted(DIMENSIONS):
        rules = {
            "pp first or last": shares_stages(order, sizes, spread), "tp before ep": gathers_in_order(order, spread)
        }  # fmt: skip
        yield from (Fault("actor.order", actor.order, f"experts need {rule}", Actor.order, (ACTOR_EP, ACTOR_ETP))
                    for rule, holds in rules.items() if not holds)  # fmt: skip


def engine_faults(config: Config, arch: Architecture) -> Iterator[Fault]:
    """What vLLM cannot do with the model's layers and experts, or with the number format."""
    rollout, experts = config.rollout, arch.experts
    tp, pp = rollout.tensor_parallel_size, rollout.pipeline_parallel_size
    # Stages of unlike sizes have unlike caches, and each rank schedules by its own.
    yield from _uneven(ROLLOUT_PP, pp, "layers", arch.layers, _divisors(arch.layers))
    if experts is None:
        if rollout.expert_parallel:
            yield Fault(EXPERT_PARALLEL, "true", f"{arch.family} has no experts", "false")
    elif tp > experts.count:
        rule = f"vLLM wants no more ranks than the {experts.count} experts"
        yield Fault(ROLLOUT_TP, tp, rule, _closest(tp, [size for size in _divisors(arch.heads) if size < tp]))
    elif rollout.expert_parallel:
        yield from _uneven(ROLLOUT_TP, tp, "experts", experts.count, _divisors(experts.count))
    else:
        yield from _uneven(ROLLOUT_TP, tp, "channels of an expert", experts.ffn, _divisors(experts.ffn))
    dtype = rollout.dtype or config.model.dtype
    if rollout.quantization is not None and dtype == "float32":
        rule = "weights are quantized from 16 bits: set rollout.dtype"
        yield Fault("rollout.quantization", rollout.quantization, rule, "null", ("rollout.dtype", "model.dtype"))


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
    numbers = arch.cached_numbers(max(1, rollout.tensor_parallel_size))
    number_bytes = 4 if (rollout.dtype or config.model.dtype) == "float32" else 2
    layers = -(-arch.layers // max(1, rollout.pipeline_parallel_size))
    needed = total * layers * numbers * number_bytes / 2**30
    if rollout.kv_cache_gib < needed:
        rule = f"one sequence of {total} tokens needs {needed:.3g} GiB"
        reads = (*lengths, "rollout.dtype", "model.dtype", ROLLOUT_TP, ROLLOUT_PP)
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
