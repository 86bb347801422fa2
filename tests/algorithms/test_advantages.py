"""Advantages: every number of shared/algorithms.md that needs no critic."""

import math

import pytest
import torch

from rlflow.algorithms import Advantages, Scored, advantage, compute_advantages, group_metrics

NAN = math.nan
EIGHT = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]  # 3 of 8 right


def one_token_each(rewards: list[float], groups: list[int] | None = None, **settings: bool) -> Scored:
    count = len(rewards)
    return Scored(
        rewards=torch.tensor(rewards),
        groups=torch.tensor(groups or [0] * count),
        lengths=torch.ones(count, dtype=torch.int64),
        own=torch.arange(count),
        **settings,
    )


def values(name: str, rewards: list[float], groups: list[int] | None = None, **settings: bool) -> list[float]:
    return compute_advantages(name, one_token_each(rewards, groups, **settings)).values.tolist()


def close(expected: list[float], tolerance: float = 1e-5) -> object:
    return pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(
    ("name", "normalize_std", "right", "wrong"),
    [("grpo", True, 1.20761, -0.72457), ("grpo", False, 0.625, -0.375), ("rloo", True, 0.714286, -0.428571)],
)
def test_three_of_eight_right(name: str, normalize_std: bool, right: float, wrong: float):
    """cases.md B18."""
    assert values(name, EIGHT, normalize_std=normalize_std) == close([right] * 3 + [wrong] * 5)


def test_unscorable_samples_leave_the_statistics_and_the_loss():
    """cases.md B17: [1, None, 0, 1]; counting None as 0 would give ±.866025."""
    result = compute_advantages("grpo", one_token_each([1.0, NAN, 0.0, 1.0]))
    assert result.values.tolist() == close([0.57735, 0, -1.15470, 0.57735])
    assert result.included.tolist() == [True, False, True, True]


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo"])
@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0, 1.0], [0.7] * 7])
def test_equal_rewards_give_exactly_zero(name: str, rewards: list[float]):
    """cases.md B16; in float32 seven times .7 is not 7·.7, so the test comes before the division."""
    assert values(name, rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_groups_with_fewer_than_two_scored_samples_are_excluded(name: str):
    """cases.md B16: one rule for every method that compares within a group."""
    result = compute_advantages(name, one_token_each([0.7, 1.0, 0.0, NAN, 0.5], [0, 1, 1, 2, 2]))
    assert result.included.tolist() == [False, True, True, False, False]
    assert result.values[0] == result.values[3] == result.values[4] == 0


def test_groups_go_by_id_whatever_the_order():
    """cases.md C12: rewards [1,0] and [1,1] for the same prompt text on two rows, arriving interleaved."""
    assert values("grpo", [1.0, 1.0, 0.0, 1.0], [0, 1, 0, 1]) == close([0.70711, 0, -0.70711, 0])
    assert values("grpo", [1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1]) == close([0.70711, -0.70711, 0, 0])


def test_opo_weighs_the_baseline_by_length():
    """Baseline (1·1 + 3·0) / 4 = .25."""
    scored = Scored(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([1, 3]), torch.arange(2))
    assert compute_advantages("opo", scored).values.tolist() == close([0.75, -0.25, -0.25, -0.25])


def test_a_rank_gets_the_advantages_of_its_own_tokens():
    scored = Scored(
        torch.tensor(EIGHT), torch.zeros(8).long(), torch.tensor([2, 1, 1, 1, 1, 1, 1, 2]), torch.tensor([7, 0])
    )
    assert compute_advantages("rloo", scored).values.tolist() == close([-0.428571] * 2 + [0.714286] * 2)


def test_an_empty_response_does_not_move_its_neighbour():
    """cases.md B27: unscorable by construction of the batch, here with length 0."""
    scored = Scored(torch.tensor([NAN, 1.0, 0.0]), torch.zeros(3).long(), torch.tensor([0, 1, 1]), torch.arange(3))
    assert compute_advantages("grpo", scored).values.tolist() == close([0.70711, -0.70711])


def test_reinforce_takes_the_reward_to_go():
    """Score 1, penalties .1, .2, .3: in all .4 from the first token, .5 from the second, .7 from the third (B26: the
    score itself sits on the last token).
    """
    scored = Scored(
        torch.tensor([0.4]), torch.tensor([0]), torch.tensor([3]), torch.tensor([0]), torch.tensor([0.1, 0.2, 0.3])
    )
    assert compute_advantages("reinforce", scored).values.tolist() == close([0.4, 0.5, 0.7])


def test_reinforce_plus_plus_whitens_over_tokens():
    """Tokens 1, 2, 3 → −1, 0, 1 (B03's numbers)."""
    assert values("reinforce_plus_plus", [1.0, 2.0, 3.0, NAN]) == close([-1, 0, 1, 0])


def test_reinforce_plus_plus_baseline_whitens_over_tokens():
    """R − mean = ±.5 on 1 and 3 tokens: mean −.25, sample variance .25: [.75, −.25 …]/.5."""
    scored = Scored(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([1, 3]), torch.arange(2))
    result = compute_advantages("reinforce_plus_plus_baseline", scored)
    assert result.values.tolist() == close([1.5, -0.5, -0.5, -0.5])


def test_what_a_step_could_not_learn_from_is_counted():
    metrics = group_metrics(torch.tensor([1.0, 1.0, NAN, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1, 2, 2]))
    assert metrics == {
        "group/unscorable_samples": 1,
        "group/too_small": 1,
        "group/uniform_fraction": pytest.approx(1 / 3),
    }


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(ValueError, match="no advantage named 'gpro'; did you mean 'grpo'"):
        advantage["gpro"]
    with pytest.raises(ValueError, match="advantage 'grpo' is registered twice"):
        advantage("grpo")


def whiten_over_ranks(name: str) -> Advantages:
    import torch.distributed as dist

    def reduce(values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values)
        return values

    own = [[0, 1, 2], [3]][dist.get_rank()]
    rewards, ones = torch.tensor([1.0, 2.0, 3.0, 7.0]), torch.ones(4, dtype=torch.int64)
    return compute_advantages(name, Scored(rewards, torch.zeros(4).long(), ones, torch.tensor(own), reduce=reduce))


def test_whitening_is_over_all_ranks(world):
    """cases.md B04: mean 3.25, sample std 2.629956."""
    first, second = world(2, whiten_over_ranks, "reinforce_plus_plus")
    assert first.values.tolist() == close([-0.855528, -0.475293, -0.095059])
    assert second.values.tolist() == close([1.425880])
