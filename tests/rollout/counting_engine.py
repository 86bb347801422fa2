"""vLLM's engine, scheduler and cache for real, over a model that counts instead of computing.

What a request samples next is a function of its prompt, its number among the prompt's responses, and its position.
The model keeps the state that vLLM's second GPU runner keeps, and fails where a step does not fit it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

BLOCK, LAYERS, KV_HEADS, HEAD = 16, 2, 1, 32
BLOCK_BYTES = 2 * LAYERS * KV_HEADS * HEAD * BLOCK * 2
STOP = 7


@dataclass
class Known:
    """What the runner keeps of a request."""

    first: int  # token of its prompt
    index: int  # among the responses to the prompt
    prompt: int  # tokens
    prefill: int  # tokens until it samples
    blocks: list[int]
    computed: int


def counting_executor() -> type:
    """The executor; a function, because its base is vLLM's."""
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsTensors, ModelRunnerOutput

    class Output(Future):
        """A step's tokens both as the decoder reads them and as vLLM does."""

        copy_event = type("Event", (), {"synchronize": staticmethod(lambda: None)})

        def __init__(self, ids: list[str], tokens: np.ndarray, complete: list[bool]) -> None:
            super().__init__()
            self.async_output = self
            self.sampled_token_ids = tokens[:, None]
            log_probs = torch.from_numpy(-tokens.astype(np.float32) / 100)[:, None]
            ranks = torch.zeros(len(ids), dtype=torch.int32)
            self.logprobs_tensors = LogprobsTensors(torch.from_numpy(self.sampled_token_ids), log_probs, ranks)
            self.set_result(ModelRunnerOutput(
                req_ids=ids, req_id_to_index={name: number for number, name in enumerate(ids)},
                sampled_token_ids=[
                    [token] if done else [] for token, done in zip(tokens.tolist(), complete, strict=True)
                ],
                logprobs=self.logprobs_tensors.tolists(), prompt_logprobs_dict={},
            ))  # fmt: skip

    class Counting(Executor):
        supports_pp = uses_ray = False
        blocks = 0  # of the cache

        def _init_executor(self) -> None:
            self.known: dict[str, Known] = {}

        def get_kv_cache_specs(self) -> list[dict[str, Any]]:
            spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=HEAD, dtype=torch.bfloat16)
            return [{f"layer.{number}": spec for number in range(LAYERS)}]

        def determine_available_memory(self) -> list[int]:
            return [self.blocks * BLOCK_BYTES]

        def initialize_from_config(self, configs: Any) -> None: ...

        def compile_or_warm_up_model(self) -> None: ...

        def check_health(self) -> None: ...

        def collective_rpc(self, method: Any, *args: Any, **how: Any) -> list[Any]:
            return [["LBNHC"]] if "layout" in str(method) else [None]

        @property
        def supported_tasks(self) -> tuple[str, ...]:
            return ("generate",)

        @classmethod
        def supports_async_scheduling(cls) -> bool:
            return True

        def execute_model(self, step: Any, non_block: bool = False) -> Future:
            for name in step.finished_req_ids | (step.preempted_req_ids or set()):
                self.known.pop(name, None)
            for new in step.scheduled_new_reqs:
                prompt, prefill = new.prompt_token_ids, new.prefill_token_ids
                index = int(new.req_id.split("_")[0])
                self.known[new.req_id] = Known(
                    prompt[0], index, len(prompt), len(prefill), list(new.block_ids[0]), new.num_computed_tokens
                )
            cached = step.scheduled_cached_reqs
            for name, computed, blocks in zip(
                cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
            ):
                self.known[name].computed = computed
                self.known[name].blocks += [] if blocks is None else blocks[0]
            self._check(step.num_scheduled_tokens)
            self._step = step.num_scheduled_tokens
            done: Future = Future()
            done.set_result(None if step.total_num_scheduled_tokens else EMPTY_MODEL_RUNNER_OUTPUT)
            return done

        def _check(self, counts: dict[str, int]) -> None:
            """Every token has a place, and nobody else writes to the places behind a prompt."""
            writers: dict[int, str] = {}
            for name, count in counts.items():
                known = self.known[name]
                for position in range(known.computed, known.computed + count):
                    block = known.blocks[position // BLOCK]
                    if position // BLOCK > known.prompt // BLOCK:
                        assert writers.setdefault(block, name) == name

        def sample_tokens(self, grammar: Any, non_block: bool = False) -> Output:
            ends = {name: self.known[name].computed + count for name, count in self._step.items()}
            tokens = np.array([
                (7919 * self.known[name].first + 104729 * self.known[name].index + 1299709 * end) % 997 % 97
                for name, end in ends.items()
            ])  # fmt: skip
            return Output(list(ends), tokens, [end >= self.known[name].prefill for name, end in ends.items()])

    return Counting


@contextlib.contextmanager
def counting_engine(folder: Path, *, places: int, blocks: int) -> Iterator[Any]:
    """An `LLM` that schedules ahead as on a GPU, with room for so many sequences and cache blocks."""
    from vllm import LLM
    from vllm.config import vllm as configuration
    from vllm.platforms.cpu import CpuPlatform

    executor: Any = counting_executor()
    executor.blocks = blocks
    on_gpu = classmethod(lambda platform, config: setattr(config.cache_config, "block_size", BLOCK))
    with (
        patch.object(CpuPlatform, "check_and_update_config", on_gpu),
        patch.object(configuration, "HAS_TRITON", True),
        patch.dict("os.environ", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}),
    ):
        llm = LLM(
            model=str(folder), skip_tokenizer_init=True, load_format="dummy", distributed_executor_backend=executor,
            max_model_len=256, max_num_seqs=places, max_num_batched_tokens=128, async_scheduling=True,
            enable_prefix_caching=True, disable_log_stats=True, enforce_eager=True, generation_config="vllm",
        )  # fmt: skip
        yield llm
