"""The objective: terms add up, metrics combine exactly, and masked tokens do not exist."""

import math
import typing

import pytest
import torch

from rlflow import algorithms
from rlflow.algorithms import PolicyObjective, combine, summarize
from rlflow.config import schema


def fields(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Four tokens of two samples; the last is masked and NaN wherever it can be."""
    nan = math.nan
    return {
        "mask": torch.tensor([True, True, True, False]),
        "weights": torch.tensor([1 / 3, 1 / 3, 1 / 3, 0]),
        "advantages": torch.tensor([1.0, 1.0, -1.0, nan]),
        "sample_index": torch.tensor([0, 0, 1, 1]),
        "old_log_probs": torch.tensor([-1.0, -2.0, -1.0, nan]),
        "rollout_log_probs": torch.tensor([-1.1, -2.0, -1.0, nan]),
        "ref_log_probs": torch.tensor([-1.5, -2.0, -1.0, nan]),
        **changes,
    }


def log_probs() -> torch.Tensor:
    return torch.tensor([-1.0, -2.0, -1.0, math.nan], requires_grad=True)


@pytest.mark.parametrize("name", algorithms.policy_loss.names())
def test_nan_outside_the_mask_reaches_neither_loss_nor_gradient(name: str):
    """cases.md B01, for every loss with all its terms."""
    objective = PolicyObjective(name, kl_coef=0.1, entropy_coef=0.1, importance_correction="tis")
    values = log_probs()
    entropy = torch.tensor([1.0, 1.0, 1.0, math.nan], requires_grad=True)
    loss, metrics = objective(values, entropy, fields())
    loss.backward()
    assert values.grad is not None
    assert entropy.grad is not None
    for tensor in (loss, values.grad, entropy.grad, *metrics.values()):
        assert torch.isfinite(tensor).all()
    assert values.grad[3] == entropy.grad[3] == 0


@pytest.mark.parametrize("name", algorithms.policy_loss.names())
def test_the_gradient_of_some_tokens_needs_no_others_where_the_loss_is_per_token(name: str):
    """Sequences are cut in the middle: what says that its tokens do not meet is right, and no other is like that."""
    draw = torch.Generator().manual_seed(0)
    objective = PolicyObjective(name, kl_coef=0.1, entropy_coef=0.1, importance_correction="tis")
    given = {
        "mask": torch.rand(12, generator=draw) > 0.2,
        "weights": torch.rand(12, generator=draw),
        "advantages": torch.randn(12, generator=draw),
        "sample_index": torch.arange(12) // 6,
        **{f"{who}_log_probs": -torch.rand(12, generator=draw) for who in ("old", "rollout", "ref")},
    }
    values, entropy = -torch.rand(12, generator=draw), torch.rand(12, generator=draw)

    def slopes(rows: slice) -> torch.Tensor:
        inputs = [each[rows].clone().requires_grad_() for each in (values, entropy)]
        loss, _ = objective(*inputs, {name: each[rows] for name, each in given.items()})
        return torch.stack(torch.autograd.grad(loss, inputs))

    parts = torch.cat([slopes(slice(0, 4)), slopes(slice(4, 9)), slopes(slice(9, 12))], 1)
    assert torch.equal(parts, slopes(slice(None))) == objective.is_per_token


def test_terms_add_up():
    """Policy (−1 −1 +1)/3; KL .1·k3(.5)/3 = .1·.106531/3; entropy −.1·(1+2+3)/3."""
    objective = PolicyObjective(kl_coef=0.1, entropy_coef=0.1)
    loss, metrics = objective(log_probs(), torch.tensor([1.0, 2.0, 3.0, 9.0]), fields())
    assert loss.item() == pytest.approx(-1 / 3 + 0.1 * 0.106531 / 3 - 0.1 * 2, abs=1e-6)
    shown = summarize({name: value.item() for name, value in metrics.items()})
    assert shown["actor/policy_loss"] == pytest.approx(-1 / 3)
    assert shown["actor/kl"] == pytest.approx(0.106531 / 3, abs=1e-6)
    assert shown["actor/kl_loss"] == pytest.approx(0.1 * 0.106531 / 3, abs=1e-6)
    assert shown["actor/entropy"] == pytest.approx(2.0)
    assert shown["actor/loss"] == pytest.approx(loss.item())
    assert shown["actor/trainable_tokens"] == 3


def test_the_first_update_is_on_policy():
    """Without old log-probs the policy is its own old one: ratio 1, and still a gradient."""
    given = fields()
    del given["old_log_probs"]
    values = log_probs()
    loss, metrics = PolicyObjective()(values, None, given)
    loss.backward()
    assert metrics["ratio_error_max"] == 0
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-1 / 3, -1 / 3, 1 / 3, 0])


def test_ratio_error_and_clip_fraction():
    _, metrics = PolicyObjective()(torch.tensor([-0.5, -2.0, -1.0, 0.0]), None, fields())
    shown = summarize({name: value.item() for name, value in metrics.items()})
    assert shown["actor/ratio_error_max"] == pytest.approx(math.exp(0.5) - 1)
    assert shown["actor/clip_fraction"] == pytest.approx(1 / 3)


def test_the_gap_to_the_rollout_engine_is_always_measured():
    """One of three tokens is .1 off: w = e^.1, KL e^.1 − 1 − .1, effective sample size (Σw)²/Σw²/n."""
    _, metrics = PolicyObjective()(log_probs(), None, fields())
    shown = summarize({name: value.item() for name, value in metrics.items()})
    weight = math.exp(0.1)
    assert shown["mismatch/log_prob_mean"] == pytest.approx(0.1 / 3, abs=1e-6)
    assert shown["mismatch/log_prob_max"] == pytest.approx(0.1, abs=1e-6)
    assert shown["mismatch/kl"] == pytest.approx((weight - 1.1) / 3, abs=1e-6)
    assert shown["mismatch/effective_sample_size"] == pytest.approx((2 + weight) ** 2 / (2 + weight**2) / 3)
    assert shown["mismatch/cut_fraction"] == 0


def test_truncated_importance_sampling_weighs_and_caps():
    """w = min(exp(old − roll), 2): e^.5 stays, e^3 is cut to 2, and w carries no gradient."""
    rollout = torch.tensor([-1.5, -5.0, -1.0, math.nan])
    values = log_probs()
    loss, metrics = PolicyObjective(importance_correction="tis")(values, None, fields(rollout_log_probs=rollout))
    loss.backward()
    expected = [-math.exp(0.5) / 3, -2 / 3, 1 / 3]
    assert loss.item() == pytest.approx(sum(expected))
    assert values.grad is not None
    assert values.grad[:3].tolist() == pytest.approx(expected)
    assert metrics["mismatch_cut"] == 1


@pytest.mark.parametrize("split", [[4], [2, 2], [1, 3], [0, 4]])
def test_metrics_do_not_depend_on_the_cut(split: list[int]):
    objective = PolicyObjective(kl_coef=0.1, entropy_coef=0.1, importance_correction="tis")
    values, entropy = torch.tensor([-0.5, -2.5, -1.0, 0.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    _, whole = objective(values, entropy, fields())
    parts, start = [], 0
    for size in split:
        cut = slice(start, start + size)
        parts.append(objective(values[cut], entropy[cut], {name: value[cut] for name, value in fields().items()})[1])
        start += size
    combined = combine(parts)
    assert combined.keys() == whole.keys()
    for name, value in whole.items():
        assert combined[name].item() == pytest.approx(value.item(), abs=1e-6), name


def test_losses_of_several_updates_are_averaged():
    _, metrics = PolicyObjective()(log_probs(), None, fields())
    twice = {name: value.item() for name, value in combine([metrics, metrics]).items()}
    shown = summarize(twice, updates=2)
    assert shown["actor/loss"] == pytest.approx(-1 / 3)
    assert shown["actor/trainable_tokens"] == 6


def test_nothing_trainable_gives_zero_loss_and_zero_gradient():
    """cases.md B02."""
    values = log_probs()
    nothing = torch.zeros(4, dtype=torch.bool)
    loss, metrics = PolicyObjective(kl_coef=0.1)(values, None, fields(mask=nothing, weights=torch.zeros(4)))
    loss.backward()
    assert loss.item() == 0
    assert values.grad is not None
    assert values.grad.tolist() == [0, 0, 0, 0]
    shown = summarize({name: value.item() for name, value in metrics.items()})
    assert shown["actor/trainable_tokens"] == 0
    assert all(math.isfinite(value) for value in shown.values())


def test_samples_of_zero_gradient_are_found():
    """Advantages all zero, or no trainable token; a KL or entropy term in the loss makes the former count."""
    advantages = torch.tensor([0.0, 0.0, 1.0, 0.0, 5.0])
    mask = torch.tensor([True, True, True, True, False])
    lengths = torch.tensor([2, 2, 1])
    assert PolicyObjective().has_zero_gradient(advantages, mask, lengths).tolist() == [True, False, True]
    assert PolicyObjective(kl_coef=0.1).has_zero_gradient(advantages, mask, lengths).tolist() == [False, False, True]
    with_entropy = PolicyObjective(entropy_coef=0.1)
    assert with_entropy.has_zero_gradient(advantages, mask, lengths).tolist() == [False, False, True]


def test_leaving_out_samples_of_zero_gradient_changes_no_gradient():
    given = fields(advantages=torch.tensor([0.0, 0.0, -1.0, 0.0]))
    whole, rest = log_probs(), log_probs()
    PolicyObjective()(whole, None, given)[0].backward()
    PolicyObjective()(rest[2:], None, {name: value[2:] for name, value in given.items()})[0].backward()
    assert whole.grad is not None
    assert rest.grad is not None
    assert whole.grad.tolist() == rest.grad.tolist()


def test_the_kl_coefficient_changes_from_step_to_step():
    """A controller's coefficient weighs the KL term; where KL is in the reward the loss has none at any coefficient."""
    objective = PolicyObjective(kl_coef=0.1, entropy_coef=0.5)
    assert objective.with_kl_coef(0.3) == PolicyObjective(kl_coef=0.3, entropy_coef=0.5)
    assert PolicyObjective().with_kl_coef(0.3) == PolicyObjective()


def test_k1_is_refused_as_a_loss():
    with pytest.raises(ValueError, match="expected gradient of zero"):
        PolicyObjective(kl_coef=0.1, kl_estimator="k1")
    PolicyObjective(kl_coef=0.0, kl_estimator="k1")


def test_unknown_names_raise_before_the_first_step():
    with pytest.raises(ValueError, match="did you mean 'ppo'"):
        PolicyObjective("pppo")
    with pytest.raises(ValueError, match="no importance correction named 'tsi'"):
        PolicyObjective(importance_correction="tsi")


@pytest.mark.parametrize(
    ("key", "registry"),
    [("advantage", algorithms.advantage), ("policy_loss", algorithms.policy_loss),
     ("kl_estimator", algorithms.kl_estimator), ("kl_controller", algorithms.kl_controller),
     ("aggregation", algorithms.aggregation)],
)  # fmt: skip
def test_the_configuration_offers_what_is_registered(key: str, registry: algorithms.registry.Registry):
    declared = typing.get_type_hints(schema.Algorithm)[key]
    assert sorted(typing.get_args(declared)) == registry.names()
