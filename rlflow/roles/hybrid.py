"""megatron-core's AdamW over GPU and host (`HybridDeviceOptimizer`): what it leaves undone for checkpoints.

The host keeps float32 weights and moments of a share of the parameters and updates them from gradients that it fetches.
Which share, and that it is used at all, `training` says.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor


def is_hybrid(optimizer: Any) -> bool:
    """Whether the host has a part in an optimizer that megatron's distributed one holds."""
    return isinstance(optimizer, HybridDeviceOptimizer)


def make_state(optimizer: Any) -> None:
    """Let it have moments, zeros, if there was no step yet: by a step without gradients that moves nothing."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    finish_loading(optimizer, 0)


def finish_loading(optimizer: Any, updates: int) -> None:
    """Put the moments where their weights are, and count `updates` steps in each way that its parts count.

    torch's AdamW counts by parameter, Transformer Engine's by group. A count among the whole's settings would be handed
    to the parts anew at every step.
    """
    for group in optimizer.param_groups:
        group.pop("step", None)
    for part in optimizer.sub_optimizers:
        for parameter, state in part.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and name != "master_param":
                    state[name] = value.to(parameter.device)
            if isinstance(part, torch.optim.Adam):
                state["step"] = torch.tensor(float(updates), device=parameter.device)
        if not isinstance(part, torch.optim.Adam):
            for group in part.param_groups:
                group["step"] = updates
