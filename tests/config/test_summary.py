"""What `rlflow check` says of a good configuration."""

from pathlib import Path

from rlflow.config import assemble
from rlflow.config.summary import summarize
from tests.config.examples import QWEN, tree

DISJOINT = (
    "algorithm.advantage=gae", "algorithm.kl_coef=0.1", "actor.ranks=0-3", "actor.tensor_parallel_size=2",
    "actor.pipeline_parallel_size=2", "critic.ranks=4-5", "critic.pipeline_parallel_size=1", "reference.ranks=6-7",
    "reference.pipeline_parallel_size=1", "rollout.ranks=0-3",
)  # fmt: skip


def summary(folder: Path, *overrides: str, world_size: int | None = None) -> list[str]:
    config = assemble(tree(folder), overrides, world_size=world_size)
    return [line.strip() for line in summarize(config, world_size).splitlines()]


def test_roles_on_ranks_of_their_own(tmp_path: Path) -> None:
    assert summary(tmp_path, *DISJOINT, world_size=8) == [
        f"model     {QWEN} in bfloat16",
        "actor     TP2 × PP2 × DP1 on ranks 0-3",
        "critic    TP2 × PP1 × DP1 on ranks 4-5",
        "reference TP2 × PP1 × DP1 on ranks 6-7",
        "rollout   4 replicas of TP1 on ranks 0-3, 512 + 512 tokens",
        "at once   predictions of reference ∥ critic; updates of critic ∥ actor",
        "step      8 prompts × 8 responses = 64 samples, 1 optimizer steps of 64 samples",
        f"run       gae, ppo, 10 steps, to {tmp_path}/run",
    ]


def test_the_actor_predicts_where_its_log_probs_must_be_known_first(tmp_path: Path) -> None:
    for override in ("algorithm.mini_batches=2", "algorithm.kl_in=reward"):
        lines = summary(tmp_path, *DISJOINT, override, world_size=8)
        predictions = "predictions of reference ∥ critic, reference ∥ actor, critic ∥ actor"
        assert f"at once   {predictions}; updates of critic ∥ actor" in lines


def test_one_role_on_all_ranks(tmp_path: Path) -> None:
    lines = summary(tmp_path, "actor.context_parallel_size=2", "actor.tensor_parallel_size=2", world_size=8)
    assert lines[1:3] == ["actor   TP2 × CP2 × PP1 × DP2", "rollout 8 replicas of TP1, 512 + 512 tokens"]
    assert not any(line.startswith("at once") for line in lines)


def test_an_unknown_number_of_ranks(tmp_path: Path) -> None:
    lines = summary(tmp_path, "actor.pipeline_parallel_size=2", "actor.virtual_pipeline_parallel_size=7")
    assert lines[1:3] == ["actor   TP1 × PP2 × VP7", "rollout TP1, 512 + 512 tokens"]


def test_ranks_that_have_nothing_to_do(tmp_path: Path) -> None:
    places = ("actor.ranks=0-1", "rollout.ranks=4")
    assert "idle    ranks 2-3,5-7" in summary(tmp_path, *places, world_size=8)
    assert not any(line.startswith("idle") for line in summary(tmp_path, *places))
