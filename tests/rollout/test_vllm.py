"""The real engine on tiny models: what it samples, from which weights, and on which ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_bridge import compat
from tests.rollout import ranks
from tests.rollout.ranks import RESPONSE, STOPS, Alone, Keys
from tests.workers import World

END_OF_SEQUENCE = (3, 1)  # tests/tiny.py


@pytest.fixture(scope="module", params=["llama-tied", "qwen2-untied"])
def folder(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Path:
    family, tied = request.param.split("-")
    return tiny_model(family, tied == "tied")


@pytest.fixture(scope="module")
def alone(world: World, folder: Path) -> Alone:
    return world(1, ranks.alone, folder)[0]


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", True)


@pytest.fixture(scope="module")
def alone_keys(world: World, llama: Path) -> list[Keys]:
    """Samples of steps 2, 3 and 2 again in deterministic mode, on one rank."""
    return world(1, ranks.sampled, llama, 1, "all", True)[0]


def test_starting_vllm_leaves_the_process_as_it_was(alone: Alone) -> None:
    assert alone.process_kept == {"generators": True, "set_num_threads": True, "variables": True}


def test_the_jobs_timeout_reaches_vllms_groups(alone: Alone) -> None:
    """cases.md G04"""
    assert alone.timeouts == {ranks.TIMEOUT}


def test_nothing_is_sampled_from_dummy_weights(alone: Alone) -> None:
    kind, message = alone.errors["before the first sync"]
    assert kind == "NotReady"
    assert "only after a sync" in message


def test_log_probs_are_those_of_transformers_at_the_sampling_temperature(alone: Alone) -> None:
    assert alone.gaps["first sync"] < 1e-4


def test_greedy_takes_the_likeliest_token(alone: Alone) -> None:
    assert alone.greedy_is_argmax


def test_a_replica_counts_its_tokens_and_seconds(alone: Alone) -> None:
    assert alone.generation is not None
    assert alone.generation.tokens == sum(len(sample.response_ids) for sample in alone.samples["step 2"])
    assert alone.generation.seconds > 0


def test_a_step_always_samples_the_same_and_another_step_something_else(alone: Alone) -> None:
    """cases.md C03: reproducible on a rerun, and the 32 responses to a prompt are drawn independently."""
    first = ranks.keys(alone.samples["step 2"])
    assert first == alone.sampled["step 2 again"]
    assert {(prompt, index) for prompt, index, _ in first} == {
        (prompt, index) for prompt, index, _ in alone.sampled["step 3"]
    }
    assert first != alone.sampled["step 3"]
    assert len({ids for prompt, _, ids in ranks.keys(alone.samples["even"]) if prompt == "train/0"}) == 32


def test_a_response_ends_with_the_first_stop_id_or_at_the_limit(alone: Alone) -> None:
    """cases.md B30, C07: every id of the model's list stops, is kept with its log-prob, and is not truncation."""
    stops = {*END_OF_SEQUENCE, *STOPS}
    ends = set()
    for sample in alone.samples["even"]:
        *before, last = sample.response_ids
        assert len(sample.log_probs) == len(sample.response_ids) <= RESPONSE
        assert not stops & set(before)
        assert sample.truncated == (last not in stops)
        assert sample.truncated <= (len(sample.response_ids) == RESPONSE)
        ends.add(last if last in stops else None)
    assert ends >= {*END_OF_SEQUENCE, None}


def test_no_stop_id_comes_before_min_tokens(alone: Alone) -> None:
    assert min(len(sample.response_ids) for sample in alone.samples["even"]) < 6
    assert min(len(sample.response_ids) for sample in alone.samples["long"]) >= 6


def test_samples_come_in_prompt_order_with_text_and_version(alone: Alone) -> None:
    samples = alone.samples["step 2"]
    assert [(sample.prompt.id, sample.index) for sample in samples] == [
        (f"train/{prompt}", index) for prompt in range(5) for index in range(3)
    ]
    assert any(sample.text for sample in samples)
    assert {sample.weights_version for sample in samples} == {1}


def test_the_bridge_is_proven_against_vllms_loader(alone: Alone) -> None:
    assert alone.in_place


def test_the_proof_finds_a_layout_that_is_wrong_but_fits(alone: Alone) -> None:
    assert alone.wrong_layout == [f"model.layers.{layer}.mlp.gate_up_proj.weight" for layer in range(4)]


def test_new_weights_leave_nothing_of_the_old_ones_in_the_cache(alone: Alone) -> None:
    """cases.md C01, with the real engine: prompts that it has cached, then other weights."""
    assert alone.gaps["in place"] < 1e-4
    assert alone.versions == [3, 4]


def test_vllms_own_loader_serves_where_the_proof_fails(alone: Alone) -> None:
    assert alone.gaps["by vLLM's loader"] < 1e-4


def test_an_incomplete_sync_names_the_fused_target_and_stops_generation(alone: Alone) -> None:
    """cases.md A29"""
    kind, message = alone.errors["one tensor missing"]
    assert kind == "UserError"
    prefix = "model.layers.1.self_attn"
    assert f"{prefix}.qkv_proj.weight lacks its part {prefix}.v_proj.weight" in message
    assert alone.errors["after the failed sync"][0] == "NotReady"
    assert "model.embed_tokens.weight lacks its part" in alone.errors["nothing given"][1]


def test_deterministic_samples_do_not_depend_on_the_layout(world: World, llama: Path, alone_keys: list[Keys]) -> None:
    """One engine, two replicas and one tensor-parallel engine sample the same; TP rank 0 returns each sample once."""
    replicas = world(2, ranks.sampled, llama, 1, "all", True)
    assert sorted(replicas[0][0] + replicas[1][0]) == sorted(alone_keys[0])
    assert [len(found[0]) for found in replicas] in ([7, 8], [8, 7])
    tensor_parallel = world(2, ranks.sampled, llama, 2, "all", True)
    assert tensor_parallel == [alone_keys, [[], [], []]]


def test_fast_samples_depend_on_the_step_alone(world: World, llama: Path) -> None:
    step_2, step_3, again = world(2, ranks.sampled, llama, 2, "all", False)[0]
    assert step_2 == again != step_3


def test_more_tensor_parallel_ranks_than_kv_heads_repeat_them(world: World, tiny_model: Callable[..., Path]) -> None:
    for proven, gap in world(2, ranks.proven_gap, tiny_model("qwen2", True, num_key_value_heads=1), 2):
        assert proven
        assert gap < 1e-4


@pytest.mark.skipif(not compat.has_unsorted_groups(), reason="torch sorts the ranks of every group")
def test_an_engine_may_number_its_ranks_anew(world: World, llama: Path, alone_keys: list[Keys]) -> None:
    first, second = world(2, ranks.numbered, llama, (1, 0))
    assert (first[0], second[0]) == ([], alone_keys[0])
    assert first[1] == second[1] == {"received": 0, "in_place": True}


def test_a_subset_of_the_ranks_rolls_out(world: World, llama: Path, alone_keys: list[Keys]) -> None:
    """TP2 on ranks 0–1 and 1–2 of 3; afterwards all three still make groups together."""
    by_rank = world(3, ranks.on_subsets, llama, [(0, 1), (1, 2)])
    assert [[len(samples) for samples, _ in found] for found in by_rank] == [[15, 0], [0, 15], [0, 0]]
    assert by_rank[0][0][0] == by_rank[1][1][0] == alone_keys[0]
    assert {members for found in by_rank for _, members in found} == {3.0}


GRIDS = {1: [(2, 1), (1, 2)], 2: [(1, 1), (1, 2), (2, 1)]}  # rollout TP -> actor (TP, PP) on two ranks


@pytest.fixture(scope="module")
def from_megatron(world: World, tiny_model: Callable[..., Path]) -> dict[int, list[Any]]:
    """Rollout TP -> what each of two ranks showed."""
    folder = tiny_model("qwen2", True)
    return {tensor: world(2, ranks.from_megatron, folder, tensor, grids) for tensor, grids in GRIDS.items()}


@pytest.mark.parametrize("tensor", GRIDS)
def test_vllm_samples_from_megatrons_weights(from_megatron: dict[int, list[Any]], tensor: int) -> None:
    """TP2 → TP1 × 2, PP2 → TP1 × 2, TP1 → TP2, PP2 → TP2, TP2 → TP2."""
    for facts, _ in from_megatron[tensor]:
        assert max(fact["gap"] for fact in facts) < 1e-4


def test_only_missing_bytes_move(from_megatron: dict[int, list[Any]]) -> None:
    received = {
        (grid, tensor): [facts[number]["received"] for facts, _ in by_rank]
        for tensor, by_rank in from_megatron.items()
        for number, grid in enumerate(GRIDS[tensor])
    }
    assert received[(2, 1), 2] == received[(1, 1), 2] == [0, 0]  # every rank has what it needs
    assert min(received[(2, 1), 1] + received[(1, 2), 1] + received[(1, 2), 2]) > 0


def test_a_jobs_shared_memory_is_its_own_and_leaves_no_file(from_megatron: dict[int, list[Any]]) -> None:
    """vLLM's names would be those of every other job on the machine, and of every job that was killed."""
    (_, first), (_, second) = from_megatron[2]
    assert len(first & second) >= 2  # and those of engines that these processes had before
    assert all(name.startswith("/dev/shm/rlflow-") and name.endswith("(deleted)") for name in first | second)
