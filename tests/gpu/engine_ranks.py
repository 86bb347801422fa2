"""What each GPU of the engine tests runs: an engine of some kind through two syncs and a night between them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_bridge import compat
from rlflow import parallel
from rlflow.rollout.vllm_engine import VLLMRollout
from tests.gpu.ranks import TEMPERATURE, Gap, make_engine, prompts, start_rollout


@dataclass
class Kept:
    """How weights came in, what the engine's differ from the trainer's by, and whether parameters stayed in place."""

    decision: str
    in_place: bool
    gaps: list[Gap] = field(default_factory=list)
    same_storage: bool = False
    dtypes: set[torch.dtype] = field(default_factory=set)


def keep(folder: Path, grid: dict[str, Any], options: dict[str, Any]) -> Kept:
    """Sync, sample, sleep at level 2, change every weight, sync and sample again."""
    parallel.initialize(60, 0)
    rollout = start_rollout(folder, prove=options.get("quantization") is None, **options)
    seen = Kept(rollout.weights.decision, rollout.weights.in_place)
    engine = make_engine(folder, torch.bfloat16, grid=grid)
    places = [_places(rollout)]
    for step in range(2):
        rollout.wake_weights()
        rollout.sync(engine.layout, engine.parameters_by_name())
        rollout.wake_kv_cache()
        seen.gaps.append(
            Gap.between(engine, rollout.generate(prompts(), n=4, temperature=TEMPERATURE, step=step), TEMPERATURE)
        )
        places.append(_places(rollout))
        rollout.sleep()
        with torch.no_grad():
            for parameter in engine.parameters_by_name().values():
                parameter.mul_(0.875)
    seen.same_storage = places[0] == places[1] == places[2]
    seen.dtypes = {tensor.dtype for tensor in compat.vllm_weights(rollout._llm).values()}
    rollout.shutdown()
    return seen


def _places(rollout: VLLMRollout) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in compat.vllm_weights(rollout._llm).items()}
