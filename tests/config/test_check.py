"""Every rule between keys: one change to a good configuration, and the fault that names it."""

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from rlflow.config import Algorithm
from rlflow.config.check import GROUP_ADVANTAGES, Purpose
from tests.config.examples import QWEN, faults


def test_the_example_is_good(tmp_path: Path) -> None:
    for world_size in (None, 1, 2, 8):
        assert faults(tmp_path, world_size=world_size) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=-1", "optimizer.lr = -1.0: must be at least 0; nearest: 0"),
        ("optimizer.beta2=1", "optimizer.beta2 = 1.0: must be below 1"),
        ("rollout.temperature=0", "rollout.temperature = 0.0: must be above 0"),
        ("rollout.sleep_level=3", "rollout.sleep_level = 3: must be at most 2; nearest: 2"),
        ("algorithm.dual_clip=1", "algorithm.dual_clip = 1.0: must be above 1, or null"),
        ("actor.ranks=0-9", "actor.ranks = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]: the job has the ranks 0 to 1; nearest: all"),
        ("trainer.steps=0", "trainer.steps = 0: must be at least 1, or null; nearest: 1"),
        ("profile.steps=[0]", "profile.steps = 0: must be at least 1: the first step has this number; nearest: 1"),
        ("profile.steps=[10,11]", "profile.steps = 11: must be at most trainer.steps = 10; nearest: 10"),
        ("rollout.top_k=0", "rollout.top_k = 0: must be -1 (all tokens) or at least 1; nearest: -1"),
        ("optimizer.schedule=linear optimizer.min_lr=1", "optimizer.min_lr = 1.0: must be at most optimizer.lr = "
                                                         "1e-06; nearest: 1e-06"),
        ("optimizer.min_lr=1e-7", "optimizer.min_lr = 1e-07: is not read where optimizer.schedule = constant; "
                                  "nearest: 0.0"),
        ("optimizer.warmup_steps=11", "optimizer.warmup_steps = 11: must be at most trainer.steps = 10; "
                                      "nearest: 10"),
        ("evaluation.n=2", "evaluation.n = 2: greedy decoding gives the same response each time; set "
                           "evaluation.temperature above 0; nearest: 1"),
        ("rollout.stop_token_ids=[152064]", "rollout.stop_token_ids = 152064: must be in the vocabulary: 0 to 152063"),
        ("actor.sequence_parallel=true", "actor.sequence_parallel = true: needs actor.tensor_parallel_size above 1; "
                                         "nearest: false"),
        ("actor.order=tp-dp-pp", "actor.order = tp-dp-pp: must name each of tp, cp, ep, dp, pp once; "
                                 "nearest: tp-cp-ep-dp-pp"),
        ("bridge.placement=aligned actor.order=pp-tp-cp-ep-dp", "bridge.placement = aligned: chooses the order of the "
         "actor's dimensions itself, and actor.order is pp-tp-cp-ep-dp; nearest: natural"),
        ("actor.cuda_graphs=true actor.recompute=full", "actor.cuda_graphs = true: needs actor.recompute = none: "
         "computing activations again asks the host for random states; nearest: false"),
        ("actor.cuda_graphs=true actor.sequence_parallel=true actor.tensor_parallel_size=2",
         "actor.cuda_graphs = true: needs actor.sequence_parallel = false: the rows of all ranks go to a buffer that "
         "moves when a micro-batch is longer; nearest: false"),
        ("actor.cuda_graphs=true actor.offload=true", "actor.cuda_graphs = true: needs actor.offload = false: a graph "
         "reads weights where they lay when it was captured; nearest: false"),
        ("actor.cuda_graphs=true actor.pipeline_parallel_size=2", "actor.cuda_graphs = true: needs "
         "actor.pipeline_parallel_size = 1: stages wait for each other's messages; nearest: false"),
        ("actor.cuda_graphs=true algorithm.kl_coef=0.1 algorithm.kl_controller=adaptive", "actor.cuda_graphs = true: "
         "the coefficient in the loss is part of what was captured: take algorithm.kl_in reward; nearest: false"),
        ("trainer.resume=atuo", "trainer.resume = atuo: must be auto, never or the folder of a checkpoint; "
                                "nearest: auto"),
        ("trainer.prompts_per_step=100", "trainer.prompts_per_step"),
    ],
)  # fmt: skip
def test_one_key(tmp_path: Path, override: str, message: str) -> None:
    found = faults(tmp_path, *override.split(), world_size=3 if override.endswith("=100") else 2)
    assert len(found) == 1
    assert found[0].startswith(message)


def test_heads_must_divide_over_tensor_parallel_ranks(tmp_path: Path) -> None:
    """cases.md H05: 28 heads over 8 ranks, in trainer and engine; the nearest size is one that 4 kv heads allow."""
    overrides = ("actor.tensor_parallel_size=8", "rollout.tensor_parallel_size=8")
    rule = "28 attention heads do not divide over 8: divisors are 1, 2, 4, 7, 14, 28; nearest: "
    assert faults(tmp_path, *overrides, world_size=8) == [
        f"actor.tensor_parallel_size = 8: {rule}TP4 × PP1 × DP2, TP4 × PP2 × DP1, TP2 × PP1 × DP4",
        f"rollout.tensor_parallel_size = 8: {rule}4",
    ]
    assert faults(tmp_path, *overrides) == [f"{key.replace('=', ' = ')}: {rule}4" for key in overrides]


def test_ranks_may_share_key_value_heads(tmp_path: Path) -> None:
    model = {**json.loads((QWEN / "config.json").read_text()), "num_attention_heads": 12, "head_dim": 128}
    for kv_heads in (2, 6):
        folder = tmp_path / f"kv{kv_heads}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**model, "num_key_value_heads": kv_heads}))
    two, six = f"model.path={tmp_path}/kv2", f"model.path={tmp_path}/kv6"
    for section, nearest in (("actor", "TP2 × PP1 × DP2, TP2 × PP2 × DP1, TP1 × PP1 × DP4"), ("rollout", "2")):
        key = f"{section}.tensor_parallel_size"
        assert faults(tmp_path, two, f"{key}=4", world_size=4) == []
        assert faults(tmp_path, six, f"{key}=4", world_size=4) == [
            f"{key} = 4: 6 key-value heads neither divide over 4 ranks nor are divided by them: valid are 1, 2; "
            f"nearest: {nearest}"
        ]


def test_the_rows_of_a_shared_head_must_divide(tmp_path: Path) -> None:
    """12 heads on 4 key-value heads: 5 · 128 rows each, which 3 ranks do not share evenly."""
    model = {**json.loads((QWEN / "config.json").read_text()), "num_attention_heads": 12, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({**model, "intermediate_size": 1536}))
    rule = "640 rows of a key-value head's projections do not divide over the 3 ranks that share it"
    found = faults(tmp_path, f"model.path={tmp_path}", "actor.tensor_parallel_size=12", world_size=12)
    nearest = "TP4 × PP1 × DP3, TP2 × PP1 × DP6, TP2 × PP2 × DP3"  # 3 of DP do not divide 64 samples
    assert found == [f"actor.tensor_parallel_size = 12: {rule}; nearest: {nearest}"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.expert_parallel_size=3", "actor.expert_parallel_size = 3: 8 experts do not divide over 3: divisors are "
         "1, 2, 4, 8; nearest: TP1 × PP1 × DP4 with EP4, TP1 × PP1 × DP4 with EP2, TP1 × PP2 × DP2 with EP2"),
        ("actor.expert_parallel_size=0", "actor.expert_parallel_size = 0: must be at least 1; nearest: 1"),
        ("actor.expert_parallel_size=8", "actor.expert_parallel_size = 8: 8 × actor.expert_tensor_parallel_size 1 does "
         "not divide the 4 ranks of a pipeline stage; nearest: TP1 × PP1 × DP4 with EP4, TP1 × PP1 × DP4 with EP2, "
         "TP1 × PP2 × DP2 with EP2"),
        ("actor.expert_tensor_parallel_size=3", "actor.expert_tensor_parallel_size = 3: 64 channels of an expert do "
         "not divide over 3: divisors are 1, 2, 4, 8, 16, 32, 64; nearest: TP1 × PP1 × DP4 with EP1 × ETP4, "
         "TP1 × PP1 × DP4 with EP1 × ETP2, TP2 × PP1 × DP2 with EP1 × ETP4 (sequence_parallel true)"),
        ("actor.tensor_parallel_size=2", "actor.sequence_parallel = false: experts need it where "
                                         "actor.tensor_parallel_size is above 1; nearest: true"),
        ("actor.expert_parallel_size=2 actor.pipeline_parallel_size=2 actor.order=tp-cp-dp-pp-ep",
         "actor.order = tp-cp-dp-pp-ep: experts need pp first or last; nearest: tp-cp-ep-dp-pp"),
        ("actor.expert_parallel_size=2 actor.expert_tensor_parallel_size=2 actor.order=ep-tp-cp-dp-pp",
         "actor.order = ep-tp-cp-dp-pp: experts need tp before ep; nearest: tp-cp-ep-dp-pp"),
    ],
)  # fmt: skip
def test_experts(tmp_path: Path, override: str, message: str) -> None:
    model = {**json.loads((QWEN / "config.json").read_text()), "model_type": "qwen3_moe", "num_experts": 8,
             "num_experts_per_tok": 2, "moe_intermediate_size": 64}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(model))
    found = faults(tmp_path, f"model.path={tmp_path}", *override.split(), world_size=4)
    assert message in found
    assert faults(tmp_path, f"model.path={tmp_path}", "actor.expert_parallel_size=4", world_size=4) == []


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
         "rope_scaling: rope_type 'longrope' is not supported; known: default, linear, llama3, yarn"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 64,
          "norm_topk_prob": True},
         "num_experts_per_tok is 1: a single normalized weight leaves its router untrained; at least 2, or "
         "norm_topk_prob false"),
    ],
)  # fmt: skip
def test_what_the_trainer_does_not_compute_is_said_before_anything_is_loaded(
    tmp_path: Path, keys: dict[str, Any], rule: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads((QWEN / "config.json").read_text()) | keys))
    assert faults(tmp_path, f"model.path={tmp_path}") == [f"model.path = {tmp_path}: {rule} ({tmp_path}/config.json)"]
    assert faults(tmp_path, f"model.path={tmp_path}", purpose="generate") == []  # vLLM computes it


def test_a_score_model_is_no_actor(tmp_path: Path) -> None:
    model = {**json.loads((QWEN / "config.json").read_text()), "architectures": ["Qwen2ForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps({**model, "num_labels": 1}))
    rule = "is a score model, which generates nothing; a language model is due"
    assert faults(tmp_path, f"model.path={tmp_path}") == [f"model.path = {tmp_path}: {rule}"]


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    overrides = ("actor.expert_parallel_size=2", "actor.expert_tensor_parallel_size=1")
    assert faults(tmp_path, *overrides, world_size=2) == [
        "actor.expert_parallel_size = 2: qwen2 has no experts; nearest: 1",
        "actor.expert_tensor_parallel_size = 1: qwen2 has no experts; nearest: null",
    ]


def test_layers_must_divide_over_stages(tmp_path: Path) -> None:
    """cases.md A09."""
    (fault,) = faults(tmp_path, "actor.pipeline_parallel_size=3", world_size=3)
    rule = "28 layers do not divide over 3: divisors are 1, 2, 4, 7, 14, 28; nearest: TP1 × PP1 × DP3"
    assert fault == f"actor.pipeline_parallel_size = 3: {rule}"


def test_the_world_must_divide_into_grids(tmp_path: Path) -> None:
    grid = ("actor.tensor_parallel_size=2", "actor.pipeline_parallel_size=2", "rollout.tensor_parallel_size=4")
    assert faults(tmp_path, *grid, world_size=8) == []
    assert faults(tmp_path, *grid, world_size=6) == [
        "actor.tensor_parallel_size = 2: 6 ranks do not divide into blocks of TP × PP = 4; nearest: "
        "TP2 × PP1 × DP3, TP1 × PP2 × DP3, TP1 × PP1 × DP6",
        "rollout.tensor_parallel_size = 4: 6 ranks do not divide into vLLM replicas of 4; nearest: "
        "rollout.tensor_parallel_size = 2",
    ]
    (fault,) = faults(tmp_path, "actor.tensor_parallel_size=4", world_size=1)
    assert "blocks of TP × PP = 4: start at least 4 processes, for example with --nproc 4; nearest: " in fault


def test_lists_of_ranks(tmp_path: Path) -> None:
    assert faults(tmp_path, "rollout.ranks=[0, 1]", "rollout.tensor_parallel_size=2", world_size=4) == []
    assert faults(tmp_path, "rollout.ranks=[0, 2]", world_size=2) == [
        "rollout.ranks = [0, 2]: the job has the ranks 0 to 1; nearest: all"
    ]
    for ranks in ("[]", "[0, 0]", "[-1]", "[1, 0]"):
        (fault,) = faults(tmp_path, f"actor.ranks={ranks}", world_size=2)
        assert fault == f"actor.ranks = {ranks}: must be different ranks in ascending order; nearest: all"


def test_the_host_updates_only_bfloat16_models(tmp_path: Path) -> None:
    assert faults(tmp_path, "optimizer.cpu_offload=0.5", "model.dtype=bfloat16") == []
    (fault,) = faults(tmp_path, "optimizer.cpu_offload=0.5", "model.dtype=float32")
    assert fault.startswith("optimizer.cpu_offload = 0.5: the host updates float32 weights of a bfloat16 model")


def test_batch_arithmetic(tmp_path: Path) -> None:
    """cases.md H04: 8 ranks, TP2 PP2 so DP2, 4 mini-batches, 6 prompts, n 2: 12 % 8 = 4."""
    overrides = ("actor.tensor_parallel_size=2", "actor.pipeline_parallel_size=2", "algorithm.mini_batches=4")
    batch = ("rollout.n=2", "trainer.prompts_per_step=6")
    assert faults(tmp_path, *overrides, *batch, world_size=8) == [
        "trainer.prompts_per_step = 6: 6 prompts × 2 responses = 12 samples do not divide over "
        "4 mini-batches × 2 data-parallel ranks = 8; nearest: 4 or 8"
    ]
    assert faults(tmp_path, *overrides, "rollout.n=2", "trainer.prompts_per_step=8", world_size=8) == []


@pytest.mark.parametrize("advantage", GROUP_ADVANTAGES)
def test_groups_of_one_have_nothing_to_compare(tmp_path: Path, advantage: str) -> None:
    """cases.md B16."""
    (fault,) = faults(tmp_path, "rollout.n=1", f"algorithm.advantage={advantage}")
    assert fault == f"rollout.n = 1: {advantage} compares the responses to a prompt and needs at least 2; nearest: 2"
    assert faults(tmp_path, "rollout.n=1", "algorithm.advantage=reinforce_plus_plus") == []


def test_k1_in_the_loss(tmp_path: Path) -> None:
    k1 = ("algorithm.kl_estimator=k1", "algorithm.kl_coef=0.1")
    (fault,) = faults(tmp_path, *k1)
    assert fault.startswith("algorithm.kl_estimator = k1: k1 in the loss")
    assert fault.endswith("nearest: k1-straight-through")
    assert faults(tmp_path, *k1, "algorithm.kl_in=reward") == []
    assert faults(tmp_path, "algorithm.kl_estimator=k1-straight-through", k1[1]) == []


def test_aggregation_length(tmp_path: Path) -> None:
    """cases.md B13: the divisor comes from the configuration, never from padding."""
    normed = "algorithm.aggregation=seq-mean-token-sum-norm"
    (missing,) = faults(tmp_path, normed)
    assert missing.startswith("algorithm.aggregation_length = null: ")
    assert missing.endswith("nearest: 512")
    assert faults(tmp_path, normed, "algorithm.aggregation_length=512") == []


@pytest.mark.parametrize("truncation", ["rollout.top_p=0.9", "rollout.top_k=20"])
def test_truncated_sampling_needs_a_correction(tmp_path: Path, truncation: str) -> None:
    """cases.md B20."""
    (fault,) = faults(tmp_path, truncation)
    assert "set algorithm.importance_correction" in fault
    assert faults(tmp_path, truncation, "algorithm.importance_correction=tis") == []
    assert faults(tmp_path, truncation, purpose="generate") == []


def test_lengths_must_fit_the_model(tmp_path: Path) -> None:
    assert faults(tmp_path, "rollout.max_prompt_length=2048", "rollout.max_response_length=30720") == []
    assert faults(tmp_path, "rollout.max_prompt_length=2048", "rollout.max_response_length=30721") == [
        "rollout.max_response_length = 30721: with rollout.max_prompt_length = 2048 it is 32769 tokens; the model has "
        "32768; nearest: 30720"
    ]
    (fault,) = faults(tmp_path, "rollout.max_prompt_length=32768")
    assert fault.endswith("nearest: 16384 with rollout.max_prompt_length=16384")


def test_models_that_cannot_be_used_are_one_more_fault(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "empty").mkdir()
    (tmp_path / "step_000010").mkdir()
    (tmp_path / "step_000010" / "manifest.json").touch()
    for path, words in (
        (tmp_path / "none", "no such folder"),
        (tmp_path / "empty", "no config.json"),
        (tmp_path / "step_000010", "is a checkpoint of a run, of which `rlflow-convert export` makes a model's folder"),
        (tmp_path, "model_type 'gpt2' is not one of"),
    ):
        found = faults(tmp_path, f"model.path={path}", "rollout.n=0")
        assert len(found) == 2
        assert found[0].startswith(f"model.path = {path}: ")
        assert words in found[0]


@pytest.mark.parametrize(
    ("key", "registry"),
    [
        ("advantage", "advantage"), ("policy_loss", "policy_loss"), ("aggregation", "aggregation"),
        ("kl_estimator", "kl_estimator"),
    ],
)  # fmt: skip
def test_names_of_algorithms_are_those_registered(key: str, registry: str) -> None:
    """The schema lists them, so that a check needs no torch."""
    from rlflow import algorithms

    assert sorted(get_args(get_type_hints(Algorithm)[key])) == getattr(algorithms, registry).names()


def test_a_model_may_be_evaluated_on_fewer_ranks_than_its_actor_needs(tmp_path: Path) -> None:
    assert faults(tmp_path, "actor.tensor_parallel_size=2", world_size=1)
    assert not faults(tmp_path, "actor.tensor_parallel_size=2", world_size=1, purpose="evaluate")


def test_what_is_verified_has_the_grid_of_a_run_and_needs_no_data(tmp_path: Path) -> None:
    assert not faults(tmp_path, "data.train=", "rewards=[]", world_size=2, purpose="verify")
    (fault,) = faults(tmp_path, "actor.tensor_parallel_size=8", world_size=8, purpose="verify")
    assert fault.startswith("actor.tensor_parallel_size = 8: 28 attention heads do not divide over 8")


@pytest.mark.parametrize("purpose", get_args(Purpose))
def test_no_command_asks_a_model_without_experts_for_their_routing(tmp_path: Path, purpose: Purpose) -> None:
    assert faults(tmp_path, "actor.router_replay=true", purpose=purpose) == [
        "actor.router_replay = true: qwen2 has no experts; nearest: false"
    ]
