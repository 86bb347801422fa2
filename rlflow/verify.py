"""`rlflow verify`: whether weights reach vLLM as they should, tried in the launch that a run would have.

The proof is `megatron_bridge.proof`'s; with parity, weights go from the trainer into the engine as in a run, and both
compute the log-probs of the engine's samples. Starting the parts is left to `job`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron_bridge.families import load_architecture
from rlflow import job, parallel
from rlflow.batch.batch import Batch
from rlflow.batch.routing import add_routing
from rlflow.batch.sample import Prompt
from rlflow.config import Config
from rlflow.data.encode import load_tokenizer
from rlflow.roles import Engine
from rlflow.roles.build import Grids, build_engine
from rlflow.rollout.vllm_engine import VLLMRollout
from rlflow.rollout.weights import WeightReceiver

PROMPTS, LENGTH = 8, 32  # prompts of parity, and most tokens of a prompt and of a response
LARGEST_GAP = {"float32": 1e-4, "float16": 0.2, "bfloat16": 0.2, "fp8": 0.5}
"""Mean difference of log-probs up to which two ways of computing them agree, by the engine's number format.

Real models come to a tenth of this; random ones, whose logits spread wider, to half. A wrong weight costs whole nats.
"""


def verify(config: Config, *, parity: bool) -> int:
    """Print what was compared on each rank and how weights will be written; returns 1 where something differs."""
    with parallel.reporting(lambda: "verify"):
        job.start(config)
        config = _to_verify(config)
        architecture = load_architecture(config.model.path)
        tokenizer = load_tokenizer(config.model.tokenizer or config.model.path)
        placed = job.place(config, architecture)
        rollout = job.start_rollout(
            config, architecture, tokenizer, placed.rollout.ranks, with_routing=parity and config.actor.router_replay
        )
        lines, good = table(rollout.weights), rollout.weights.in_place or config.rollout.quantization is not None
        if parity:
            grid = Grids(config).of(config.actor, placed.train)
            actor = build_engine(config, "actor", architecture, grid, trained=False)
            line, agree = _parity(config, actor, rollout)
            lines, good = [*lines, line], good and agree
        if job.is_main(config):
            print("\n".join(lines), flush=True)
        job.stop(rollout)
    return 0 if good else 1


def table(weights: WeightReceiver) -> list[str]:
    """A line a rank of the rollout, the names that differ, and how weights are written."""
    lines = [f"{'rank':>4} {'tensors':>8} {'MB':>10} {'different':>10}"]
    for rank, proof in enumerate(weights.proofs):
        if proof is not None:
            lines.append(f"{rank:>4} {proof.tensors:>8} {proof.bytes / 1e6:>10,.1f} {len(proof.different):>10}")
            lines += [f"       {name}" for name in proof.different]
    return [*(lines if weights.proofs else []), weights.decision]


def _to_verify(config: Config) -> Config:
    """The run's configuration with the proof, and with short samples whose log-probs no filter changes."""
    sizes = {
        key: min(getattr(config.rollout, key), LENGTH) for key in ("max_prompt_length", "max_response_length")
    }  # fmt: skip
    rollout = replace(config.rollout, n=1, temperature=1.0, top_p=1.0, top_k=-1, deterministic=True, **sizes)
    return replace(config, rollout=rollout, bridge=replace(config.bridge, startup_proof=True))


def _parity(config: Config, actor: Engine, rollout: VLLMRollout) -> tuple[str, bool]:
    """Log-probs of the engine's samples, by the engine and by the actor whose weights it has taken."""
    actor.residency.load("weights")
    rollout.sync(actor.layout, actor.parameters_by_name())
    prompts = list(random_prompts(actor.layout.arch.vocab, config.rollout.max_prompt_length))
    samples = _gathered(rollout.generate(prompts, n=1, temperature=1.0, step=0))
    batch = Batch.from_samples(samples, {prompt.id: number for number, prompt in enumerate(prompts)})
    if actor.routing is not None:
        add_routing(batch, samples, actor.routing)
    found = actor.log_probs(batch, 1.0).cpu()
    gaps = (found - batch.tokens["rollout_log_probs"]).abs() if actor.grid.is_member else found
    largest = LARGEST_GAP[config.rollout.quantization or config.rollout.dtype or config.model.dtype]
    mean = max(_gathered([gaps.mean().item()]))
    words = f"log-probs of {len(gaps)} sampled tokens: engine and trainer differ by {mean:.1e} on average"
    good = mean <= largest
    return f"{words}, at most {largest:g} is expected{'' if good else ': they do not agree'}", good


def random_prompts(vocab: int, length: int) -> Iterator[Prompt]:
    """Prompts of random tokens, some longer and some shorter, the same on every rank."""
    draw = random.Random(0)
    for number in range(PROMPTS):
        ids = [draw.randrange(vocab) for _ in range(max(1, length * (number + 1) // PROMPTS))]
        yield Prompt(f"verify/{number}", ids, {}, None)


def _gathered(mine: Sequence[Any]) -> list[Any]:
    """What all ranks hold, by rank."""
    everyone: list[Sequence[Any]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, list(mine))
    return [item for part in everyone for item in part]
