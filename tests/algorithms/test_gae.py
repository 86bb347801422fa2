"""Generalised advantage estimation: every number of shared/algorithms.md, and what must not change it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.algorithms import Advantages, Scored, compute_advantages, estimate_advantages

NAN = math.nan


def estimate(
    rewards: list[float], values: list[float], mask: list[int], lengths: list[int], last: list[float], **settings: float
) -> list[float]:
    settings = {"gamma": 1.0, "lam": 1.0, **settings}
    inside = torch.tensor(mask, dtype=torch.bool)
    return estimate_advantages(
        torch.tensor(rewards), torch.tensor(values), inside, torch.tensor(lengths), torch.tensor(last), **settings
    ).tolist()


def close(expected: Sequence[float], tolerance: float = 1e-6) -> object:
    return pytest.approx(expected, abs=tolerance)


def test_tool_tokens_are_skipped():
    """cases.md B05: δ = .4 at the end, 0 + .6 − .5 = .1 at the start, and .1 + .95·.4 = .48."""
    assert estimate([0, 0, 0, 1], [0.5, 9, 9, 0.6], [1, 0, 0, 1], [4], [0], lam=0.95) == close([0.48, 0, 0, 0.4])


def test_what_tool_tokens_hold_is_never_read():  # cases.md B01
    found = estimate([0, NAN, 5, 1], [0.5, NAN, math.inf, 0.6], [1, 0, 0, 1], [4], [0], lam=0.95)
    assert found == close([0.48, 0, 0, 0.4])


@pytest.mark.parametrize("padding", [0, 2])
def test_padding_changes_nothing(padding: int):
    """cases.md B06: .7; .1 + .95·.7 = .765; .1 + .95·.765 = .82675."""
    rewards, values = [0, 0, 1] + [0] * padding, [0.1, 0.2, 0.3] + [5.0] * padding
    found = estimate(rewards, values, [1, 1, 1] + [0] * padding, [3 + padding], [0], lam=0.95)
    assert found == close([0.82675, 0.765, 0.7] + [0] * padding)


def scored(rewards: list[float], lengths: list[int], **fields: Any) -> Scored:
    """A step of samples that are all this rank's own."""
    tokens, count = sum(lengths), len(rewards)
    given = {"values": torch.zeros(tokens), "last_values": torch.zeros(count), "whiten": False, **fields}
    return Scored(
        torch.tensor(rewards), torch.zeros(count, dtype=torch.int64), torch.tensor(lengths), torch.arange(count),
        truncated=torch.tensor(given.pop("truncated", [False] * count)), **given,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("truncated", "bootstrap", "expected"),
    [(False, True, [-0.5, -0.6, -0.7]), (True, True, [0.3, 0.2, 0.1]), (True, False, [-0.5, -0.6, -0.7])],
)
def test_truncated_responses_are_bootstrapped_where_asked_for(truncated: bool, bootstrap: bool, expected: list[float]):
    """algorithms.md: V = [.5, .6, .7], .8 after the end, γ = λ = 1, no reward. Unread last values may be nan."""
    last = torch.tensor([0.8 if truncated and bootstrap else NAN])
    step = scored(
        [0.0], [3], values=torch.tensor([0.5, 0.6, 0.7]), last_values=last, truncated=[truncated],
        bootstrap_truncated=bootstrap,
    )  # fmt: skip
    assert compute_advantages("gae", step).values.tolist() == close(expected)


def test_the_score_sits_on_the_last_token():
    """cases.md B26: three tokens before padding, five without any; an empty response has no token to sit on."""
    assert scored([1.0, 1.0, NAN], [3, 5, 0]).token_rewards().tolist() == [0, 0, 1, 0, 0, 0, 0, 1]


def test_the_score_sits_on_the_last_token_that_the_policy_sampled():
    """cases.md B26: [t0, t1, eos, pad, pad]; a row that is all masked has none."""
    mask = torch.tensor([True, True, True, False, False, False])
    assert scored([1.0, 1.0], [5, 1], mask=mask).token_rewards().tolist() == [0, 0, 1, 0, 0, 0]


def test_penalties_sit_on_their_tokens():
    """Score 1, penalties .1, .2, .3: the sample's reward, as it is known everywhere, is .4."""
    step = scored([0.4], [3], penalties=torch.tensor([0.1, 0.2, 0.3]))
    assert step.token_rewards().tolist() == close([-0.1, -0.2, 0.7])
    assert compute_advantages("gae", step).values.tolist() == close([0.4, 0.5, 0.7])


def test_returns_are_advantages_plus_values_before_whitening():
    """γ = λ = 1: the return is the reward to go, 1 everywhere, and A = 1 − V = [.9, .8, .7] → whitened [1, 0, −1]."""
    values = torch.tensor([0.1, 0.2, 0.3])
    found = compute_advantages("gae", scored([1.0], [3], values=values, whiten=True))
    assert found.returns is not None
    assert found.returns.tolist() == close([1, 1, 1])
    assert found.values.tolist() == close([1, 0, -1], 1e-5)


def test_unscorable_and_empty_samples_are_left_out():
    """cases.md B17, B27: the peer has A = 1 − V, alone and beside them; whitening sees only the peer's tokens."""
    values = torch.tensor([0.5, NAN, 9.0, 0.25])
    step = scored([NAN, 1.0], [0, 1], values=torch.tensor([0.25]))
    assert compute_advantages("gae", step).values.tolist() == [0.75]
    step = scored([NAN, 1.0, NAN], [3, 1, 0], values=values)
    found = compute_advantages("gae", step)
    assert found.included.tolist() == [False, False, False, True]
    assert found.values.tolist() == [0, 0, 0, 0.75]
    assert found.returns is not None
    assert found.returns.tolist() == [0, 0, 0, 1]


def test_methods_without_a_critic_have_no_returns():
    assert compute_advantages("reinforce", scored([1.0], [2])).returns is None


def test_values_that_are_not_finite_end_the_run():
    with pytest.raises(FloatingPointError, match="the critic's values are not finite"):
        compute_advantages("gae", scored([1.0], [2], values=torch.tensor([0.0, NAN])))


def test_values_are_needed():
    with pytest.raises(ValueError, match="gae needs values"):
        compute_advantages("gae", scored([1.0], [2], values=None))


def random_step(samples: int, longest: int, seed: int = 0) -> dict[str, Tensor]:
    """Ragged rows with tool tokens, penalties, truncation, unscorable samples and nan where nothing may be read."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (samples,), generator=generator)
    tokens = int(lengths.sum())
    mask = torch.rand(tokens, generator=generator) < 0.8
    penalties = torch.where(mask, torch.rand(tokens, generator=generator) * 0.1, 0.0)
    rewards = torch.randn(samples, generator=generator)
    rewards = torch.where((torch.rand(samples, generator=generator) < 0.1) | (lengths == 0), NAN, rewards)
    row_ids = torch.repeat_interleave(torch.arange(samples), lengths)
    return {
        "rewards": rewards.index_add(0, row_ids, penalties, alpha=-1),
        "lengths": lengths,
        "mask": mask,
        "penalties": penalties,
        "values": torch.where(mask, torch.randn(tokens, generator=generator), NAN),
        "last_values": torch.randn(samples, generator=generator),
        "truncated": torch.rand(samples, generator=generator) < 0.3,
    }


PER_TOKEN = ("mask", "penalties", "values")


def rows_of(step: dict[str, Tensor], own: Sequence[int], **settings: Any) -> Scored:
    """The step as the rank that holds the samples `own` sees it."""
    starts = [0, *step["lengths"].cumsum(0).tolist()]
    index = torch.cat([torch.arange(starts[number], starts[number + 1]) for number in own] or [torch.arange(0)])
    own_rows = torch.tensor(list(own), dtype=torch.int64)
    groups = torch.zeros(len(step["rewards"]), dtype=torch.int64)
    return Scored(
        step["rewards"], groups, step["lengths"], own_rows, **{name: step[name][index] for name in PER_TOKEN},
        last_values=step["last_values"][own_rows], truncated=step["truncated"][own_rows],
        bootstrap_truncated=True, gamma=0.99, lam=0.95, **settings,
    )  # fmt: skip


def by_definition(step: dict[str, Tensor], number: int) -> list[float]:
    """One sample's advantages by the recursion of the paper over the tokens inside the mask, 0 at the others."""
    start = int(step["lengths"][:number].sum())
    kept = [start + place for place in range(int(step["lengths"][number])) if step["mask"][start + place]]
    score = float(step["rewards"][number]) + sum(float(step["penalties"][place]) for place in kept)
    following = float(step["last_values"][number]) if step["truncated"][number] else 0.0
    found, advantage = [0.0] * int(step["lengths"][number]), 0.0
    for place in reversed(kept):
        reward = (score if place == kept[-1] else 0.0) - float(step["penalties"][place])
        value = float(step["values"][place])
        advantage = reward + 0.99 * following - value + 0.99 * 0.95 * advantage
        found[place - start], following = advantage, value
    return [0.0] * len(found) if math.isnan(score) else found


def test_all_rows_at_once_are_each_row_by_definition():
    step = random_step(40, 30)
    found = compute_advantages("gae", rows_of(step, range(40), whiten=False))
    assert found.values.tolist() == close([value for row in range(40) for value in by_definition(step, row)], 1e-5)


def test_the_order_of_samples_changes_nothing():
    step = random_step(20, 12)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1)).tolist()
    straight, shuffled = (compute_advantages("gae", rows_of(step, own)) for own in (range(20), order))
    rows = straight.values.split(step["lengths"].tolist())
    assert shuffled.values.tolist() == close(torch.cat([rows[number] for number in order]).tolist())


@pytest.mark.parametrize("width", [30, 50])
def test_padding_every_row_changes_nothing(width: int):
    """cases.md B06 on random rows: what is inside the rows stays, what is behind them is 0."""
    step = random_step(20, 30)
    plain = compute_advantages("gae", rows_of(step, range(20)))
    inside = torch.arange(width) < step["lengths"][:, None]

    def pad(flat: Tensor, fill: float) -> Tensor:
        return torch.full((20, width), fill, dtype=flat.dtype).masked_scatter(inside, flat).flatten()

    fills = {"mask": False, "penalties": 0.0, "values": NAN}
    padded = step | {name: pad(step[name], fill) for name, fill in fills.items()}
    found = compute_advantages("gae", rows_of(padded | {"lengths": torch.full((20,), width)}, range(20)))
    assert found.values.view(20, width)[inside].tolist() == close(plain.values.tolist())
    assert not found.values.view(20, width)[~inside].any()


def on_ranks(shares: list[list[int]]) -> Advantages:
    def reduce(values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    return compute_advantages("gae", rows_of(random_step(16, 12), shares[dist.get_rank()], reduce=reduce))


@pytest.mark.parametrize("shares", [[[0, 3, 5, 15], [*range(6, 15), 1, 2, 4]], [[*range(16)], []]])
def test_how_samples_are_spread_over_ranks_changes_nothing(world: Callable[..., Any], shares: list[list[int]]):
    """cases.md B04: whitening is over all ranks, one of which may hold nothing."""
    step = random_step(16, 12)
    alone = compute_advantages("gae", rows_of(step, range(16)))
    rows, returns = (flat.split(step["lengths"].tolist()) for flat in (alone.values, alone.returns))
    for own, found in zip(shares, world(2, on_ranks, shares), strict=True):
        assert found.values.tolist() == close([value for number in own for value in rows[number].tolist()], 1e-5)
        assert found.returns.tolist() == close([value for number in own for value in returns[number].tolist()])


def test_a_step_of_usual_size():
    """1,000 samples of up to 1,024 tokens; γ = λ = 1 without values gives each token its sample's reward."""
    step = random_step(1000, 1024)
    rewards = torch.nan_to_num(step["rewards"])
    own = torch.arange(1000)
    zeros = torch.zeros(int(step["lengths"].sum()))
    found = compute_advantages("gae", Scored(
        rewards, own, step["lengths"], own, values=zeros, last_values=rewards, whiten=False,
        truncated=torch.zeros(1000, dtype=torch.bool),
    ))  # fmt: skip
    assert torch.allclose(found.values, torch.repeat_interleave(rewards, step["lengths"]))
