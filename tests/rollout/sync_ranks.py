"""What the ranks of the sync tests run: weights in Megatron's layouts into real vLLM engines of every kind.

No trainer is needed for this: Megatron's tensors are made from the layout and filled from the model's folder.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_bridge import compat
from megatron_bridge.checkpoints import load_hf
from megatron_bridge.errors import SyncError, UserError
from megatron_bridge.execute import Traffic
from megatron_bridge.families import load_architecture
from megatron_bridge.layouts import Layout, MegatronLayout
from rlflow.batch.sample import Sample
from rlflow.rollout.engine import NotReady
from rlflow.rollout.vllm_engine import VLLMRollout
from tests.rollout.ranks import prompts, start

SCALE = 0.9  # of all weights in the second sync
BUCKET_BYTES = 48 * 1024  # cuts layers into tensors, and a layer's experts into groups


@dataclass
class Synced:
    """What one rank showed of an engine that took weights in place, then through vLLM's loader, then not all."""

    proven: bool = False
    compared: int = 0
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    traffic: dict[str, Traffic] = field(default_factory=dict)
    errors: dict[str, tuple[str, str]] = field(default_factory=dict)


def sync(folder: Path, engine: dict[str, Any], source: dict[str, Any], lost: str = "") -> Synced:
    """Both ways into one engine; rank 0 then lacks the tensors whose names hold `lost`."""
    rollout, seen = start(folder, prove=True, bucket_bytes=BUCKET_BYTES, **engine), Synced()
    proof = rollout.weights.proofs[dist.get_rank()]
    seen.proven, seen.compared = rollout.weights.in_place, proof.tensors if proof else 0
    layout, tensors = megatron(folder, source)
    seen.traffic["in place"] = rollout.sync(layout, tensors)
    seen.samples["in place"] = _sample(rollout)
    for tensor in tensors.values():
        tensor.mul_(SCALE)
    rollout.weights.in_place = False
    seen.traffic["by vLLM's loader"] = rollout.sync(layout, tensors)
    seen.samples["by vLLM's loader"] = _sample(rollout)
    for in_place in (True, False) if lost else ():
        rollout.weights.in_place = in_place
        kept = {name: tensor for name, tensor in tensors.items() if dist.get_rank() or lost not in name}
        seen.errors[f"lost, in place {in_place}"] = _error(rollout.sync, layout, kept)
        seen.errors[f"then, in place {in_place}"] = _error(_sample, rollout)
    rollout.shutdown()
    return seen


def cast(folder: Path, pairs: list[tuple[str, str]]) -> list[dict[str, bool]]:
    """For each (trainer's, engine's) dtype: which of the engine's parameters hold the trainer's, cast, bit for bit."""
    found = []
    for given, kept in pairs:
        rollout = start(folder, prove=True, dtype=kept)
        rollout.sync(*megatron(folder, {}, getattr(torch, given)))
        expected = _filled(folder, rollout.weights.layout, getattr(torch, given))
        live = compat.vllm_weights(rollout._llm)
        found.append({name: torch.equal(live[name], one.to(getattr(torch, kept))) for name, one in expected.items()})
        rollout.shutdown()
    return found


def megatron(
    folder: Path, grid: dict[str, Any], dtype: torch.dtype = torch.float32
) -> tuple[MegatronLayout, dict[str, torch.Tensor]]:
    """A model as the ranks of a grid hold it, without megatron-core."""
    layout = MegatronLayout(load_architecture(folder), **grid)
    return layout, _filled(folder, layout, dtype)


def _filled(folder: Path, layout: Layout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    tensors = {name: torch.empty(param.shape, dtype=dtype) for name, param in layout.parameters(rank).items()}
    load_hf(folder, layout, tensors, rank=rank)
    return tensors


def _sample(rollout: VLLMRollout) -> list[Sample]:
    return rollout.generate(prompts(), n=2, temperature=0.7, step=0)


def _error(call: Any, *args: Any) -> tuple[str, str]:
    try:
        call(*args)
    except (NotReady, SyncError, UserError) as error:
        return type(error).__name__, str(error)
    return "", ""
