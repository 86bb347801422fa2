"""On one GPU: what leaves it comes back bit for bit, its memory is free meanwhile, and the host does AdamW's part."""

from pathlib import Path

import pytest

from tests.end_to_end import configuration, records, succeed
from tests.gpu import memory_ranks
from tests.gpu.devices import needs_gpus
from tests.workers import World

pytestmark = needs_gpus(1)


def test_what_leaves_comes_back_and_its_memory_is_free_meanwhile(fresh_gpus: World, qwen: Path) -> None:
    """2 bytes of weights, 4 of gradients and 12 of optimizer state for each parameter."""
    seen = fresh_gpus(1, memory_ranks.leave_and_come_back, qwen)[0]
    print(seen)
    assert seen.bytes_equal
    expected = 18 * seen.parameters
    assert seen.allocated["there"] - seen.allocated["away"] == pytest.approx(expected, rel=0.01)
    assert seen.free["away"] - seen.free["there"] > 0.9 * expected  # other tensors share some of torch's segments
    stayed, left = seen.next_steps
    assert left["loss"] == pytest.approx(stayed["loss"], abs=1e-4)
    assert left["engine/grad_norm"] == pytest.approx(stayed["engine/grad_norm"], rel=1e-2)


def test_the_host_does_its_share_of_adamw(fresh_gpus: World, shallow_qwen: Path, tmp_path: Path) -> None:
    roots = {0.0: None, 0.5: tmp_path, 1.0: None}  # a checkpoint has 2.8 GB: one is enough
    lessons = {
        share: fresh_gpus(1, memory_ranks.learn_on_host, shallow_qwen, share, root)[0] for share, root in roots.items()
    }
    for share, lesson in lessons.items():
        print(share, lesson)
        for mine, theirs in zip(lesson.metrics, lessons[0.0].metrics, strict=True):
            assert mine["engine/grad_norm"] == pytest.approx(theirs["engine/grad_norm"], rel=0.02)
    unbroken, resumed = lessons[0.5].resumed
    assert resumed["engine/grad_norm"] == pytest.approx(unbroken["engine/grad_norm"], rel=0.02)
    assert resumed["loss"] == pytest.approx(unbroken["loss"], abs=1e-3)
    assert lessons[1.0].allocated < lessons[0.5].allocated < lessons[0.0].allocated


def test_ppo_with_all_its_roles_on_one_gpu(tmp_path: Path, shallow_qwen: Path) -> None:
    """Actor, critic, reference and vLLM take turns; the memory of each phase is recorded, and the run goes on.

    Nothing else may use the GPU meanwhile: vLLM compares how much of it is free before and after it sleeps.
    """
    config = configuration(
        tmp_path,
        shallow_qwen,
        actor={"micro_batch_tokens": 8192, "offload": True},
        reference={"update_every": 1, "ema": 0.5},
        optimizer={"lr": 1e-5},
        algorithm={"advantage": "gae", "kl_coef": 1e-3, "kl_in": "reward", "kl_estimator": "k1", "mini_batches": 2},
        rollout={"n": 4, "max_response_length": 64, "kv_cache_gib": 2.0, "sleep_level": 2, "cuda_graphs": False},
        trainer={"steps": 2, "prompts_per_step": 8, "save_every": 2, "export": False},
    )
    succeed("train", config, "model.dtype=bfloat16")
    succeed("train", config, "model.dtype=bfloat16", "trainer.steps=3", "trainer.export=true")
    run = records(tmp_path / "run")
    print({name: run[-1][name] for name in run[-1] if name.startswith(("memory/", "time/", "mismatch/", "critic/"))})
    assert [record["step"] for record in run] == [0, 1, 2, 3]
    for record in run[1:]:
        assert record["mismatch/kl"] < 2e-3
        assert record["critic/grad_norm"] > 0
