"""Gradients of the weights of megatron-core's linear layers, added to float32 buffers by the products that make them.

megatron-core can do this with an extension of apex, which few have. Here torch's products take the extension's place;
Transformer Engine's layers have their own.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from rlflow.models.products import add_product
from rlflow.parallel import device


def add_weight_gradients(dtype: torch.dtype) -> bool:
    """Let linear layers of a dtype add to their gradients' buffers, where it pays; whether they may then be asked to.

    megatron-core looks for the extension in a place of its own, which is changed for the process. Otherwise each
    gradient is rounded to bfloat16 first, and added in a pass of its own.
    """
    if device().type != "cuda" or dtype != torch.bfloat16:
        return False
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=_add_gradient)
        layers._grad_accum_fusion_available = True
    return True


def _add_gradient(states: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """main_grad [out, in] += gradᵀ · states, of [T, out] and [T, in]."""
    add_product(main_grad, grad.t(), states)
