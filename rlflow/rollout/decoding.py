"""Decode steps without vLLM's scheduler, while there is nothing for it to decide.

Its scheduler and output processor run Python for every token (`tools/bench_decoding.py`), which for a thousand of them
takes longer than a GPU takes for a small model's step. `SteadyDecoder` stands before them: once all requests of an
engine wait for their next token, it counts them in arrays and only hands steps to vLLM's model runner, which computes,
samples and keeps its own state on the GPU.
Prompts, admission and what to do without free cache blocks stay vLLM's, which goes on from wherever this stops.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron_bridge import compat
from rlflow.rollout.rows import DecodeRows, Rows, Start

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import Request

AHEAD = 2  # steps given to the GPU before the oldest one's tokens are read: it never waits, and few steps are in vain
MOST_STEPS = 4096  # of one stay, whose tokens and log-probs the host holds in arrays of equal rows
FREE_SHARE = 16  # while requests wait that the cache could hold, at most one in so many of the places is idle


def install(llm: LLM) -> None:
    """Let an engine in this process, with vLLM's second GPU runner, decode in bulk from now on."""
    client: Any = llm.llm_engine.engine_core
    client.get_output = SteadyDecoder(llm).get_output


class Step(NamedTuple):
    """A launched step: its rows, and vLLM's output, whose arrays are filled when its event has come."""

    rows: Rows
    output: Any


class SteadyDecoder:
    """Takes decode steps of an in-process engine in bulk; `get_output` stands in for the engine client's.

    Requests sample at most the log-prob of their own token and end by token ids alone, as `sampling.Sampling` asks.
    Every tensor-parallel rank decides alike, because it decides by sampled tokens and counts only.
    """

    def __init__(self, llm: LLM) -> None:
        client: Any = llm.llm_engine.engine_core
        core = client.engine_core
        self._scheduler, self._executor, self._queue = core.scheduler, core.model_executor, core.batch_queue
        self._states = llm.llm_engine.output_processor.request_states
        self._block = core.vllm_config.cache_config.block_size
        self._step_of_vllm = client.get_output

    def get_output(self) -> EngineCoreOutputs:
        """The next outputs: of a step that vLLM schedules, or of all steps until it has something to decide again."""
        if not self._is_steady():
            return self._step_of_vllm()
        return self._settle() if self._queue else self._decode()

    def _is_steady(self) -> bool:
        """Whether all there is to do next is to give every running request its next token."""
        running = self._scheduler.running
        if not running or self._can_admit():
            return False
        return len({_stop_ids(request) for request in running}) == 1 and all(map(_decodes, running))

    def _can_admit(self) -> bool:
        """Whether a waiting request has a place and cache blocks for its tokens."""
        return len(self._scheduler.running) < self._scheduler.max_num_running_reqs and self._has_blocks()

    def _has_blocks(self) -> bool:
        """Whether a request waits whose tokens the free cache blocks hold."""
        waiting = compat.vllm_waiting(self._scheduler)
        return waiting is not None and bool(self._free_blocks() * self._block >= waiting.num_tokens)

    def _should_leave(self, going: int) -> bool:
        """Whether enough places have become free for vLLM to fill them, with so many requests left."""
        scheduler = self._scheduler
        waiting = scheduler.get_num_unfinished_requests() - len(scheduler.running)
        enough = max(1, min(scheduler.max_num_running_reqs // FREE_SHARE, waiting))
        return scheduler.max_num_running_reqs - going >= enough and self._has_blocks()

    def _free_blocks(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _settle(self) -> EngineCoreOutputs:
        """The oldest step that vLLM launched and has not read, without launching another."""
        from vllm.v1.engine import EngineCoreOutputs

        future, scheduled, _ = self._queue.pop()
        outputs: dict[int, EngineCoreOutputs] = self._scheduler.update_from_output(scheduled, future.result())
        return outputs.get(0) or EngineCoreOutputs()

    def _decode(self) -> EngineCoreOutputs:
        """Step until all requests have ended, or vLLM has places to fill or to make."""
        from vllm.v1.engine import EngineCoreOutputs

        requests = list(self._scheduler.running)
        rows = DecodeRows([self._start(request) for request in requests], _stop_ids(requests[0]), MOST_STEPS)
        launched: deque[Step] = deque()
        outputs: list[EngineCoreOutput] = []
        leaving = False
        while True:
            step = None if leaving or len(launched) >= AHEAD else self._launch(requests, rows)
            if step is not None:
                launched.append(step)
            elif launched:
                outputs += [self._finish(requests[row], rows, row) for row in _take(launched.popleft(), rows)]
                leaving = leaving or self._should_leave(len(requests) - len(outputs))
            else:
                break
        going = [(requests[row], row) for row in rows.going().tolist()]
        self._scheduler.running = [request for request, _ in going]
        if len(going) == len(requests) and not rows.tokens(0):
            return self._step_of_vllm()  # which makes room in its cache
        outputs += [self._hand_back(request, rows, row) for request, row in going]
        return EngineCoreOutputs(outputs=outputs)

    def _start(self, request: Request) -> Start:
        params = request.sampling_params
        longest = self._scheduler.max_model_len - request.num_prompt_tokens
        minimum = 0 if params is None else params.min_tokens
        sampled = request.num_output_tokens
        return Start(request.num_prompt_tokens, sampled, min(request.max_tokens, longest), minimum)

    def _launch(self, requests: list[Request], rows: DecodeRows) -> Step | None:
        """Give the GPU the next token of every open row; None where there is none, or no cache block for one."""
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

        which = rows.open()
        computed = rows.computed(which)
        blocks = self._new_blocks(requests, which, computed)
        if not len(which) or blocks is None:
            return None
        ids = [requests[row].request_id for row in which.tolist()]
        scheduler, scheduled = self._scheduler, SchedulerOutput.make_empty()
        counts = computed.tolist()
        scheduled.scheduled_cached_reqs = CachedRequestData(
            req_ids=ids, resumed_req_ids=set(), new_token_ids=[], all_token_ids={}, new_block_ids=blocks,
            num_computed_tokens=counts, num_output_tokens=rows.sampled(which).tolist(),
        )  # fmt: skip
        scheduled.num_scheduled_tokens = dict.fromkeys(ids, 1)
        scheduled.total_num_scheduled_tokens = len(ids)
        scheduled.finished_req_ids, scheduler.finished_req_ids = scheduler.finished_req_ids, set()
        self._executor.execute_model(scheduled, non_block=True)
        sampled = self._executor.sample_tokens(None, non_block=True)
        if not hasattr(sampled, "async_output"):
            sampled.result()  # raises what went wrong in the step
        rows.launch(which)
        return Step(which, sampled.async_output)

    def _new_blocks(self, requests: list[Request], which: Rows, computed: Rows) -> list[Any] | None:
        """Cache blocks for the rows whose next token begins one, None for the others; None without enough of them."""
        found: list[Any] = [None] * len(which)
        beginning = np.flatnonzero(computed % self._block == 0)
        manager = self._scheduler.kv_cache_manager
        if len(beginning) * manager.num_kv_cache_groups > self._free_blocks():
            return None
        for place in beginning.tolist():
            request = requests[which[place]]
            request.num_computed_tokens = int(computed[place])
            found[place] = manager.allocate_slots(request, 1).get_block_ids(allow_none=True)
        return found

    def _finish(self, request: Request, rows: DecodeRows, row: int) -> EngineCoreOutput:
        """End a request in the scheduler, which frees its blocks and has the runner forget it with the next step."""
        from vllm.v1.request import RequestStatus

        stopped = rows.stopped(row)
        request.status = RequestStatus.FINISHED_STOPPED if stopped else RequestStatus.FINISHED_LENGTH_CAPPED
        request.stop_reason = rows.tokens(row)[-1] if stopped else None
        self._scheduler._free_request(request)
        return self._output(request, rows, row)

    def _hand_back(self, request: Request, rows: DecodeRows, row: int) -> EngineCoreOutput:
        """Give the scheduler a request back, with the tokens that it was given here."""
        output = self._output(request, rows, row)
        request.append_output_token_ids(output.new_token_ids)
        request.num_computed_tokens = request.num_tokens - 1
        return output

    def _output(self, request: Request, rows: DecodeRows, row: int) -> EngineCoreOutput:
        """All tokens of a row as one output; their log-probs go where vLLM collects them, which takes one at a time."""
        from vllm.v1.engine import EngineCoreOutput

        tokens = rows.tokens(row)
        collected: Any = self._states[request.request_id].logprobs_processor
        _extend(collected.logprobs, tokens, rows.log_probs(row))
        return EngineCoreOutput(
            request_id=request.request_id, new_token_ids=tokens, finish_reason=request.get_finished_reason(),
            stop_reason=request.stop_reason,
        )  # fmt: skip


def _decodes(request: Request) -> bool:
    """Whether a request has sampled a token, and is to compute that alone next; counted with steps under way."""
    known = request.num_tokens + request.num_output_placeholders
    sampled = request.num_output_tokens + request.num_output_placeholders
    return bool(sampled and not request.is_prefill_chunk and known - request.num_computed_tokens == 1)


def _stop_ids(request: Request) -> tuple[int, ...]:
    params = request.sampling_params
    return () if params is None else tuple(params.stop_token_ids or ())


def _take(step: Step, rows: DecodeRows) -> list[int]:
    """Wait for a step's tokens and log-probs; returns the rows that it ends."""
    step.output.copy_event.synchronize()
    tokens = step.output.sampled_token_ids[:, 0]
    ended: list[int] = rows.take(step.rows, tokens, step.output.logprobs_tensors.logprobs[:, 0].numpy()).tolist()
    return ended


def _extend(collected: Any, tokens: list[int], log_probs: list[float]) -> None:
    """Append a position for each token to vLLM's flat log-probs."""
    first = len(collected.logprobs)
    collected.start_indices.extend(range(first, first + len(tokens)))
    collected.end_indices.extend(range(first + 1, first + len(tokens) + 1))
    collected.token_ids.extend(tokens)
    collected.logprobs.extend(log_probs)
    collected.ranks.extend([None] * len(tokens))
    collected.decoded_tokens.extend([None] * len(tokens))
