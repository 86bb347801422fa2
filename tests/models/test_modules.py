"""Norm and activation equal torch's, forward and backward."""

from types import SimpleNamespace

import pytest
import torch

from rlflow.models.activation import SwiGLU
from rlflow.models.norm import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm(dtype: torch.dtype) -> None:
    from rlflow import parallel  # the norm is built on megatron's device

    assert parallel.device().type == "cpu"
    norm = RMSNorm(SimpleNamespace(params_dtype=dtype, sequence_parallel=False), 32, eps=1e-5)
    torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    states = torch.randn(5, 1, 32, dtype=dtype, requires_grad=True)
    upstream = torch.randn(5, 1, 32, dtype=dtype)
    inputs = (states, norm.weight)
    found, expected = norm(states), torch.nn.functional.rms_norm(states, (32,), norm.weight, 1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert torch.allclose(found, expected, atol=tolerance)
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=tolerance, rtol=tolerance)


def test_activation() -> None:
    joined = torch.randn(5, 1, 16, dtype=torch.float64, requires_grad=True)
    gate, up = joined.chunk(2, -1)
    assert torch.allclose(SwiGLU()(joined), torch.nn.functional.silu(gate) * up)
    assert torch.autograd.gradcheck(SwiGLU(), (joined,))
