"""Rules between the rollout's ranks, the model's sizes and lengths, and what vLLM can do."""

import math
from collections.abc import Iterator

from megatron_bridge.families import Architecture
from rlflow.config.check_grid import closest, divisors, uneven, uneven_heads
from rlflow.config.faults import Fault
from rlflow.config.ranks import rank_list
from rlflow.config.schema import Config, Ranks

TP, PP, EXPERT_PARALLEL = "rollout.tensor_parallel_size", "rollout.pipeline_parallel_size", "rollout.expert_parallel"


def replica_faults(config: Config, world_size: int | None) -> Iterator[Fault]:
    """Ranks that the job has not, or that do not divide into vLLM replicas."""
    rollout = config.rollout
    yield from rank_faults("rollout.ranks", rollout.ranks, world_size)
    tp, pp, ranks = rollout.tensor_parallel_size, rollout.pipeline_parallel_size, rank_list(rollout.ranks, world_size)
    if ranks is None or min(tp, pp) < 1 or len(ranks) % (tp * pp) == 0:
        return
    rule = f"{len(ranks)} ranks do not divide into vLLM replicas of {'TP × PP = ' if pp > 1 else ''}{tp * pp}"
    if rollout.ranks == "all" and len(ranks) < tp * pp:
        rule += f": start at least {tp * pp} processes, for example with --nproc {tp * pp}"
    fitting = [size for size in divisors(len(ranks)) if tp % size == 0 or size == 1]
    yield Fault(TP, tp, rule, f"{TP} = {max(fitting)}" if pp == 1 else None, (PP, "rollout.ranks"))


def rank_faults(key: str, ranks: Ranks, world_size: int | None) -> Iterator[Fault]:
    """A list that names no ranks, some twice or in another order, or some that the job has not."""
    if ranks == "all":
        return
    if not ranks or list(ranks) != sorted(set(ranks)) or min(ranks) < 0:
        yield Fault(key, list(ranks), "must be different ranks in ascending order", "all")
    elif world_size is not None and max(ranks) >= world_size:
        yield Fault(key, list(ranks), f"the job has the ranks 0 to {world_size - 1}", "all")


def engine_faults(config: Config, arch: Architecture) -> Iterator[Fault]:
    """What vLLM cannot do with the model's heads, layers and experts, or with the number format."""
    rollout, experts = config.rollout, arch.experts
    tp, pp = rollout.tensor_parallel_size, rollout.pipeline_parallel_size
    if arch.head != "lm":
        rule = "is a score model, which generates nothing; a language model is due"
        yield Fault("model.path", config.model.path, rule)
    yield from uneven_heads(TP, tp, arch)
    # Stages of unlike sizes have unlike caches, and each rank schedules by its own.
    yield from uneven(PP, pp, "layers", arch.layers, divisors(arch.layers))
    if experts is None:
        if rollout.expert_parallel:
            yield Fault(EXPERT_PARALLEL, "true", f"{arch.family} has no experts", "false")
    elif tp > experts.count:
        rule = f"vLLM wants no more ranks than the {experts.count} experts"
        yield Fault(TP, tp, rule, closest(tp, [size for size in divisors(arch.heads) if size < tp]))
    elif rollout.expert_parallel:
        yield from uneven(TP, tp, "experts", experts.count, divisors(experts.count))
    else:
        yield from uneven(TP, tp, "channels of an expert", experts.ffn, divisors(experts.ffn))
    if config.actor.router_replay and experts is not None and pp > 1:
        rule = f"vLLM does not tell experts where {PP} is above 1"
        yield Fault("actor.router_replay", "true", rule, "false", (PP,))
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
        reads = (*lengths, "rollout.dtype", "model.dtype", TP, PP)
        yield Fault("rollout.kv_cache_gib", rollout.kv_cache_gib, rule, f"{math.ceil(needed * 100) / 100}", reads)
    for token_id in rollout.stop_token_ids:
        if not 0 <= token_id < arch.vocab:
            yield Fault("rollout.stop_token_ids", token_id, f"must be in the vocabulary: 0 to {arch.vocab - 1}")
