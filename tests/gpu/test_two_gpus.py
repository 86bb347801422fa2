"""On two GPUs: every grid learns what one GPU learns, and weights cross between grids by NCCL, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.families import load_architecture
from megatron_bridge.layouts import HFLayout, MegatronLayout, VLLMLayout
from tests.end_to_end import configuration, records, succeed
from tests.gpu import ranks
from tests.gpu.devices import needs_gpus
from tests.roles.parity import MATRIX, Matrix
from tests.roles.runs import Case
from tests.workers import World

pytestmark = needs_gpus(2)

BOUND = 1e-4
"""Relative; the GPU's sums of many float32 numbers come in another order each time."""

ROWS = [(family, case) for family, case in MATRIX if case.ranks == 2]


@pytest.fixture(scope="module")
def matrix(gpus: World, tiny_model: Callable[..., Path]) -> Matrix:
    return Matrix(gpus, tiny_model)


@pytest.mark.parametrize(("family", "case"), ROWS, ids=lambda given: getattr(given, "name", given))
def test_a_grid_computes_what_one_gpu_does(matrix: Matrix, family: str, case: Case) -> None:
    """The rows of docs/parallelism.md over NCCL, virtual stages among them."""
    found = matrix.measure(family, case)
    print(family, case.name, found)
    assert {column: error for column, error in found.items() if not error <= BOUND} == {}


def test_transfers_arrive_bit_for_bit(gpus: World, qwen: Path) -> None:
    arch = load_architecture(qwen)
    tp2, pp2, dp2 = MegatronLayout(arch, tp=2), MegatronLayout(arch, pp=2), MegatronLayout(arch, dp=2)
    pairs = {
        "TP2 → vLLM TP2": (tp2, VLLMLayout(arch, 2)),
        "TP2 → vLLM TP1 × 2": (tp2, VLLMLayout(arch, 1, (0, 1))),
        "PP2 → vLLM TP2": (pp2, VLLMLayout(arch, 2)),
        "PP2 → vLLM TP1 × 2": (pp2, VLLMLayout(arch, 1, (0, 1))),
        "DP2 → vLLM TP2": (dp2, VLLMLayout(arch, 2)),
        "TP2 → PP2": (tp2, pp2),
        "PP2 → Hugging Face on one rank": (pp2, HFLayout(arch, (0,))),
    }
    found = gpus(2, ranks.transfer, qwen, list(pairs.values()))
    for name, (_, first), (_, second) in zip(pairs, *found, strict=True):
        received, seconds = first.received + second.received, max(first.seconds, second.seconds)
        print(f"{name}: {received / 1e6:.1f} MB received, {(first.local + second.local) / 1e6:.1f} MB local,", end=" ")
        print(f"{seconds * 1e3:.1f} ms, {received / seconds / 1e9:.1f} GB/s received")
    assert all(equal for rank in found for equal, _ in rank)
    assert found[0][0][1].received == found[1][0][1].received == 0  # equal grids exchange nothing


GRIDS: dict[str, dict[str, Any]] = {"TP2": {"tensor": 2}, "PP2": {"pipeline": 2}, "DP2": {}}


@pytest.mark.parametrize("tensor", [2, 1], ids=["vLLM TP2", "vLLM TP1 × 2"])
def test_vllm_agrees_with_every_grid(fresh_gpus: World, qwen: Path, tensor: int) -> None:
    found = fresh_gpus(2, ranks.roll_from_grids, qwen, tensor, list(GRIDS.values()))
    for name, (gap, traffic) in zip(GRIDS, found[0], strict=True):
        print(f"{name} → vLLM TP{tensor}: {gap} {traffic}")
        assert gap.mean < 0.05
        assert gap.k3 < 2e-3


def test_a_run_on_two_gpus(tmp_path: Path, shallow_qwen: Path) -> None:
    config = configuration(
        tmp_path,
        shallow_qwen,
        actor={"tensor_parallel_size": 2, "sequence_parallel": True, "micro_batch_tokens": 8192},
        optimizer={"lr": 1e-5},
        algorithm={"kl_coef": 1e-3},
        rollout={"n": 8, "max_response_length": 64, "kv_cache_gib": 2.0},
        evaluation={"at_start": False},
        trainer={"steps": 2, "save_every": 2},
    )
    succeed("train", config, "model.dtype=bfloat16", "--nproc", "2")
    run = records(tmp_path / "run")
    print({name: run[-1][name] for name in run[-1] if name.startswith(("time/", "mismatch/", "perf/", "actor/"))})
    assert [record["step"] for record in run] == [1, 2]
    assert all(record["mismatch/kl"] < 2e-3 for record in run)


def test_vllm_on_one_rank_of_two(fresh_gpus: World, qwen: Path) -> None:
    gap = fresh_gpus(2, ranks.roll_on_one_of, qwen, 0)[0]
    assert gap.mean < 0.05


PLACES: dict[str, dict[str, Any]] = {
    "side by side": {"critic": {"ranks": [1]}, "reference": {"ranks": [1]}, "actor": {"ranks": [0]}},
    "on both GPUs": {},
}


@pytest.mark.parametrize("places", PLACES)
def test_ppo_with_roles_side_by_side_and_on_both_gpus(tmp_path: Path, shallow_qwen: Path, places: str) -> None:
    sections = {"actor": {}, "critic": {}, "reference": {}, **PLACES[places]}
    sections["actor"] = {"micro_batch_tokens": 8192, **sections["actor"]}
    config = configuration(
        tmp_path,
        shallow_qwen,
        **sections,
        optimizer={"lr": 1e-5},
        algorithm={"advantage": "gae", "kl_coef": 1e-3, "mini_batches": 2},
        rollout={"n": 8, "max_response_length": 128, "ignore_eos": True, "kv_cache_gib": 4.0},
        evaluation={"at_start": False},
        trainer={"steps": 4, "prompts_per_step": 32, "save_every": 4, "export": False},
    )
    succeed("train", config, "model.dtype=bfloat16", "--nproc", "2")
    run = records(tmp_path / "run")
    shown = ("time/", "memory/", "mismatch/", "critic/explained", "rollout/")
    print(places, {name: round(value, 4) for name, value in run[-1].items() if name.startswith(shown)})
    assert [record["step"] for record in run] == [1, 2, 3, 4]
    assert all(record["mismatch/kl"] < 2e-3 for record in run)
