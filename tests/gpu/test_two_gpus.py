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
from tests.roles.runs import Case
from tests.roles.test_engine import GRADIENT_STEP, assert_same_change, names
from tests.workers import World

pytestmark = needs_gpus(2)

CASES = [
    Case("TP2", 2, {"tensor": 2}),
    Case("TP2 with sequence parallelism", 2, {"tensor": 2}, {"sequence_parallel": True}),
    Case("PP2", 2, {"pipeline": 2}),
    Case("DP2 with overlap", 2),
]


@pytest.fixture(scope="module")
def alone(gpus: World, tiny_model: Callable[..., Path]) -> Any:
    return gpus(1, ranks.learn_on_grid, tiny_model("qwen2"), Case("one", 1), GRADIENT_STEP)[0]


@pytest.mark.parametrize("case", CASES, ids=names)
def test_gradients_are_those_of_one_gpu(gpus: World, tiny_model: Callable[..., Path], alone: Any, case: Case) -> None:
    found = gpus(2, ranks.learn_on_grid, tiny_model("qwen2"), case, GRADIENT_STEP)
    assert_same_change(found[0], alone, 1e-4)
    assert found[0].metrics[0]["loss"] == pytest.approx(alone.metrics[0]["loss"], abs=1e-5)
    assert found[0].metrics == found[1].metrics


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_of_experts_on_two_gpus(gpus: World, tiny_model: Callable[..., Path], overlap: bool) -> None:
    folder = tiny_model("qwen3_moe")
    one = gpus(1, ranks.learn_on_grid, folder, Case("one", 1), GRADIENT_STEP)[0]
    case = Case("EP2", 2, {"expert": 2}, {"overlap": overlap})
    found = gpus(2, ranks.learn_on_grid, folder, case, GRADIENT_STEP)[0]
    assert_same_change(found, one, 1e-4)
    assert found.metrics[0]["engine/grad_norm"] == pytest.approx(one.metrics[0]["engine/grad_norm"], rel=1e-4)


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
