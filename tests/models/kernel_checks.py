"""What the kernels of norms, SwiGLU and rotations must compute, on whatever device runs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlflow.models import activation_kernel, norm_kernel, rope_kernel, sums_kernel
from rlflow.models.rope import Heads, RotationTable

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
"""Largest ‖found − exact‖ / ‖exact‖: bfloat16 rounds to 2⁻⁹, and a gradient of two terms twice."""

ROTATIONS = [  # rows, heads, turned channels, neighbours turned, with a bias
    (70, Heads(2, 3, 16), 16, False, True),
    (5, Heads(1, 4, 12), 12, False, False),
    (33, Heads(2, 2, 16), 8, True, True),
    (9, Heads(3, 1, 24), 12, False, True),
    (40, Heads(1, 5, 16, has_keys=False), 16, False, False),
    (1, Heads(1, 1, 8, has_keys=False), 8, True, False),
]


def assert_close(found: Tensor, exact: Tensor) -> None:
    assert found.shape == exact.shape
    error, size = (found.double() - exact).norm(), exact.norm()
    assert error <= BOUNDS[found.dtype] * size, (found.dtype, found.shape, float(error), float(size))


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(outputs, inputs, [each.double() for each in upstream])


def exact(*tensors: Tensor) -> list[Tensor]:
    return [each.double().requires_grad_() for each in tensors]


def check_norm(rows: int, columns: int, center: float, passes: bool, dtype: torch.dtype, device: str) -> None:
    states, grad, passed = (torch.randn(rows, columns, device=device).to(dtype) for _ in range(3))
    weight = (0.2 * torch.randn(columns, device=device) + 1 - center).to(dtype)
    x, w = exact(states, weight)
    right = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * (center + w)
    grad_x, grad_w = gradients([right], [x, w], [grad])
    found, scales = norm_kernel.normalize(states, weight, 1e-5, center)
    grads = norm_kernel.normalize_backward(grad, states, weight, scales, center, passed if passes else None)
    assert_close(found, right)
    assert_close(grads[0], grad_x + passed.double() if passes else grad_x)
    assert_close(grads[1], grad_w)


def check_swiglu(rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    joined, grad = (torch.randn(rows, width, device=device).to(dtype) for width in (2 * columns, columns))
    (x,) = exact(joined)
    right = F.silu(x[:, :columns]) * x[:, columns:]
    assert_close(activation_kernel.swiglu(joined), right)
    assert_close(activation_kernel.swiglu_backward(joined, grad), *gradients([right], [x], [grad]))


def check_rotation(
    rows: int, heads: Heads, turned: int, interleaved: bool, biased: bool, dtype: torch.dtype, device: str
) -> None:
    """Heads are read out of wider rows, as a view of a projection has them."""
    table = random_table(rows, turned, interleaved, dtype, device)
    joined = torch.randn(rows, heads.total + 1, heads.channels, device=device).to(dtype)[:, 1:]
    bias = torch.randn(heads.total * heads.channels, device=device).to(dtype)
    x, b = exact(joined, bias)
    right = split_and_turned(x + b.view(heads.total, -1) if biased else x, heads, table)
    upstream = [torch.randn(each.shape, device=device).to(dtype) for each in right]
    grad_x, *grad_b = gradients(right, [x, b] if biased else [x], upstream)
    given = bias if biased else None
    for found, part in zip(rope_kernel.split_and_turn(joined, given, heads, table), right, strict=True):
        assert_close(found, part)
    query, key, value = upstream
    found, found_bias = rope_kernel.split_and_turn_backward((query, key, value), given, heads, table)
    assert_close(found, grad_x)
    for mine, theirs in zip([found_bias] if found_bias is not None else [], grad_b, strict=True):
        assert_close(mine, theirs)


def random_table(rows: int, turned: int, interleaved: bool, dtype: torch.dtype, device: str) -> RotationTable:
    angles = torch.randn(rows, 1, turned // 2, device=device)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    if interleaved:
        return RotationTable(cosines.repeat_interleave(2, -1), torch.stack([-sines, sines], -1).flatten(-2), True)
    return RotationTable(torch.cat([cosines, cosines], -1), torch.cat([-sines, sines], -1))


def split_and_turned(states: Tensor, heads: Heads, table: RotationTable) -> list[Tensor]:
    """Written out in plain torch."""
    if not heads.has_keys:
        return [turned_by_torch(states, table), states[:, :0], states[:, :0]]
    grouped = states.unflatten(1, (heads.groups, -1))
    query = grouped[:, :, : heads.queries].flatten(1, 2)
    return [turned_by_torch(query, table), turned_by_torch(grouped[:, :, -2], table), grouped[:, :, -1]]


def turned_by_torch(states: Tensor, table: RotationTable) -> Tensor:
    channels = table.cosines.shape[-1]
    here, rest = states[..., :channels], states[..., channels:]
    neighbours, opposite = here.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), here.roll(channels // 2, -1)
    partners = neighbours if table.interleaved else opposite
    return torch.cat([here * table.cosines.double() + partners * table.sines.double(), rest], -1)


def check_all(dtype: torch.dtype, device: str) -> None:
    """Sizes that fill no block, one row, and none."""
    for rows, columns in ((5, 48), (37, 100), (1, 16), (300, 64), (0, 32)):
        for center, passes in ((0.0, False), (0.0, True), (1.0, False), (1.0, True)):
            check_norm(rows, columns, center, passes, dtype, device)
    for rows, columns in ((3, 48), (7, 1030), (0, 8)):
        check_swiglu(rows, columns, dtype, device)
    for case in ROTATIONS:
        check_rotation(*case, dtype, device)
    for count in (0, 1, 129, 700):
        parts = torch.randn(count, 50, device=device)
        assert_close(sums_kernel.add_up(parts, dtype), parts.double().sum(0))
