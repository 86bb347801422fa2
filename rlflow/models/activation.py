"""The gated activation of the local layer spec's MLP, with as few passes over its input as possible.

On CUDA devices SwiGLU is computed by the kernels of `activation_kernel`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CACHED_ELEMENTS = 2**18
"""On a CPU the backward pass takes this much of its input at a time, so that its steps find it in the cache."""


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: Tensor) -> Tensor:
        ctx.save_for_backward(joined)
        gate, up = joined.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (joined,), (grad,) = ctx.saved_tensors, grads
        out = torch.empty_like(joined)
        rows = max(1, CACHED_ELEMENTS // joined.shape[1:].numel() if joined.device.type == "cpu" else len(joined))
        for part in zip(joined.split(rows), grad.split(rows), out.split(rows), strict=True):
            _fill_gradient(*part)
        return out


class _SwiGLUOnGPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joined: Tensor) -> Tensor:
        from rlflow.models.activation_kernel import swiglu

        rows = joined.flatten(0, -2).contiguous()
        ctx.save_for_backward(rows)
        return swiglu(rows).unflatten(0, joined.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        from rlflow.models.activation_kernel import swiglu_backward

        (rows,), (grad,) = ctx.saved_tensors, grads
        return swiglu_backward(rows, grad.flatten(0, -2).contiguous()).unflatten(0, grad.shape[:-1])


def _fill_gradient(joined: Tensor, grad: Tensor, out: Tensor) -> None:
    (gate, up), (grad_gate, grad_up) = joined.chunk(2, -1), out.chunk(2, -1)
    torch.mul(F.silu(gate), grad, out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)


class GatedActivation(torch.nn.Module):
    """A function of [..., gate | up]; megatron builds it with a config and calls it on fc1's output."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing to save; megatron's MLP asks each of its modules."""
        return {}


class SwiGLU(GatedActivation):
    """silu(gate) · up."""

    def forward(self, joined: Tensor) -> Tensor:
        """[..., 2 · ffn] → [..., ffn]."""
        return _SwiGLUOnGPU.apply(joined) if joined.is_cuda else _SwiGLU.apply(joined)


class TanhGeGLU(GatedActivation):
    """gelu(gate) · up, with the tanh approximation of gelu."""

    def forward(self, joined: Tensor) -> Tensor:
        """[..., 2 · ffn] → [..., ffn]."""
        gate, up = joined.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up
