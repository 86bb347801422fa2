"""What the ranks of the vLLM tests run, with vLLM and Megatron for real; the tests judge what comes back.

Starting vLLM costs seconds, so one start answers many questions. transformers is the reference.
"""

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_bridge.boxes import Param, stack
from megatron_bridge.errors import UserError
from megatron_bridge.execute import connect
from megatron_bridge.families import load_architecture
from megatron_bridge.files import open_hf
from megatron_bridge.layouts import HFLayout, MegatronLayout, VLLMLayout
from megatron_bridge.proof import prove
from rlflow import parallel
from rlflow.batch.batch import Batch
from rlflow.batch.sample import Prompt, Sample
from rlflow.config.schema import Rollout
from rlflow.rollout.engine import NotReady
from rlflow.rollout.timing import Generation
from rlflow.rollout.vllm_engine import VLLMRollout

PROMPT, RESPONSE, TIMEOUT = 48, 16, 77
STOPS = (40, 41)
Keys = list[tuple[str, int, tuple[int, ...]]]


def start(folder: Path, *, tensor: int = 1, pipeline: int = 1, experts: bool = False, ranks: Any = "all",
          deterministic: bool = True, prove: bool = False, stop: tuple[int, ...] = (), dtype: str = "float32",
          bucket_bytes: int = 256 << 20, numbering: tuple[int, ...] | None = None) -> VLLMRollout:  # fmt: skip
    from transformers import AutoTokenizer

    config = Rollout(
        ranks=ranks, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, expert_parallel=experts,
        max_prompt_length=PROMPT, max_response_length=RESPONSE, dtype=dtype, deterministic=deterministic,
        stop_token_ids=stop, kv_cache_gib=0.05, max_num_seqs=32,
    )  # fmt: skip
    return VLLMRollout(
        load_architecture(folder), str(folder), config, AutoTokenizer.from_pretrained(folder), dtype="float32", seed=7,
        timeout_seconds=TIMEOUT, prove=prove, bucket_bytes=bucket_bytes, ranks=numbering,
    )  # fmt: skip


def prompts(count: int = 5) -> list[Prompt]:
    """Some longer than a block of the key-value cache, so that the prefix cache is used."""
    draw = random.Random(0)
    lengths = [5 + 10 * number % 44 for number in range(count)]
    return [
        Prompt(f"train/{number}", [draw.randrange(4, 500) for _ in range(length)], {}, None)
        for number, length in enumerate(lengths)
    ]


def keys(samples: list[Sample]) -> Keys:
    return [(sample.prompt.id, sample.index, tuple(sample.response_ids)) for sample in samples]


def reference(folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> torch.nn.Module:
    """transformers' model with the folder's weights or others. from_pretrained does not survive the CPU shim."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.load_state_dict(tensors or open_hf(folder), strict=False)
    return model.eval()


@torch.no_grad()
def logits_of(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """[response length, vocabulary]: what predicts each response token."""
    ids = torch.tensor([sample.prompt.token_ids + sample.response_ids])
    return model(ids).logits[0, len(sample.prompt.token_ids) - 1 : -1]


def gap(model: torch.nn.Module, samples: list[Sample], temperature: float) -> float:
    """Largest difference between the samples' log-probs and transformers'."""
    gaps = []
    for sample in samples:
        expected = torch.log_softmax(logits_of(model, sample) / temperature, -1)
        expected = expected.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
        gaps.append((expected - torch.tensor(sample.log_probs)).abs().max().item())
    return max(gaps)


def error_of(call: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    try:
        call(*args, **kwargs)
    except (NotReady, UserError) as error:
        return type(error).__name__, str(error)
    return "", ""


@dataclass
class Alone:
    """What one engine on one rank showed."""

    process_kept: dict[str, bool] = field(default_factory=dict)
    timeouts: set[float] = field(default_factory=set)
    in_place: bool = False
    wrong_layout: list[str] = field(default_factory=list)
    errors: dict[str, tuple[str, str]] = field(default_factory=dict)
    gaps: dict[str, float] = field(default_factory=dict)
    sampled: dict[str, Keys] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    greedy_is_argmax: bool = False
    generation: Generation | None = None
    versions: list[int] = field(default_factory=list)


def vllm_timeouts() -> set[float]:
    """Seconds after which collectives of vLLM's groups give up."""
    from vllm.distributed.parallel_state import get_tp_group, get_world_group

    groups = [part for group in (get_tp_group(), get_world_group()) for part in (group.device_group, group.cpu_group)]
    return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}


class SwappedGateUp(VLLMLayout):
    """vLLM's layout with one mistake that no shape shows."""

    def params(self, kind: str, shard: Any) -> tuple[Param, ...]:
        return tuple(
            param._replace(pieces=stack([(piece.name, piece.box) for piece in reversed(param.pieces)]))
            if "gate_up" in param.name else param
            for param in super().params(kind, shard)
        )  # fmt: skip


def alone(folder: Path) -> Alone:
    """One engine, from its start to stale caches and missing tensors."""
    seen = Alone()
    torch.manual_seed(3)
    threads, variables, expected = torch.set_num_threads, dict(os.environ), torch.rand(2)
    torch.manual_seed(3)
    first = torch.rand(1)
    rollout = start(folder, prove=True, stop=STOPS)
    seen.process_kept = {
        "generators": torch.equal(torch.cat([first, torch.rand(1)]), expected),
        "set_num_threads": torch.set_num_threads is threads,
        "variables": all(os.environ.get(name) == variables.get(name) for name in ("LOCAL_WORLD_SIZE", "LD_PRELOAD")),
    }
    seen.timeouts = vllm_timeouts()
    seen.in_place = rollout._weights.in_place
    seen.errors["before the first sync"] = error_of(rollout.generate, prompts(), n=1, temperature=1.0, step=0)
    rollout.sync_from_hf(str(folder))
    _sample(seen, rollout, reference(folder))
    _sample_evenly(seen, rollout, folder)
    _update(seen, rollout, folder)
    _prove_wrong(seen, rollout)
    rollout.shutdown()
    return seen


def _sample(seen: Alone, rollout: VLLMRollout, model: torch.nn.Module) -> None:
    samples = rollout.generate(prompts(), n=3, temperature=0.7, step=2)
    seen.gaps["first sync"] = gap(model, samples, 0.7)
    seen.samples["step 2"], seen.generation = samples, rollout.generation
    seen.sampled["step 3"] = keys(rollout.generate(prompts(), n=3, temperature=0.7, step=3))
    seen.sampled["step 2 again"] = keys(rollout.generate(prompts(), n=3, temperature=0.7, step=2))
    greedy = rollout.generate(prompts(), n=1, temperature=1.0, step=0, greedy=True)
    seen.greedy_is_argmax = all(
        logits_of(model, sample).argmax(-1).tolist() == sample.response_ids for sample in greedy
    )


def _sample_evenly(seen: Alone, rollout: VLLMRollout, folder: Path) -> None:
    """From weights that make every token, the stop ids included, about as likely as any other."""
    flat = open_hf(folder) | {"model.norm.weight": torch.full((128,), 1e-3)}
    rollout.sync(HFLayout(load_architecture(folder), (0,)), flat)
    seen.samples["even"] = rollout.generate(prompts(8), n=32, temperature=1.0, step=0)
    seen.samples["long"] = rollout.generate(prompts(8), n=32, temperature=1.0, step=0, min_tokens=6)


def _update(seen: Alone, rollout: VLLMRollout, folder: Path) -> None:
    """Other weights into the engine, whose cache knows the prompts, through the loader too; and incomplete ones."""
    layout = HFLayout(load_architecture(folder), (0,))
    for name, scale, in_place in (("in place", 0.9, True), ("by vLLM's loader", 0.8, False)):
        changed = {key: tensor * scale for key, tensor in open_hf(folder).items()}
        rollout._weights.in_place = in_place
        rollout.sync(layout, changed)
        seen.gaps[name] = gap(
            reference(folder, changed), rollout.generate(prompts(), n=1, temperature=1.0, step=0), 1.0
        )
        seen.versions.append(rollout.version)
    lacking = {key: tensor for key, tensor in open_hf(folder).items() if "layers.1.self_attn.v_proj" not in key}
    seen.errors["one tensor missing"] = error_of(rollout.sync, layout, lacking)
    seen.errors["after the failed sync"] = error_of(rollout.generate, prompts(), n=1, temperature=1.0, step=0)
    seen.errors["nothing given"] = error_of(rollout.sync, layout, {})


def _prove_wrong(seen: Alone, rollout: VLLMRollout) -> None:
    held = rollout._weights
    seen.wrong_layout = list(prove(rollout._llm, SwappedGateUp(held.layout.arch, 1, (0,)), held._tensors, 0).different)


def sampled(folder: Path, tensor: int, ranks: Any, deterministic: bool) -> list[Keys]:
    """The samples that this rank returns for steps 2, 3 and 2 again."""
    rollout = start(folder, tensor=tensor, ranks=ranks, deterministic=deterministic)
    rollout.sync_from_hf(str(folder))
    found = [keys(rollout.generate(prompts(), n=3, temperature=0.7, step=step)) for step in (2, 3, 2)]
    rollout.shutdown()
    return found


def proven_gap(folder: Path, tensor: int) -> tuple[bool, float]:
    """Whether the start-up proof held on all ranks, and the gap to transformers of this rank's samples."""
    rollout = start(folder, tensor=tensor, prove=True)
    rollout.sync_from_hf(str(folder))
    samples = rollout.generate(prompts(), n=2, temperature=0.7, step=0)
    found = rollout._weights.in_place, gap(reference(folder), samples, 0.7) if samples else 0.0
    rollout.shutdown()
    return found


def on_subsets(folder: Path, subsets: list[tuple[int, ...]]) -> list[tuple[Keys, float]]:
    """Tensor-parallel engines on some ranks, one after another, and a collective of all ranks after each."""
    found = []
    for ranks in subsets:
        samples = sampled(folder, len(ranks), ranks, True)[0]
        everyone = torch.ones(1)
        dist.all_reduce(everyone, group=dist.new_group(list(range(dist.get_world_size()))))
        found.append((samples, everyone.item()))
    return found


def numbered(folder: Path, numbering: tuple[int, ...]) -> tuple[Keys, dict[str, float]]:
    """What an engine samples whose first rank is numbering[0], its second numbering[1], …; and the sync's bytes.

    The actor holds rows of rank r's slice where that slice is rank r's in the engine too, by an order of its own.
    """
    rollout = start(folder, tensor=len(numbering), prove=True, numbering=numbering)
    actor = MegatronLayout(load_architecture(folder), len(numbering), ranks=numbering)
    source, held = HFLayout(actor.arch, tuple(range(dist.get_world_size()))), open_hf(folder)
    rank = dist.get_rank()
    mine = {name: torch.empty(param.shape) for name, param in actor.parameters(rank).items()}
    connect(source, held, actor, mine, rank=rank, dtype=torch.float32).run()
    traffic = rollout.sync(actor, mine)
    samples = rollout.generate(prompts(), n=3, temperature=0.7, step=2)
    rollout.shutdown()
    return keys(samples), {"received": traffic.received, "in_place": rollout.weights.in_place}


def shared_memory() -> set[str]:
    """The files of vLLM's shared memory that this process maps, as the kernel names them."""
    return {line.split(maxsplit=5)[5].strip() for line in Path("/proc/self/maps").open() if "cpushm" in line}


def from_megatron(folder: Path, tensor: int, grids: list[tuple[int, int]]) -> tuple[list[dict[str, float]], set[str]]:
    """One engine filled from actors of several (tensor, pipeline) sizes, each with weights of its own.

    The gap is between vLLM's log-probs and Megatron's for vLLM's samples. Returns vLLM's shared memory too.
    """
    from rlflow.roles import Engine

    parallel.initialize(60, 0)
    rollout, facts = start(folder, tensor=tensor), []
    for number, (actor_tensor, actor_pipeline) in enumerate(grids):
        grid = parallel.Grid(tensor=actor_tensor, pipeline=actor_pipeline, timeout_seconds=60)
        actor = Engine(load_architecture(folder), grid, dtype=torch.float32, micro_batch_tokens=256)
        actor.load_hf(folder)
        with torch.no_grad():
            for parameter in actor.parameters_by_name().values():
                parameter.mul_(1 - 0.05 * number)
        traffic = rollout.sync(actor.layout, actor.parameters_by_name())
        mine = rollout.generate(prompts(), n=2, temperature=0.7, step=number)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        samples = [sample for part in everyone for sample in part]
        batch = Batch.from_samples(samples, {prompt.id: number for number, prompt in enumerate(prompts())})
        difference = (actor.log_probs(batch, 0.7) - batch.tokens["rollout_log_probs"]).abs().max().item()
        facts.append({"gap": difference, "received": traffic.received, "local": traffic.local})
    mapped = shared_memory()
    rollout.shutdown()
    return facts, mapped
