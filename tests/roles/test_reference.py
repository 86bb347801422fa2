"""The reference follows the actor: on its own grid without moving a byte, on another through the bridge."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.roles.runs import Case, canonical, make_engine
from tests.workers import World

TP2 = {"ranks": [0, 1], "tensor": 2}
GRIDS = [  # ranks of the job, the actor's grid, the reference's
    pytest.param(2, TP2, TP2, id="one grid"),
    pytest.param(2, TP2, {"ranks": [0, 1]}, id="TP2 to DP2"),
    pytest.param(3, {"ranks": [1, 2], "pipeline": 2}, {"ranks": [0]}, id="disjoint ranks"),
    pytest.param(4, {"ranks": [0, 2]}, {"ranks": [1, 2], "tensor": 2}, id="overlapping ranks"),
]


@pytest.mark.parametrize(("ranks", "actor", "reference"), GRIDS)
@pytest.mark.parametrize(("ema", "share"), [(None, 0.5), (0.75, 0.875)])
def test_it_is_the_actor_or_an_average(
    world: World, tiny_model: Any, ranks: int, actor: Any, reference: Any, ema: float | None, share: float
) -> None:
    """All weights of the actor are half those of the reference: .75 · 1 + .25 · .5 = .875."""
    before, *updated = world(ranks, _update, tiny_model("qwen2"), actor, reference, ema)[0]
    for after in updated:
        for name, weight in after.items():
            assert torch.allclose(weight, share * before[name], rtol=1e-6, atol=0), name
        share = share if ema is None else 0.75 * share + 0.125


def _update(folder: Path, actor: Any, reference: Any, ema: float | None) -> list[dict[str, Tensor]]:
    """The reference before and after the first and second update, on rank 0."""
    from rlflow.roles.reference import update

    follower = make_engine(folder, Case("", 0, reference))
    leader = make_engine(folder, Case("", 0, actor))
    with torch.no_grad():
        for weight in leader.parameters_by_name().values():
            weight.mul_(0.5)
    found = [canonical(follower)]
    for _ in range(2):
        update(follower, leader, ema)
        found.append(canonical(follower))
    return found


def test_bfloat16_is_averaged_in_float32(world: World, tiny_model: Any) -> None:
    """.7 · 1 + .3 · (1 + 2 · 2⁻⁷) is 1 + .6 · 2⁻⁷, nearest to 1 + 2⁻⁷; of products rounded to bfloat16 the sum is 1."""
    world(1, _average_in_bfloat16, tiny_model("qwen2"))


def _average_in_bfloat16(folder: Path) -> None:
    from rlflow.roles.reference import update

    follower, leader = (make_engine(folder, Case("", 1, {}, {"dtype": torch.bfloat16})) for _ in range(2))
    name, weight = next(iter(follower.parameters_by_name().items()))
    weight.fill_(1.0)
    leader.parameters_by_name()[name].fill_(1.0 + 2 * 2**-7)
    update(follower, leader, 0.7)
    assert torch.all(weight == 1.0 + 2**-7)
