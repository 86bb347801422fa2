"""What each role's engine is told of experts."""

from dataclasses import replace

from megatron_bridge.families import Architecture
from megatron_bridge.families.architecture import Experts
from rlflow.config.schema import Actor
from rlflow.roles.build import expert_options

EXPERTS = Experts(count=8, per_token=2, ffn=64)
POLICY = Architecture(
    family="qwen3_moe", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=500, tied=False,
    qkv_bias=False, norm_eps=1e-6, rope_theta=1e6, rope_scaling=None, max_positions=512, experts=EXPERTS,
)  # fmt: skip


def test_the_actor_and_a_reference_like_it_replay_routing() -> None:
    """A reference with other experts cannot, a critic would only lose: nothing it says is compared with the rollout."""
    actor = Actor(router_replay=True, moe_aux_loss_coef=0.1)
    other = replace(POLICY, experts=replace(EXPERTS, count=16))
    roles = [("actor", POLICY), ("reference", POLICY), ("reference", other), ("critic", POLICY)]
    found = [expert_options(actor, name, own, POLICY) for name, own in roles]
    assert [options["router_replay"] for options in found] == [True, True, False, False]
    assert ["moe_aux_loss_coef" in options for options in found] == [True, False, False, False]
    assert not expert_options(replace(actor, router_replay=False), "actor", POLICY, POLICY)["router_replay"]
