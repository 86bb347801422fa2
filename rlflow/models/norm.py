"""RMSNorm for the local layer spec; unlike megatron-core's torch norm it may be used under sequence parallelism.

On CUDA devices the kernels of `norm_kernel` compute it.

Some families have norms behind attention and feed-forward part too, for which megatron-core has no place: they belong
to the projection that ends the part.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_bridge.compat import layers_take_residual, mlp_submodules


class _RMSNormOnCPU(torch.autograd.Function):
    """torch has no fused kernel for CPUs; its composite one makes about twice the passes over memory."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = states.float()
        mean_square = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_().div_(states.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(states, weight, scale)
        return (exact * scale).mul_(weight).to(states.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        states, weight, scale = ctx.saved_tensors
        grad, weight_exact = grads[0].float(), weight.float()
        normed = states.float() * scale
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0)
        projection = torch.matmul(product, weight_exact).unsqueeze_(-1).div_(states.shape[-1])
        grad_states = (grad * weight_exact).addcmul_(normed, projection, value=-1).mul_(scale)
        return grad_states.to(states.dtype), grad_weight.to(weight.dtype), None


class _RMSNormOnGPU(torch.autograd.Function):
    """x / rms(x) · (center + weight), and x as a second result, whose gradient is added to that of the norm."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, eps: float, center: float) -> tuple[Tensor, Tensor]:
        from rlflow.models.norm_kernel import normalize

        rows = states.flatten(0, -2).contiguous()
        normed, scales = normalize(rows, weight, eps, center)
        ctx.save_for_backward(rows, weight, scales)
        ctx.center = center
        ctx.set_materialize_grads(False)
        return normed.view(states.shape), states

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        from rlflow.models.norm_kernel import normalize_backward

        rows, weight, scales = ctx.saved_tensors
        grad, passed = grads
        if grad is None:  # nobody asked for the norm's own result
            return passed, None, None, None
        found, grad_weight = normalize_backward(
            grad.flatten(0, -2).contiguous(), rows, weight, scales, ctx.center,
            None if passed is None else passed.flatten(0, -2).contiguous(),
        )  # fmt: skip
        return found.view(grad.shape), grad_weight, None, None


class RMSNorm(torch.nn.RMSNorm):
    """x / rms(x) · weight over the last dimension, computed in float32.

    Where it `hands_on`, a CUDA device gives the input as a second result, for the caller to use in its place.
    """

    center = 0.0
    hands_on = False

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        # Under sequence parallelism each rank sees a part of the rows: megatron then sums this gradient over the group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, states: Tensor) -> Any:
        if not states.is_cuda:
            return self.by_torch(states)
        both = _RMSNormOnGPU.apply(states, self.weight, self.eps, self.center)
        return both if self.hands_on else both[0]

    def by_torch(self, states: Tensor) -> Tensor:
        """The same without kernels of ours."""
        if states.device.type == "cpu":
            return _RMSNormOnCPU.apply(states, self.weight, self.eps)
        return super().forward(states)


class ZeroCenteredRMSNorm(RMSNorm):
    """x / rms(x) · (1 + weight), computed in float32."""

    center = 1.0

    def by_torch(self, states: Tensor) -> Tensor:
        weight = self.weight.float() + 1
        if states.device.type == "cpu":
            return _RMSNormOnCPU.apply(states, weight, self.eps)
        return torch.nn.functional.rms_norm(states.float(), self.normalized_shape, weight, self.eps).to(states.dtype)


@functools.cache
def leading(norm: type[RMSNorm]) -> type[RMSNorm]:
    """A norm in the place where a part of a layer begins, whose input goes around that part too.

    The gradients of both ways are then added where the norm's is computed, without a pass of their own.
    """
    return type(norm.__name__, (norm,), {"hands_on": layers_take_residual()})


class NormedProjection(RowParallelLinear):
    """The projection that ends a part of a layer, with a norm behind it, both named as in Megatron-Bridge."""

    norm: type[RMSNorm] = RMSNorm

    def __init__(self, input_size: int, output_size: int, *, config: Any, **how: Any) -> None:
        super().__init__(input_size, output_size, config=config, **how)
        self.post_layernorm = self.norm(config, output_size, config.layernorm_epsilon)

    def forward(self, states: Tensor) -> tuple[Tensor, None]:
        """[T, 1, heads · d or ffn, a part of them] → [T, 1, H], or this rank's rows under sequence parallelism."""
        projected, _ = super().forward(states)
        return self.post_layernorm(projected), None


class ZeroCenteredProjection(NormedProjection):
    """The same with a zero-centered norm."""

    norm = ZeroCenteredRMSNorm


def put_norms_behind(layer: ModuleSpec, projection: type[NormedProjection]) -> None:
    """Let both parts of a dense layer of the local spec end in such a projection."""
    layer.submodules.self_attention.submodules.linear_proj = projection
    for mlp in mlp_submodules(layer.submodules.mlp):
        mlp.linear_fc2 = projection
