"""Keys that nothing would read beside the values of others."""

from pathlib import Path

import pytest

from tests.config.examples import faults

PPO, KL = "algorithm.advantage=gae", "algorithm.kl_coef=0.1"
REINFORCE = "algorithm.policy_loss=reinforce"
MEAN, UNCORRECTED = "algorithm.aggregation=token-mean", "algorithm.importance_correction=null"


@pytest.mark.parametrize(
    ("override", "others", "ending"),
    [
        ("algorithm.normalize_std=false", "algorithm.advantage=rloo", "algorithm.advantage = rloo; nearest: true"),
        ("algorithm.dual_clip=3", "algorithm.policy_loss=cispo", "algorithm.policy_loss = cispo; nearest: null"),
        ("algorithm.aggregation_length=9", MEAN, "algorithm.aggregation = token-mean; nearest: null"),
        ("algorithm.importance_cap=3", UNCORRECTED, "algorithm.importance_correction = null; nearest: 2.0"),
        ("trainer.epochs=2", "trainer.steps=10", "trainer.steps = 10; nearest: 1"),
        ("rollout.stop_token_ids=[3]", "rollout.ignore_eos=true", "rollout.ignore_eos = true; nearest: []"),
        ("algorithm.gamma=0.9", "", "algorithm.advantage = grpo; nearest: 1.0"),
        ("algorithm.lam=0.9", "", "algorithm.advantage = grpo; nearest: 1.0"),
        ("algorithm.bootstrap_truncated=true", "", "algorithm.advantage = grpo; nearest: false"),
        ("algorithm.whiten_advantages=false", "", "algorithm.advantage = grpo; nearest: true"),
        ("critic.value_clip=0.2", "", "algorithm.advantage = grpo; nearest: 0.5"),
        ("critic.tensor_parallel_size=2", "", "algorithm.advantage = grpo; nearest: 1"),
        ("critic.ranks=[0]", "actor.ranks=0-1", "algorithm.advantage = grpo; nearest: [0, 1]"),
        ("critic_optimizer.lr=1e-6", "", "algorithm.advantage = grpo; nearest: 1.0e-05"),
        ("critic_optimizer.min_lr=1e-6", PPO, "critic_optimizer.schedule = constant; nearest: 0.0"),
        ("reference.update_every=5", "", "algorithm.kl_coef = 0.0; nearest: 0"),
        ("reference.ema=0.9", KL, "reference.update_every = 0; nearest: null"),
        ("reward_model.weight=2", "", "reward_model.path = null; nearest: 1.0"),
        ("algorithm.clip_low=0.1", REINFORCE, "algorithm.policy_loss = reinforce; nearest: 0.2"),
        ("algorithm.clip_high=0.3", REINFORCE, "algorithm.policy_loss = reinforce; nearest: 0.2"),
        ("algorithm.kl_in=reward", "", "algorithm.kl_coef = 0.0; nearest: loss"),
        ("algorithm.kl_estimator=k2", "", "algorithm.kl_coef = 0.0; nearest: k3"),
        ("algorithm.kl_controller=adaptive", "", "algorithm.kl_coef = 0.0; nearest: fixed"),
        ("algorithm.kl_target=0.2", KL, "algorithm.kl_controller = fixed; nearest: 0.1"),
        ("algorithm.kl_horizon=20", KL, "algorithm.kl_controller = fixed; nearest: 10000"),
        ("actor.moe_aux_loss=micro-batch", "", "actor.moe_aux_loss_coef = 0.0; nearest: global"),
        ("evaluation.max_prompts=5", "data.evaluation=null", "data.evaluation = null; nearest: null"),
        ("evaluation.temperature=1", "data.evaluation=null", "data.evaluation = null; nearest: 0.0"),
        ("evaluation.at_start=false", "data.evaluation=null", "data.evaluation = null; nearest: true"),
        ("trainer.keep=5", "", "trainer.save_every = 0; nearest: 2"),
        ("tracking.samples_per_step=9", "tracking.tensorboard=false", "tracking.tensorboard = false; nearest: 4"),
        ("profile.trace=false", "", "profile.steps = []; nearest: true"),
    ],
)
def test_keys_that_nothing_would_read(tmp_path: Path, override: str, others: str, ending: str) -> None:
    """cases.md H08: what was set has its effect or is refused."""
    (fault,) = faults(tmp_path, override, *others.split())
    assert fault.startswith(override.partition("=")[0] + " = ")
    assert fault.endswith(f"is not read where {ending}")
