"""Norm and activation equal torch's, forward and backward."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rlflow.models.activation import SwiGLU, TanhGeGLU
from rlflow.models.norm import RMSNorm, ZeroCenteredRMSNorm
from tests.models.test_rope import YARN, architecture


@pytest.mark.parametrize(("kind", "center"), [(RMSNorm, 0.0), (ZeroCenteredRMSNorm, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norm(dtype: torch.dtype, kind: type[RMSNorm], center: float) -> None:
    from rlflow import parallel  # the norm is built on megatron's device

    assert parallel.device().type == "cpu"
    norm = kind(SimpleNamespace(params_dtype=dtype, sequence_parallel=False), 32, eps=1e-5)
    torch.nn.init.normal_(norm.weight, 1.0 - center, 0.3)
    states = torch.randn(5, 1, 32, dtype=dtype, requires_grad=True)
    upstream = torch.randn(5, 1, 32, dtype=dtype)
    inputs = (states, norm.weight)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    found, expected = norm(states), F.rms_norm(exact[0], (32,), exact[1] + center, 1e-5)
    mine = (found, *torch.autograd.grad(found, inputs, upstream))
    theirs = (expected, *torch.autograd.grad(expected, exact, upstream.double()))
    for one, other in zip(mine, theirs, strict=True):
        assert (one - other).norm() <= (1e-6 if dtype == torch.float32 else 4e-3) * other.norm()


@pytest.mark.parametrize(
    ("activation", "function"), [(SwiGLU(), F.silu), (TanhGeGLU(), partial(F.gelu, approximate="tanh"))]
)
def test_activation(activation: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    joined = torch.randn(5, 1, 16, dtype=torch.float64, requires_grad=True)
    gate, up = joined.chunk(2, -1)
    assert torch.allclose(activation(joined), function(gate) * up)
    assert torch.autograd.gradcheck(activation, (joined,))


@pytest.mark.parametrize(
    ("overrides", "fits"),
    [
        ({}, True),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, True),
        ({"rope_scaling": YARN}, True),  # whatever the rotation, which is ours
        ({"model_type": "gemma3_text", "head_dim": 32}, False),
        ({"model_type": "glm4", "head_dim": 32}, False),
        ({"model_type": "glm", "head_dim": 32}, True),  # half of a head is rotated
    ],
)
def test_what_transformer_engine_computes(overrides: dict[str, Any], fits: bool) -> None:
    from rlflow.models import fits_transformer_engine

    assert fits_transformer_engine(architecture(**overrides)) == fits
