"""A layer's kernels on a GPU: against float64, through autograd, and replayed from a CUDA graph."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.devices import needs_gpus

pytestmark = needs_gpus(1)

CONFIG = SimpleNamespace(params_dtype=torch.bfloat16, sequence_parallel=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_against_float64(dtype: torch.dtype) -> None:
    from tests.models.kernel_checks import check_all

    torch.manual_seed(0)
    check_all(dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("groups", "queries", "channels"), [(2, 7, 64), (2, 6, 128), (4, 7, 128)])
def test_real_heads_against_float64(groups: int, queries: int, channels: int, dtype: torch.dtype) -> None:
    from rlflow.models.rope import Heads
    from tests.models.kernel_checks import check_norm, check_normed_rotation, check_rotation, check_swiglu

    torch.manual_seed(0)
    hidden = groups * queries * channels
    heads = Heads(groups, queries, channels)
    check_rotation(1021, heads, channels, False, True, dtype, "cuda")
    check_normed_rotation(1021, heads, channels, False, 0.0, dtype, "cuda")
    check_norm(1021, hidden, 0.0, True, dtype, "cuda")
    check_swiglu(257, 5 * hidden + 8, dtype, "cuda")


def _modules() -> dict[str, tuple[Callable[..., Any], Callable[..., Any], list[Tensor]]]:
    """Operations with kernels of ours, the same in plain torch, and inputs."""
    from rlflow.models.activation import SwiGLU, _SwiGLU
    from rlflow.models.norm import RMSNorm, ZeroCenteredRMSNorm, leading
    from rlflow.models.rope import _Rotate, rotate
    from tests.models.kernel_checks import random_table

    torch.manual_seed(0)
    plain, centered, first = (kind(CONFIG, 96) for kind in (RMSNorm, ZeroCenteredRMSNorm, leading(RMSNorm)))
    table = random_table(50, 16, False, torch.bfloat16, "cuda")
    states = torch.randn(50, 1, 96, device="cuda").bfloat16().requires_grad_()
    spread = torch.randn(50, 6, 32, device="cuda").bfloat16().requires_grad_()

    def led(states: Tensor) -> Tensor:
        out = first(states)
        normed, around = out if isinstance(out, tuple) else (out, states)
        return normed * 2 + around

    return {
        "norm": (plain, plain.by_torch, [states, plain.weight]),
        "centered norm": (centered, centered.by_torch, [states, centered.weight]),
        "leading norm": (led, lambda states: first.by_torch(states) * 2 + states, [states, first.weight]),
        "SwiGLU": (SwiGLU(), _SwiGLU.apply, [states]),
        "rotation of a view": (
            lambda wide: rotate(wide[:, ::2, :16], table),
            lambda wide: _Rotate.apply(wide[:, ::2, :16], *table),
            [spread],
        ),
    }


@pytest.mark.parametrize("name", ["norm", "centered norm", "leading norm", "SwiGLU", "rotation of a view"])
def test_modules_and_their_gradients_are_those_of_torch(name: str) -> None:
    ours, torchs, inputs = _modules()[name]
    states = inputs[0]
    found, expected = ours(states), torchs(states)
    upstream = torch.randn_like(expected)
    assert torch.allclose(found, expected, atol=2e-2, rtol=2e-2)
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=3e-2 * float(theirs.abs().max()))


def test_a_graph_replays_both_passes() -> None:
    ours, _, inputs = _modules()["leading norm"]
    states, upstream = inputs[0], torch.randn_like(inputs[0])
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def compute() -> tuple[Tensor, ...]:
        out = ours(states)
        return out, *torch.autograd.grad(out, inputs, upstream)

    with torch.cuda.stream(stream):
        compute()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        captured = compute()
    with torch.no_grad():
        states.copy_(torch.randn_like(states))
    graph.replay()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(captured, compute(), strict=True))


def test_products_add_to_gradients_without_a_rounding() -> None:
    """Thousand small terms, which bfloat16 would round away beside the sum that is there."""
    from megatron.core.tensor_parallel import layers

    from rlflow.models.weight_gradient import add_weight_gradients

    assert add_weight_gradients(torch.bfloat16)
    assert not add_weight_gradients(torch.float32)
    states = torch.full((1000, 64), 2.0**-10, device="cuda", dtype=torch.bfloat16)
    grad = torch.ones(1000, 32, device="cuda", dtype=torch.bfloat16)
    total = torch.full((32, 64), 1024.0, device="cuda")
    for _ in range(3):
        layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(states, grad, total)
    assert torch.allclose(total, torch.full_like(total, 1024 + 3 * 1000 / 1024), rtol=1e-6)
