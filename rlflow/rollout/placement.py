"""Which rank trains and which samples which slice of the model, by `bridge.placement`.

What is best is megatron_bridge's to find; the groups are made by `parallel.Grid` and `world.vllm_world`.
"""

import logging
from collections.abc import Sequence

from megatron_bridge import compat
from megatron_bridge.families import Architecture
from megatron_bridge.layouts import MegatronLayout, VLLMLayout
from megatron_bridge.placement import Placement, align, natural
from rlflow.config.ranks import rank_list
from rlflow.config.roles import replica_size
from rlflow.config.schema import Config

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

log = logging.getLogger(__name__)


def choose(
    config: Config, architecture: Architecture, stages: Sequence[int], world_size: int, ranks_per_node: int
) -> Placement:
    """The trainer's and the rollout's layouts of a job; `stages` are the layers of each pipeline stage.

    Virtual stages have equally many layers each, whatever `stages` are.

    Every rank chooses the same. Engines are numbered anew only where torch can make groups in any order, and their
    first rank stays the first: it is the one that shows samples.
    """
    actor, rollout = config.actor, config.rollout
    ranks = rank_list(actor.ranks, world_size)
    vpp, dp = actor.virtual_pipeline_parallel_size, len(ranks) // replica_size(actor)
    train = MegatronLayout(
        architecture, actor.tensor_parallel_size, actor.pipeline_parallel_size, dp, ranks, actor.order,
        tuple(stages) if vpp == 1 else (), vpp=vpp, cp=actor.context_parallel_size,
        ep=actor.expert_parallel_size, etp=actor.expert_tensor_parallel_size,
    )  # fmt: skip
    engines = VLLMLayout(
        architecture, rollout.tensor_parallel_size, rank_list(rollout.ranks, world_size),
        rollout.pipeline_parallel_size, rollout.expert_parallel,
    )  # fmt: skip
    itemsize = ITEM_BYTES[rollout.dtype or config.model.dtype]
    given = natural(train, engines, itemsize=itemsize)
    if config.bridge.placement == "natural":
        return given
    renumber = compat.has_unsorted_groups()
    chosen = align(train, engines, ranks_per_node=ranks_per_node, itemsize=itemsize, renumber=renumber)
    if chosen.rollout.ranks[0] != engines.ranks[0]:
        chosen = align(train, engines, ranks_per_node=ranks_per_node, itemsize=itemsize, renumber=False)
    log.info(describe(given, chosen, renumber))
    return chosen


def describe(given: Placement, chosen: Placement, renumber: bool) -> str:
    """What was chosen, and the bytes of a sync before and after."""
    words = [f"order {chosen.train.order}"]
    if chosen.train.ranks != given.train.ranks:
        words.append(f"the actor's ranks as {_some(chosen.train.ranks)}")
    if chosen.rollout.ranks != given.rollout.ranks:
        words.append(f"the rollout's ranks as {_some(chosen.rollout.ranks)}")
    elif not renumber:
        words.append("the rollout's ranks ascending, as this torch has no other groups")
    (most, total), (most_now, total_now) = given.cost, chosen.cost
    return (
        f"placement: {', '.join(words)}; a sync moves {total_now / 1e6:,.1f} MB instead of {total / 1e6:,.1f}, at most "
        f"{most_now / 1e6:,.1f} MB instead of {most / 1e6:,.1f} to a rank; {sum(chosen.least_bytes) / 1e6:,.1f} MB in "
        "any placement"
    )


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
