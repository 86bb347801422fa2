"""Which experts the rollout sent each token to (for rollout routing replay, arXiv:2510.11370).

vLLM returns this with a response where its model runner can tell; its runner on CPUs cannot, and is helped by a
`RoutingRecorder`. What is done with the choices is the trainer's matter.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_bridge import compat
from megatron_bridge.families.architecture import Architecture
from rlflow.batch.routing import routing_dtype

OPTION = {"enable_return_routed_experts": True}
"""The argument of `LLM` on a GPU."""


def routing_of(completion: Any, tokens: int, layers: list[int]) -> torch.Tensor:
    """[tokens, len(layers), experts per token], uint8 or int16: where the first tokens of a response's sequence went.

    vLLM's array has all layers, dense ones too, and a row for each token but the last, which it never computed.
    RuntimeError where the choices are missing, as they are with kernels that choose by themselves.
    """
    chosen = completion.routed_experts
    if chosen is None or len(chosen) < tokens:
        raise RuntimeError(f"vLLM returned the experts of {0 if chosen is None else len(chosen)} of {tokens} tokens")
    chosen = chosen[:tokens, layers]
    ordered = np.sort(chosen, axis=-1)
    if chosen.shape[-1] > 1 and (ordered[..., 1:] == ordered[..., :-1]).any():
        raise RuntimeError("vLLM returned tokens with one expert twice: its kernel does not tell what it chose")
    return torch.from_numpy(chosen if chosen.dtype == np.uint8 else chosen.astype(np.int16))


class RoutingRecorder:
    """Notes the choices of a vLLM engine of this process on a CPU, and puts them into its outputs.

    A token's choice is kept by the slot of its keys and values in the cache, so that a request whose prompt is cached
    already finds what was chosen when it was computed.
    """

    def __init__(self, llm: Any, architecture: Architecture) -> None:
        assert architecture.experts is not None
        self._runner, scheduler = compat.vllm_runner(llm), compat.vllm_scheduler(llm)
        self._shape = (architecture.layers, architecture.experts.per_token)
        self._dtype = routing_dtype(architecture.experts.count)
        self._now: dict[int, torch.Tensor] = {}  # by layer: the choices of the rows of this forward
        self._of_slot = torch.zeros(compat.vllm_cache_slots(llm), *self._shape, dtype=self._dtype)
        self._of_request: dict[str, torch.Tensor] = {}
        for layer, router in compat.vllm_routers(llm).items():
            router.set_capture_fn(partial(self._now.__setitem__, layer))
        self._execute, self._update = self._runner.execute_model, scheduler.update_from_output
        self._runner.execute_model = self._execute_and_note
        scheduler.update_from_output = self._update_and_tell

    def _execute_and_note(self, plan: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._execute(plan, *args, **kwargs)
        row = 0
        for number, request in enumerate(self._runner.input_batch.req_ids if plan.total_num_scheduled_tokens else ()):
            rows = plan.num_scheduled_tokens[request]
            self._note(request, number, slice(row, row + rows))
            row += rows
        return result

    def _note(self, request: str, number: int, rows: slice) -> None:
        """Keep the choices of a request's rows in this forward; at its first, also those of its cached tokens."""
        batch = self._runner.input_batch
        first = int(batch.num_computed_tokens_cpu[number])
        last = first + rows.stop - rows.start
        slots = self._slots(batch.block_table[0], number, last)
        for layer, chosen in self._now.items():
            self._of_slot[slots[first:], layer] = chosen[rows].to(self._dtype)
        if request not in self._of_request:
            self._of_request[request] = torch.zeros(self._runner.max_model_len, *self._shape, dtype=self._dtype)
            self._of_request[request][:first] = self._of_slot[slots[:first]]
        self._of_request[request][first:last] = self._of_slot[slots[first:]]

    @staticmethod
    def _slots(table: Any, number: int, tokens: int) -> torch.Tensor:
        """Where the first tokens of a request lie in the cache: int64 [tokens]."""
        places = torch.arange(tokens)
        blocks = torch.from_numpy(table.block_table.np[number]).long()
        return blocks[places // table.block_size] * table.block_size + places % table.block_size

    def _update_and_tell(self, *args: Any, **kwargs: Any) -> Any:
        found = self._update(*args, **kwargs)
        for outputs in found.values():
            for output in outputs.outputs:
                if output.finish_reason is not None:
                    output.routed_experts = self._of_request.pop(output.request_id).numpy()
        return found
