"""Proof, at start, that writing an engine's parameters in place equals what the engine's own loader does.

Some engines keep shapes and still reorder or derive weights. So known values go once through the bridge and once through the
loader, and every parameter, buffer and derived tensor must come out bit-equal. What to do where they do not is left to the
caller.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_bridge import compat
from megatron_bridge.execute import Transfer
from megatron_bridge.layouts import HFLayout, Layout
from megatron_bridge.plan import make_plan

CHUNK = 1 << 22  # elements that are mixed at a time: bounds the memory that making and reading values takes
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def startup_proof(llm: Any, layout: Layout, tensors: dict[str, torch.Tensor], rank: int) -> list[str]:
    """Names of the engine's tensors that the bridge leaves different from the loader; empty if it may write in place.

    Args:
        llm: vLLM's `LLM` of this process; its weights are overwritten.
        layout: what vLLM holds.
        tensors: its live parameters by layout name (`bind_vllm.bind`).
        rank: this process's rank in the layout.
    """
    some = next(iter(tensors.values()))
    values = KnownValues(HFLayout(layout.arch, (rank,)), rank, some.dtype, some.device)
    model = compat.vllm_model(llm)
    plan = make_plan(values.layout, layout_of_one(layout, rank), itemsize=some.element_size())
    Transfer(plan, values, tensors, rank).run()
    bridged = digests(model)
    for tensor in tensors.values():
        tensor.zero_()  # a loader that took nothing must not pass
    compat.vllm_load(llm, values.items())
    loaded = digests(model)
    return sorted(name for name in bridged.keys() | loaded.keys() if bridged.get(name) != loaded.get(name))
