"""The gated activation of the local layer spec's MLP, with as few passes over its input as possible."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: Tensor) -> Tensor:
        ctx.save_for_backward(joined)
        gate, up = joined.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (joined,), (grad,) = ctx.saved_tensors, grads
        gate, up = joined.chunk(2, -1)
        out = torch.empty_like(joined)
        grad_gate, grad_up = out.chunk(2, -1)
        torch.mul(F.silu(gate), grad, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return out


class SwiGLU(torch.nn.Module):
    """silu(gate) · up of [..., gate | up]; megatron builds it with a config and calls it on fc1's output."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def forward(self, joined: Tensor) -> Tensor:
        """[..., 2 · ffn] → [..., ffn]."""
        return _SwiGLU.apply(joined)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing to save; megatron's MLP asks each of its modules."""
        return {}
