"""One engine that samples, in a process that does what it is told line by line: `tools.gpu.rollout` starts one of each.

    python -m tools.gpu.sampling ours|triton|plain|defaults FOLDER PROMPT RESPONSE SEQUENCES

`ours` is rlflow's rollout, `triton` that with vLLM's attention in Triton, `plain` vLLM's own `LLM.generate` with the
same settings, its scheduler in another process as vLLM does by itself, `defaults` that with vLLM's settings. Lines are
the work to do, as JSON; a reply for each is a JSON line that begins with `REPLY`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_bridge.families import load_architecture
from rlflow.batch import Prompt
from rlflow.config.schema import Rollout
from tools.gpu.machine import require_gpu
from tools.gpu.timing import gpu_work

REPLY = "reply: "
N = 8
CACHE_GIB = 64.0  # rlflow takes no more than so many sequences fill
PROFILED = 12  # tokens of each sequence


@dataclass(frozen=True)
class Work:
    """So many sequences, `N` to a prompt, of exactly these lengths."""

    sequences: int
    prompt: int
    response: int
    profile: bool = False  # print what the GPU does, instead of timing it

    def prompts(self, vocab: int, seed: int) -> list[list[int]]:
        """Random token ids; other seeds share no prefix."""
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(4, vocab, (self.sequences // N, self.prompt), generator=draw).tolist()


Sampler = Callable[[list[list[int]], int], int]
"""Samples `N` responses of so many tokens to each prompt, and returns how many tokens there were."""


def settings(work: Work, **more: Any) -> Rollout:
    """What all variants are given, of the largest work."""
    return Rollout(
        n=N, max_prompt_length=work.prompt, max_response_length=work.response, max_num_seqs=work.sequences,
        kv_cache_gib=CACHE_GIB, ignore_eos=True, **more,
    )  # fmt: skip


def ours(folder: Path, work: Work, **more: Any) -> Sampler:
    """rlflow's rollout, with the weights of the folder; `more` are further keys of its configuration."""
    from transformers import AutoTokenizer

    from rlflow import parallel
    from rlflow.rollout.vllm_engine import VLLMRollout

    parallel.initialize(300, 0)
    rollout = VLLMRollout(
        load_architecture(folder), str(folder), settings(work, **more), AutoTokenizer.from_pretrained(folder),
        dtype="bfloat16", seed=0, prove=False,
    )  # fmt: skip
    rollout.sync_from_hf(str(folder))
    steps = iter(range(1000))

    def sample(prompts: list[list[int]], response: int) -> int:
        asked = [Prompt(str(number), ids, {}, None) for number, ids in enumerate(prompts)]
        rollout._config = replace(rollout._config, max_response_length=response)
        found = rollout.generate(asked, n=N, temperature=1.0, step=next(steps))
        return sum(len(one.response_ids) for one in found)

    return sample


def plain(folder: Path, work: Work, *, defaults: bool = False) -> Sampler:
    """vLLM alone. With `defaults` only lengths, places and cache are given to it, so that all fit beside each other."""
    from rlflow.rollout.vllm_process import engine_options, prepare_environment

    prepare_environment(on_gpu=True)
    del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork cannot use CUDA, which is initialised by then
    from vllm import LLM, SamplingParams

    options = engine_options(
        load_architecture(folder), settings(work), dtype="bfloat16", timeout_seconds=300, on_gpu=True
    )
    of_process = {"distributed_executor_backend", "load_format", "enable_sleep_mode"}
    kept = {"max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "gpu_memory_utilization", "skip_tokenizer_init"}
    given = kept if defaults else options.keys() - of_process
    llm = LLM(model=str(folder), **{name: options[name] for name in given})

    def sample(prompts: list[list[int]], response: int) -> int:
        params: Any = SamplingParams(
            n=N, temperature=1.0, max_tokens=response, ignore_eos=True, logprobs=0, flat_logprobs=True,
            detokenize=False,
        )  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(one.token_ids) for output in outputs for one in output.outputs)

    return sample


VARIANTS: dict[str, Callable[[Path, Work], Sampler]] = {
    "ours": ours,
    "triton": lambda folder, work: ours(folder, work, attention_backend="TRITON_ATTN"),
    "plain": plain,
    "defaults": lambda folder, work: plain(folder, work, defaults=True),
}


def timed(sample: Sampler, work: Work, vocab: int, seed: int) -> dict[str, Any]:
    """Seconds and tokens of one call, with prompts that no call had before."""
    prompts = work.prompts(vocab, seed)
    if work.profile:
        seen = gpu_work(lambda: sample(prompts, PROFILED), costliest=16)
        lines = [] if seen is None else [f"busy {seen.busy:.3f} s, {seen.kernels} kernels", *seen.costliest]
        return {"lines": lines}
    begin = time.perf_counter()
    tokens = sample(prompts, work.response)
    return {"seconds": time.perf_counter() - begin, "tokens": tokens}


def main() -> int:
    require_gpu()
    variant, folder, *numbers = sys.argv[1:]
    prompt, response, sequences = map(int, numbers)
    largest = Work(sequences, prompt, response)
    vocab = load_architecture(folder).vocab
    begin = time.perf_counter()
    sample = VARIANTS[variant](Path(folder), largest)
    print(REPLY + json.dumps({"started": time.perf_counter() - begin}), flush=True)
    for number, line in enumerate(sys.stdin):
        try:
            reply = timed(sample, Work(**json.loads(line)), vocab, number)
        except Exception:
            traceback.print_exc()
            reply = {"failed": True}
        print(REPLY + json.dumps(reply), flush=True)
    return 0


def ask(work: Work) -> str:
    """The line that has a process do this work."""
    return json.dumps(asdict(work)) + "\n"


if __name__ == "__main__":
    sys.exit(main())
