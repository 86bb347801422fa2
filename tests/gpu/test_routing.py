"""On one GPU: vLLM tells the experts of its tokens, CUDA graphs or not, and Megatron's routers take them."""

from pathlib import Path

from tests.gpu.devices import needs_gpus
from tests.rollout.routing_ranks import sample_and_score
from tests.workers import World

pytestmark = needs_gpus(1)


def test_replay_brings_the_trainers_log_probs_nearer_to_the_rollouts(fresh_gpus: World, experts: Path) -> None:
    gaps = fresh_gpus(1, sample_and_score, experts, "bfloat16")[0].gaps
    for name, gap in gaps.items():
        print(f"{name}: mean {gap.mean():.2e}, max {gap.max():.2e}")
    assert gaps["replay"].mean() < gaps["choose"].mean()
