"""Rules of critic, reference and reward model: their models and grids, and keys that only some runs read."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.families import load_architecture
from rlflow.config import Role
from rlflow.config.check_grid import SIZES
from rlflow.config.nearest_grids import nearest_grids
from tests.config.examples import QWEN, faults

PPO, KL = "algorithm.advantage=gae", "algorithm.kl_coef=0.1"
REINFORCE = "algorithm.policy_loss=reinforce"


def model(folder: Path, name: str, **changes: Any) -> Path:
    """The folder of a model like the example's, with other values in its config.json."""
    made = folder / name
    made.mkdir()
    (made / "config.json").write_text(json.dumps(json.loads((QWEN / "config.json").read_text()) | changes))
    return made


def score_model(folder: Path, **changes: Any) -> Path:
    head = {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}
    return model(folder, "score", **head, **changes)


def write_tokens(folder: Path, *tokens: str) -> None:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))


def test_every_role_on_a_grid_of_its_own(tmp_path: Path) -> None:
    """Actor TP2 × PP2 on four ranks, critic TP1, reference and reward model on the last two."""
    roles = (
        PPO, KL, "actor.tensor_parallel_size=2", "actor.pipeline_parallel_size=2", "actor.ranks=0-3",
        "critic.ranks=all", "critic.tensor_parallel_size=1", "critic.pipeline_parallel_size=1", "reference.ranks=4-5",
        "reference.pipeline_parallel_size=1", f"reward_model.path={score_model(tmp_path)}", "reward_model.ranks=4-5",
        "reward_model.pipeline_parallel_size=1", "rollout.ranks=0-3", "trainer.prompts_per_step=9",
    )  # fmt: skip
    assert faults(tmp_path, *roles, world_size=6) == []


def test_ppo_needs_no_groups(tmp_path: Path) -> None:
    assert faults(tmp_path, PPO, "rollout.n=1", world_size=1) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (f"{PPO} critic.ranks=0-2 critic.tensor_parallel_size=2",
         "critic.tensor_parallel_size = 2: 3 ranks do not divide into blocks of TP × PP = 2; nearest: TP1 × PP1 × DP3"),
        (f"{PPO} critic.context_parallel_size=3",
         "critic.context_parallel_size = 3: 4 ranks do not divide into blocks of TP × CP × PP = 3; "
         "nearest: TP1 × CP4 × PP1 × DP1, TP1 × CP2 × PP1 × DP2, TP2 × CP2 × PP1 × DP1"),
        ("trainer.prompts_per_step=2 algorithm.mini_batches=4",
         "trainer.prompts_per_step = 2: 2 prompts do not divide over 4 mini-batches, in which a prompt's samples stay "
         "together; nearest: 4"),
        (f"{PPO} trainer.prompts_per_step=12 algorithm.mini_batches=8",
         "trainer.prompts_per_step = 12: 12 prompts do not divide over 8 mini-batches, in which a prompt's samples "
         "stay together; nearest: 8 or 16"),
        ("trainer.prompts_per_step=4 algorithm.mini_batches=4 rollout.n=2 actor.ranks=0-2",
         "trainer.prompts_per_step = 4: 4 prompts × 2 responses = 8 samples do not divide over 4 mini-batches × 3 "
         "data-parallel ranks = 12; nearest: 12"),
        (f"{PPO} rollout.n=1 trainer.prompts_per_step=6",
         "trainer.prompts_per_step = 6: 6 prompts × 1 responses = 6 samples do not divide over 1 mini-batches × 4 "
         "data-parallel ranks = 4; nearest: 4 or 8"),
        (f"{KL} reference.ranks=3-4", "reference.ranks = [3, 4]: the job has the ranks 0 to 3; nearest: all"),
        (f"{PPO} critic.pipeline_parallel_size=2 critic.virtual_pipeline_parallel_size=3",
         "critic.virtual_pipeline_parallel_size = 3: 28 layers do not divide over PP 2 × VP 3 = 6 chunks: with PP 2 "
         "valid are 1, 2, 7, 14; nearest: TP1 × PP2 × VP2 × DP2, TP1 × PP2 × VP7 × DP2, TP2 × PP2 × VP2 × DP1"),
        (f"{KL} reference.expert_parallel_size=2",
         "reference.expert_parallel_size = 2: qwen2 has no experts; nearest: 1"),
        (f"{PPO} critic.order=tp", "critic.order = tp: must name each of tp, cp, ep, dp, pp once; "
                                   "nearest: tp-cp-ep-dp-pp"),
        (f"{PPO} actor.pipeline_parallel_size=4 critic.pipeline_parallel_size=1 trainer.prompts_per_step=9 rollout.n=2",
         "trainer.prompts_per_step = 9: 9 prompts × 2 responses = 18 samples do not divide over 1 mini-batches × 4 "
         "data-parallel ranks of the critic = 4; nearest: 8 or 10"),
        (f"{PPO} critic.warmup_steps=11", "critic.warmup_steps = 11: must be below trainer.steps = 10; nearest: 9"),
        (f"{PPO} critic.warmup_steps=10", "critic.warmup_steps = 10: must be below trainer.steps = 10; nearest: 9"),
        (f"{PPO} critic_optimizer.schedule=linear critic_optimizer.min_lr=1",
         "critic_optimizer.min_lr = 1.0: must be at most critic_optimizer.lr = 1e-05; nearest: 1e-05"),
        (f"{PPO} model.dtype=float32 critic.cuda_graphs=true",
         "critic.cuda_graphs = true: attention in float32 is planned on the host: needs model.dtype = bfloat16; "
         "nearest: false"),
        (f"{PPO} model.dtype=float32 critic.transformer_engine=true",
         "critic.transformer_engine = true: packed attention of Transformer Engine has no float32: needs model.dtype = "
         "bfloat16; nearest: null"),
        (f"{KL} reference.ema=1", "reference.ema = 1.0: must be below 1, or null"),
        (f"{KL} algorithm.kl_controller=adaptive algorithm.kl_horizon=12",
         "algorithm.kl_horizon = 12: must be above a fifth of the 64 samples of a step, or the coefficient may become "
         "negative; nearest: 64"),
    ],
)  # fmt: skip
def test_one_role(tmp_path: Path, overrides: str, message: str) -> None:
    """cases.md A09: layers, PP and VP are named."""
    assert faults(tmp_path, *overrides.split(), world_size=4) == [message]


def test_faults_that_two_roles_have_by_themselves_are_two(tmp_path: Path) -> None:
    rule = "the job has the ranks 0 to 3; nearest: all"
    assert faults(tmp_path, PPO, KL, "critic.ranks=[4]", "reference.ranks=[4]", world_size=4) == [
        f"critic.ranks = [4]: {rule}", f"reference.ranks = [4]: {rule}",
    ]  # fmt: skip


def test_a_fault_that_a_role_takes_from_the_actor_is_reported_once(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, PPO, KL, "actor.tensor_parallel_size=8", "rollout.tensor_parallel_size=1", world_size=8)
    assert fault.startswith("actor.tensor_parallel_size = 8: ")
    (fault,) = faults(tmp_path, PPO, KL, "actor.micro_batch_tokens=0")
    assert fault.startswith("actor.micro_batch_tokens = 0: ")
    (fault,) = faults(tmp_path, PPO, KL, "actor.sequence_parallel=true")
    assert fault.startswith("actor.sequence_parallel = true: ")
    (fault,) = faults(tmp_path, PPO, "critic.tensor_parallel_size=8", world_size=8)
    assert fault.startswith("critic.tensor_parallel_size = 8: ")
    both = faults(
        tmp_path, PPO, "actor.virtual_pipeline_parallel_size=2", "critic.tensor_parallel_size=8", world_size=8
    )
    assert [fault.partition(" = ")[0] for fault in both] == [
        "actor.virtual_pipeline_parallel_size", "critic.tensor_parallel_size",
    ]  # fmt: skip
    assert all("; nearest: TP" in fault for fault in both)


@pytest.mark.parametrize(
    ("section", "asked"),
    [
        ("actor", {"tensor_parallel_size": 8}),
        ("actor", {"tensor_parallel_size": 3, "pipeline_parallel_size": 3, "sequence_parallel": True}),
        ("critic", {"context_parallel_size": 3}),
        ("critic", {"pipeline_parallel_size": 4, "virtual_pipeline_parallel_size": 4}),
    ],
)
def test_suggested_grids_are_good_in_a_whole_configuration(tmp_path: Path, section: str, asked: dict[str, int]) -> None:
    words = [f"{section}.{name}={value}" for name, value in asked.items()]
    assert faults(tmp_path, PPO, *words, world_size=8)
    for found in nearest_grids(Role(**asked), load_architecture(QWEN), 8, suits=lambda dp: 64 % dp == 0):
        words = [f"{section}.{name}={value}" for name in SIZES if (value := getattr(found, name)) is not None]
        words.append(f"{section}.sequence_parallel={str(found.sequence_parallel).lower()}")
        assert faults(tmp_path, PPO, *words, world_size=8) == []


def test_a_frozen_role_reads_nothing_about_training(tmp_path: Path) -> None:
    assert faults(tmp_path, KL, "actor.recompute=full", "actor.overlap=false") == []
    assert faults(tmp_path, KL, "actor.recompute=full", "reference.recompute=none") == [
        "reference.recompute = none: is not read: the reference is not trained; nearest: full"
    ]


def test_a_score_model_has_no_logits(tmp_path: Path) -> None:
    chunks, reward = "actor.logprob_chunk_tokens=64", f"reward_model.path={score_model(tmp_path)}"
    assert faults(tmp_path, PPO, reward, chunks) == []
    assert faults(
        tmp_path, PPO, reward, chunks, "critic.logprob_chunk_tokens=32", "reward_model.logprob_chunk_tokens=16"
    ) == [
        "critic.logprob_chunk_tokens = 32: is not read: the critic has no logits; nearest: 64",
        "reward_model.logprob_chunk_tokens = 16: is not read: the reward model has no logits; nearest: 64",
    ]


def test_keys_for_experts(tmp_path: Path) -> None:
    assert faults(tmp_path, "actor.moe_aux_loss_coef=0.01", "actor.router_replay=true") == [
        "actor.moe_aux_loss_coef = 0.01: qwen2 has no experts; nearest: 0.0",
        "actor.router_replay = true: qwen2 has no experts; nearest: false",
    ]


def test_routing_is_told_of_whole_models_only(tmp_path: Path) -> None:
    routed = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    experts = model(tmp_path, "experts", model_type="qwen3_moe", **routed)
    overrides = (f"model.path={experts}", "actor.router_replay=true", "actor.moe_aux_loss_coef=0.01")
    assert faults(tmp_path, *overrides) == []
    assert faults(tmp_path, *overrides, "rollout.pipeline_parallel_size=2") == [
        "actor.router_replay = true: vLLM does not tell experts where rollout.pipeline_parallel_size is above 1; "
        "nearest: false"
    ]


def test_heads(tmp_path: Path) -> None:
    """A critic may start from either kind of model, a reference generates nothing and must still be of the first."""
    score = score_model(tmp_path)
    assert faults(tmp_path, PPO, f"critic.path={score}") == []
    assert faults(tmp_path, PPO, f"critic.path={QWEN}") == []
    assert faults(tmp_path, f"reward_model.path={score}") == []
    assert faults(tmp_path, KL, f"reference.path={score}") == [
        f"reference.path = {score}: is a score model; a language model is due"
    ]
    assert faults(tmp_path, f"reward_model.path={QWEN}") == [
        f"reward_model.path = {QWEN}: is a language model; a score model is due"
    ]
    assert faults(tmp_path, PPO, f"critic.path={score}", "critic.head=random") == [
        "critic.head = random: is not read where critic.path is a score model; nearest: zero"
    ]


def test_models_of_roles_that_cannot_be_used(tmp_path: Path) -> None:
    assert faults(tmp_path, PPO, "critic.path=/nowhere") == [
        "critic.path = /nowhere: no such folder; a model is read from a folder, not downloaded"
    ]
    short = score_model(tmp_path, max_position_embeddings=1000)
    assert faults(tmp_path, f"reward_model.path={short}") == [
        f"reward_model.path = {short}: has 1000 positions, and a sample up to 1024 tokens"
    ]
    yarn = model(tmp_path, "yarn", rope_scaling={"rope_type": "longrope", "factor": 4.0})
    (fault,) = faults(tmp_path, PPO, f"critic.path={yarn}")
    assert fault.startswith(f"critic.path = {yarn}: rope_scaling: rope_type 'longrope' is not supported")


def test_a_model_that_cannot_be_read_hides_no_other_fault(tmp_path: Path) -> None:
    reward = f"reward_model.path={score_model(tmp_path)}"
    assert faults(tmp_path, reward, "model.path=/nowhere", "optimizer.lr=-1") == [
        "model.path = /nowhere: no such folder; a model is read from a folder, not downloaded",
        "optimizer.lr = -1.0: must be at least 0; nearest: 0",
    ]


def test_vocabularies_are_one(tmp_path: Path) -> None:
    """By the tokenizers: sizes in config.json are padded, and count only where there is no tokenizer.json."""
    actor, other = model(tmp_path, "actor"), model(tmp_path, "other", vocab_size=151936)
    overrides = (PPO, f"model.path={actor}", f"critic.path={other}")
    assert faults(tmp_path, *overrides) == [
        f"critic.path = {other}: has another vocabulary than model.path: 151936 tokens instead of 152064"
    ]
    write_tokens(actor, "a", "b")
    write_tokens(other, "a", "b")
    assert faults(tmp_path, *overrides) == []
    write_tokens(other, "a", "b", "<pad>")  # the actor never samples that
    assert faults(tmp_path, *overrides) == []
    write_tokens(other, "a")
    assert faults(tmp_path, *overrides) == [
        f"critic.path = {other}: has another vocabulary than model.path: token 1 is missing instead of 'b'"
    ]
    write_tokens(other, "a", "c", "b")
    assert faults(tmp_path, *overrides) == [
        f"critic.path = {other}: has another vocabulary than model.path: token 1 is 'c' instead of 'b'"
    ]


def test_a_reference_of_another_shape_cannot_follow_the_actor(tmp_path: Path) -> None:
    other = model(tmp_path, "other", num_hidden_layers=12)
    overrides = (KL, f"reference.path={other}")
    assert faults(tmp_path, *overrides) == []
    assert faults(tmp_path, *overrides, "reference.update_every=5") == [
        "reference.update_every = 5: the actor's weights do not fit: layers 12 instead of 28; nearest: 0"
    ]
    assert faults(tmp_path, KL, "reference.update_every=5", "reference.ema=0.9") == []


def test_a_reward_model_may_be_the_only_source_of_reward(tmp_path: Path) -> None:
    reward = f"reward_model.path={score_model(tmp_path)}"
    assert faults(tmp_path, reward, "rewards=[]", "data.evaluation=null") == []
    assert faults(tmp_path, reward, "rewards.0.weight=0") == []
    assert faults(tmp_path, reward, "rewards=[]", "reward_model.weight=0") == [
        "rewards: at least one reward with a weight other than 0 must be given"
    ]
    assert faults(tmp_path, reward, "rewards=[]") == [
        "rewards: only functions score data.evaluation: at least one must be given, of weight 0 if it is a metric only"
    ]
    assert faults(tmp_path, reward, "rewards.0.name=reward_model") == [
        "rewards.0.name = reward_model: is the reward model's name"
    ]
