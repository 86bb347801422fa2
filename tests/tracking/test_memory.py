"""Memory of phases: peaks of all that a GPU holds, parts within phases, and the largest over the ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlflow.tracking.memory import GIB, PhaseMemory, max_over_ranks


class FakeGPU:
    """An allocator as torch sees it, and memory besides it that only the driver counts; in GiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = self.outside = self.asleep = self.pool = 0.0
        for name, value in {
            "is_initialized": lambda: True,
            "mem_get_info": lambda: (int((80 - self.peak_ever - self.outside + self.asleep) * GIB), 80 * GIB),
            "memory_reserved": lambda: int(self.peak_ever * GIB),
            "max_memory_allocated": lambda: int(self.peak * GIB),
            "reset_peak_memory_stats": self.reset,
            "memory_snapshot": lambda: [self.segment((0, 0), self.allocated), self.segment((0, 1), 0.0)],
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        self.peak_ever = 0.0

    def segment(self, pool: tuple[int, int], allocated: float) -> dict[str, Any]:
        """All of torch's memory as one block, or that of captured graphs."""
        size = self.pool if pool != (0, 0) else self.peak_ever - self.pool
        sizes = {"total_size": int(size * GIB), "allocated_size": int(allocated * GIB)}
        return {"segment_pool_id": pool, **sizes}

    def reset(self) -> None:
        self.peak = self.allocated

    def allocate(self, amount: float) -> None:
        self.allocated += amount
        self.peak, self.peak_ever = max(self.peak, self.allocated), max(self.peak_ever, self.allocated)


def test_a_gpus_phases_have_peaks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL and the context take 1; the engine's 20 are torch's to its own mind but unmapped while it sleeps."""
    gpu, memory = FakeGPU(monkeypatch), PhaseMemory()
    gpu.outside = 1.0
    gpu.allocate(20)
    with memory.phase("generate"):
        gpu.asleep = 20
    with memory.phase("update"):
        gpu.allocate(2)
        with memory.phase("update/actor"):
            gpu.allocate(30)
            gpu.allocate(-25)
        gpu.allocate(4)
    with memory.phase("sync"):
        gpu.asleep = 0
    assert memory.take() == pytest.approx({
        "memory/generate_gib": 21,  # engine and outside
        "memory/update/actor_gib": 33,  # 2 + 30 and outside
        "memory/update_gib": 33,
        "memory/sync_gib": 32,  # engine, 2 + 5 + 4, outside
    })  # fmt: skip
    assert memory.take() == {}


def test_what_graphs_keep_counts_once_they_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture allocates 8 and lets go of them, which its replays use all the same; 2 are tensors of others."""
    gpu, memory = FakeGPU(monkeypatch), PhaseMemory()
    gpu.allocate(2)
    with memory.phase("update"):
        gpu.allocate(8)
        gpu.allocate(-8)
        gpu.pool = 8.0
    assert memory.take() == {"memory/update_gib": 10.0}
    with memory.phase("update"):
        pass
    assert memory.take() == {"memory/update_gib": 10.0}


def test_a_process_counts_its_resident_set() -> None:
    memory = PhaseMemory()
    with memory.phase("update"):
        block = torch.ones(64 << 18)  # 64 MiB
    del block
    with memory.phase("sync"):
        pass
    found = memory.take()
    assert found.keys() == {"memory/update_gib", "memory/sync_gib"}
    assert found["memory/update_gib"] > 64 / 1024


def own_part() -> dict[str, float]:
    rank = dist.get_rank()
    values = {"memory/generate_gib": 1.0 + rank, "time/update/actor": 4.0 - rank}
    return max_over_ranks(dict(reversed(values.items())) if rank else values)


def test_the_largest_rank_counts(world: Callable[..., list[Any]]) -> None:
    wanted = {"memory/generate_gib": 2.0, "time/update/actor": 4.0}
    assert world(2, own_part) == [wanted, wanted]


def part_of_its_role() -> dict[str, float]:
    rank = dist.get_rank()
    return max_over_ranks({"memory/update_gib": 3.0 - rank, f"memory/update/{('actor', 'critic')[rank]}_gib": 1.0})


def test_ranks_may_have_parts_of_their_own(world: Callable[..., list[Any]]) -> None:
    wanted = {"memory/update_gib": 3.0, "memory/update/actor_gib": 1.0, "memory/update/critic_gib": 1.0}
    assert world(2, part_of_its_role) == [wanted, wanted]


def test_forgotten_phases_count_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the walk over torch's blocks that `take` is asked for once a step."""
    FakeGPU(monkeypatch)
    memory = PhaseMemory()
    with memory.phase("evaluate"):
        pass
    monkeypatch.setattr(torch.cuda, "memory_snapshot", None)
    memory.forget()
    monkeypatch.undo()
    assert memory.take() == {}
