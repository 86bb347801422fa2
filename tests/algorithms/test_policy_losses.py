"""Policy losses for each token: values and gradients."""

import math

import pytest
import torch

from rlflow.algorithms.policy_losses import PolicyLoss, PolicyTerms, clipped, policy_loss


def evaluate(
    name: str, ratios: list[float], advantages: list[float], rows: list[int] | None = None, **settings: float | None
) -> tuple[PolicyLoss, torch.Tensor]:
    """The loss of each token and the gradient of their sum to the log-probs, which are log(ratio), old ones being 0."""
    log_probs = torch.tensor(ratios).log().requires_grad_()
    terms = PolicyTerms(
        log_probs=log_probs,
        old_log_probs=torch.zeros(len(ratios)),
        advantages=torch.tensor(advantages),
        mask=torch.ones(len(ratios), dtype=torch.bool),
        sample_index=torch.tensor(rows or list(range(len(ratios)))),
        **settings,  # type: ignore[arg-type]
    )
    result = policy_loss[name](terms)
    result.loss.sum().backward()
    assert log_probs.grad is not None
    return result, log_probs.grad


def close(expected: list[float]) -> object:
    return pytest.approx(expected, abs=1e-5)


def test_ppo_clips_in_the_direction_of_the_advantage():
    """max(−Aρ, −A·clip(ρ, .8, 1.2)): the clip cuts the gradient at 1.3 for A > 0 and at .7 for A < 0."""
    result, gradient = evaluate("ppo", [1.3, 0.7, 1.3, 0.7], [1, 1, -1, -1])
    assert result.loss.tolist() == close([-1.2, -0.7, 1.3, 0.8])
    assert gradient.tolist() == close([0, -0.7, 1.3, 0])


def test_clip_fraction_counts_only_where_the_clip_acts():
    """algorithms.md: ρ = [1.3, .7, 1.3, .7], A = [1, 1, −1, −1], ε = .2 → .5."""
    acts = clipped(torch.tensor([1.3, 0.7, 1.3, 0.7]), torch.tensor([1.0, 1.0, -1.0, -1.0]), 0.2, 0.2)
    assert acts.double().mean() == 0.5


def test_clip_higher():
    """DAPO: ε .2/.28 lets ρ rise to 1.28."""
    result, _ = evaluate("ppo", [1.25, 1.5], [1, 1], clip_low=0.2, clip_high=0.28)
    assert result.loss.tolist() == close([-1.25, -1.28])


def test_dual_clip_bounds_the_loss_at_negative_advantages():
    """c = 3: at ρ = 5, A = −1 the loss is 3 and has no gradient; A > 0 is untouched."""
    result, gradient = evaluate("ppo", [5, 2, 5], [-1, -1, 1], dual_clip=3.0)
    assert result.loss.tolist() == close([3, 2, -1.2])
    assert gradient.tolist() == close([0, 2, 0])


def test_gspo_uses_the_sequence_ratio():
    """One sequence with ρ 1.21 and 1: s = exp(mean log ρ) = 1.1, and each token's gradient is −A·s."""
    result, gradient = evaluate("gspo", [1.21, 1.0], [1, 1], [0, 0])
    assert result.ratio.tolist() == close([1.1, 1.1])
    assert result.loss.tolist() == close([-1.1, -1.1])
    assert gradient.tolist() == close([-1.1, -1.1])


def test_gspo_clips_whole_sequences():
    result, gradient = evaluate("gspo", [1.21, 1.0], [1, 1], [0, 0], clip_low=3e-4, clip_high=4e-4)
    assert result.loss.tolist() == close([-1.0004, -1.0004])
    assert gradient.tolist() == [0, 0]


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    """−sg[min(ρ, 1.2)]·A·lp."""
    result, gradient = evaluate("cispo", [1.3, 1.0], [1, 2])
    assert result.loss.tolist() == close([-1.2 * math.log(1.3), 0])
    assert gradient.tolist() == close([-1.2, -2])


def test_reinforce():
    result, gradient = evaluate("reinforce", [0.5], [2])
    assert result.loss.tolist() == close([-2 * math.log(0.5)])
    assert gradient.tolist() == [-2]


def test_gmpo_takes_the_geometric_mean_of_clipped_ratios():
    """A = 1, log ρ = .6 and .2, ε = .4: exp(mean(.4, .2)) = e^.3; the clipped token has no gradient, the other e^.3/2
    for each of the two tokens that carry the sequence's loss.
    """
    result, gradient = evaluate("gmpo", [math.exp(0.6), math.exp(0.2)], [1, 1], [0, 0], clip_low=0.4, clip_high=0.4)
    assert result.loss.tolist() == close([-math.exp(0.3)] * 2)
    assert gradient.tolist() == close([0, -math.exp(0.3)])


def test_gmpo_clips_the_other_way_for_negative_advantages():
    """A = −1, log ρ = −.6 and −.2: s·min(s·r, s·clip(r)) = −.4 and −.2."""
    result, _ = evaluate("gmpo", [math.exp(-0.6), math.exp(-0.2)], [-1, -1], [0, 0], clip_low=0.4, clip_high=0.4)
    assert result.loss.tolist() == close([math.exp(-0.3)] * 2)


@pytest.mark.parametrize("name", policy_loss.names())
def test_on_policy_gradient_is_that_of_reinforce(name: str):
    """At ρ = 1 every policy loss, averaged over a sequence, has the gradient −A of each token."""
    _, gradient = evaluate(name, [1.0, 1.0, 1.0], [2, 2, -1], [0, 0, 1])
    assert gradient.tolist() == close([-2, -2, 1])


@pytest.mark.parametrize("name", policy_loss.names())
def test_far_off_log_probs_stay_finite(name: str):
    terms = PolicyTerms(
        torch.tensor([-1000.0, 1000.0], requires_grad=True), torch.zeros(2), torch.tensor([1.0, -1.0]),
        torch.ones(2, dtype=torch.bool), torch.arange(2),
    )  # fmt: skip
    loss = policy_loss[name](terms).loss.sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert terms.log_probs.grad is not None
    assert torch.isfinite(terms.log_probs.grad).all()
