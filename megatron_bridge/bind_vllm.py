"""From the names of vLLM's layout to the live parameters of a running engine.

Names, shapes and storage are checked once, here, so that whoever writes may trust them. Which bytes to write is left to
plans, whether writing in place is right for a model to `proof`.
"""

from typing import Any

import torch

from megatron_bridge import compat
from megatron_bridge.errors import UserError
from megatron_bridge.layouts.layout import Layout


def bind(llm: Any, layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    """The engine's parameters of `rank`, by layout name, to be written in place.

    Args:
        llm: vLLM's `LLM` of this process.
        layout: what vLLM is expected to hold.
        rank: this process's rank in the layout.

    Raises:
        UserError: the engine lacks a parameter, has one that no canonical tensor fills, another shape, or has packed it.
    """
    live = {name: parameter.detach() for name, parameter in compat.vllm_model(llm).named_parameters()}
    wanted = layout.parameters(rank)
    faults = [f"{name} is missing" for name in wanted if name not in live]
    faults += [f"nothing fills {name} {tuple(live[name].shape)}" for name in live if name not in wanted]
    for name in wanted.keys() & live.keys():
        shape, stride = tuple(live[name].shape), live[name].stride()
        if shape != wanted[name].shape:
            faults.append(f"{name} is {shape}, the layout has {wanted[name].shape}")
        elif not live[name].is_contiguous():
            faults.append(f"{name} is not contiguous (strides {stride})")
    if faults:
        raise UserError("vLLM's parameters", "; ".join(sorted(faults)))
    return {name: live[name] for name in wanted}
