"""What the kernels of norms, SwiGLU and rotations must compute, on whatever device runs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlflow.models import activation_kernel, norm_kernel, rope_kernel, sums_kernel
from rlflow.models.rope import HeadNorms, Heads, RotationTable, split_and_rotate

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

NORMED_ROTATIONS = [  # rows, heads, turned channels, neighbours turned, center of the norms
    (70, Heads(2, 3, 16), 16, False, 0.0),
    (33, Heads(1, 2, 12), 8, True, 1.0),
    (9, Heads(3, 1, 24), 12, False, 1.0),
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
    upstream = draw_like(right, dtype)
    grad_x, *grad_b = gradients(right, [x, b] if biased else [x], upstream)
    split = rope_kernel.Split(heads, table, bias if biased else None)
    assert_all_close(rope_kernel.split_and_turn(joined, split), right)
    found, learned = rope_kernel.split_and_turn_backward(upstream, None, split)
    assert_close(found, grad_x)
    assert (learned is not None) == biased
    if learned is not None:
        assert_close(learned.flatten(), grad_b[0])


def check_normed_rotation(
    rows: int, heads: Heads, turned: int, interleaved: bool, center: float, dtype: torch.dtype, device: str
) -> None:
    """With norms of queries and keys; through autograd, which hands their weights' gradients out."""
    table = random_table(rows, turned, interleaved, dtype, device)
    joined = torch.randn(rows, heads.total * heads.channels, device=device).to(dtype)
    weights = [(0.2 * torch.randn(heads.channels, device=device) + 1 - center).to(dtype) for _ in range(2)]
    x, *w = exact(joined, *weights)
    grouped = x.unflatten(-1, (heads.groups, heads.in_group, heads.channels))
    queries, keys, values = grouped.split([heads.queries, 1, 1], 2)
    normed = [
        part * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-5) * (center + weight)
        for part, weight in zip((queries, keys), w, strict=True)
    ]
    right = split_and_turned(torch.cat([*normed, values], 2).flatten(1, 2), heads, table)
    leaves = [each.requires_grad_() for each in (joined, *weights)]
    found = split_and_rotate(leaves[0], heads, table, norms=HeadNorms(leaves[1], leaves[2], 1e-5, center))
    assert_all_close(found, right)
    upstream = draw_like(right, dtype)
    assert_all_close(torch.autograd.grad(found, leaves, upstream), gradients(right, [x, *w], upstream))


def assert_all_close(found: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    for mine, theirs in zip(found, exact, strict=True):
        assert_close(mine, theirs)


def draw_like(results: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(each.shape, device=each.device).to(dtype) for each in results)
    return query, key, value


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
    for rows, heads, turned, interleaved, center in NORMED_ROTATIONS:
        check_normed_rotation(rows, heads, turned, interleaved, center, dtype, device)
    for count in (0, 1, 129, 700):
        parts = torch.randn(count, 50, device=device)
        assert_close(sums_kernel.add_up(parts, dtype), parts.double().sum(0))
