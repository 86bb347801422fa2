"""What ranks run in tests of the experts that vLLM tells: sampling, and the trainer's log-probs of the samples."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.families import load_architecture
from rlflow import parallel
from rlflow.batch import Batch, Sample
from rlflow.batch.routing import add_routing
from rlflow.config.schema import Rollout
from rlflow.rollout.vllm_engine import VLLMRollout
from tests.rollout.ranks import prompts


@dataclass
class Routed:
    """The samples, and how far the trainer's log-probs are from the rollout's."""

    samples: list[Sample] = field(default_factory=list)
    gaps: dict[str, Tensor] = field(default_factory=dict)  # by what the routers do: [response tokens]


def sample_and_score(folder: Path, dtype: str) -> Routed:
    from transformers import AutoTokenizer

    from rlflow.roles import Engine

    parallel.initialize(60, 0)
    architecture = load_architecture(folder)
    config = Rollout(
        max_prompt_length=64, max_response_length=32, dtype=dtype, kv_cache_gib=0.5,
        max_num_seqs=32, ignore_eos=True,
    )  # fmt: skip
    rollout = VLLMRollout(
        architecture, str(folder), config, AutoTokenizer.from_pretrained(folder), dtype=dtype, seed=7, prove=False,
        timeout_seconds=60, with_routing=True,
    )  # fmt: skip
    actor = Engine(
        architecture, parallel.Grid(), dtype=getattr(torch, dtype), micro_batch_tokens=300, router_replay=True
    )  # fmt: skip
    actor.load_hf(folder)
    rollout.sync(actor.layout, actor.parameters_by_name())
    seen = Routed()
    for step in range(2):  # the second finds prompts in the cache
        samples = rollout.generate(prompts(8), n=4, temperature=1.0, step=step)
        _score(seen, actor, samples)
        seen.samples += samples
    rollout.shutdown()
    return seen


def _score(seen: Routed, actor: Any, samples: list[Sample]) -> None:
    batch = Batch.from_samples(samples, {prompt.id: number for number, prompt in enumerate(prompts(8))})
    shape = actor.routing
    add_routing(batch, samples, shape)
    for name, routing in (("replay", shape), ("choose", None)):
        actor.routing = routing
        gap = (actor.log_probs(batch, 1.0).cpu() - batch.tokens["rollout_log_probs"]).abs()
        seen.gaps[name] = torch.cat([seen.gaps.get(name, gap[:0]), gap])
    actor.routing = shape
