"""The order in which an engine may be used, on a fake one that remembers which weights its cache came from."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_bridge.errors import SyncError
from megatron_bridge.execute import connect
from megatron_bridge.layouts import MegatronLayout, VLLMLayout
from rlflow.rollout.engine import Lifecycle, NotReady
from tests.bridge.toys import empty, flip, labelled, on_arrival, shards, toy


class FakeEngine:
    """Keeps per prompt the version of the weights that filled its key-value cache, and all calls in order."""

    def __init__(self) -> None:
        self.weights, self.busy = 0, False
        self.cache: dict[str, int] = {}
        self.calls: list[str] = []

    def write(self, version: int) -> None:
        self.calls.append("write")
        self.weights = version

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        if not self.busy:
            self.cache.clear()
        return not self.busy

    def generate(self, prompt: str) -> int:
        """The version of the cached keys and values that the response attends to."""
        self.calls.append("generate")
        return self.cache.setdefault(prompt, self.weights)

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags[0]}")


def ready(engine: FakeEngine, sleep_level: int = 2) -> Lifecycle:
    lifecycle = Lifecycle(engine, sleep_level)
    with lifecycle.updating():
        engine.write(1)
    return lifecycle


def test_nothing_is_sampled_before_the_first_sync() -> None:
    lifecycle = Lifecycle(FakeEngine(), 0)
    with pytest.raises(NotReady, match="no complete weights"):
        lifecycle.require_ready()


def test_every_token_comes_from_the_cache_of_the_current_weights() -> None:
    """cases.md C01: update, finish, reset, generate, in this order."""
    engine = FakeEngine()
    lifecycle = ready(engine)
    for version in (1, 2, 3):
        with lifecycle.updating():
            engine.write(version)
        lifecycle.require_ready()
        assert engine.generate("the same prompt") == version
    assert engine.calls[2:] == ["write", "reset", "generate"] * 3
    assert lifecycle.version == 4


def test_a_refused_reset_of_the_prefix_cache_is_not_ignored() -> None:
    """cases.md C01: vLLM answers False while requests run."""
    engine = FakeEngine()
    lifecycle = ready(engine)
    engine.busy = True
    with pytest.raises(NotReady, match="prefix cache"), lifecycle.updating():
        engine.write(2)
    with pytest.raises(NotReady):
        lifecycle.require_ready()
    assert lifecycle.version == 1


def test_nothing_is_sampled_from_half_written_weights() -> None:
    lifecycle = ready(FakeEngine())
    with pytest.raises(ConnectionError), lifecycle.updating():
        raise ConnectionError
    with pytest.raises(NotReady, match="no complete weights"):
        lifecycle.require_ready()


def _sync_three_times() -> list[str]:
    """What an engine on each rank says after a sync, after one of which rank 1 got a wrong bit, and after a third."""
    rank, arch, said = dist.get_rank(), toy(), []
    source, target = MegatronLayout(arch, tp=2), VLLMLayout(arch, 1, (0, 1))
    held, filled = shards(labelled(arch), source)[rank], empty(target, rank)
    transfer = connect(source, held, target, filled, rank=rank, dtype=torch.int32, checksum=True)
    lifecycle = Lifecycle(FakeEngine(), 0)
    for number in range(3):
        if rank == 1:
            on_arrival(transfer, 0, flip if number == 1 else lambda bucket: None)
        try:
            with lifecycle.updating():
                transfer.run()
            lifecycle.require_ready()
            said.append("ready")
        except SyncError:
            with pytest.raises(NotReady) as error:
                lifecycle.require_ready()
            said.append(str(error.value))
    return said


def test_a_transfer_that_arrives_wrong_on_one_rank_stops_the_engines_of_all(world: Callable[..., Any]) -> None:
    refused = "the engine holds no complete weights: generate only after a sync that finished"
    assert world(2, _sync_three_times) == [["ready", refused, "ready"]] * 2


def test_sleep_level_2_drops_the_weights() -> None:
    """cases.md C10: generate needs weights written since, and the cache awake."""
    engine = FakeEngine()
    lifecycle = ready(engine, sleep_level=2)
    lifecycle.sleep()
    lifecycle.sleep()
    with pytest.raises(NotReady, match="asleep"), lifecycle.updating():
        pass
    lifecycle.wake("weights")
    with lifecycle.updating():
        engine.write(2)
    with pytest.raises(NotReady, match="kv_cache are asleep"):
        lifecycle.require_ready()
    lifecycle.wake("kv_cache")
    lifecycle.wake("kv_cache")
    lifecycle.require_ready()
    assert engine.calls[2:] == ["sleep 2", "wake weights", "write", "reset", "wake kv_cache"]

    lifecycle.sleep()
    lifecycle.wake("weights")
    lifecycle.wake("kv_cache")
    with pytest.raises(NotReady, match="no complete weights"):
        lifecycle.require_ready()


def test_sleep_level_1_keeps_the_weights() -> None:
    lifecycle = ready(FakeEngine(), sleep_level=1)
    lifecycle.sleep()
    lifecycle.wake("weights")
    lifecycle.wake("kv_cache")
    lifecycle.require_ready()


class Device(FakeEngine):
    """A GPU of 100 bytes, and an engine on it that takes 20 for weights and 10 for its cache, not by torch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.kept, self.held = 0, 30  # by torch for later, by the engine
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 - self.kept - self.held, 100))
        monkeypatch.setattr(torch.cuda, "empty_cache", self.give_back)

    def give_back(self) -> None:
        self.calls.append("give back")
        self.kept = 0

    def sleep(self, level: int) -> None:
        super().sleep(level)
        self.held = 0

    def wake_up(self, tags: list[str]) -> None:
        super().wake_up(tags)
        self.held += {"weights": 20, "kv_cache": 10}[tags[0]]
        if self.kept + self.held > 100:
            raise RuntimeError("CUDA Error: out of memory")


@pytest.mark.parametrize(("kept", "given_back"), [(70, []), (75, ["give back"]), (85, ["give back"])])
def test_an_engine_finds_the_memory_that_torch_keeps_for_later(
    monkeypatch: pytest.MonkeyPatch, kept: int, given_back: list[str]
) -> None:
    """After an update torch keeps its activations' memory, which the engine cannot have before it is given back."""
    engine = Device(monkeypatch)
    engine.kept = 25
    lifecycle = ready(engine)
    lifecycle.sleep()
    engine.kept = kept
    lifecycle.wake("weights")
    assert engine.calls[2:] == ["give back", "sleep 2", *given_back, "wake weights"]


def test_sleeping_is_nothing_on_a_cpu() -> None:
    engine = FakeEngine()
    lifecycle = ready(engine, sleep_level=0)
    lifecycle.sleep()
    lifecycle.require_ready()
    lifecycle.wake("weights")
    assert engine.calls == ["write", "reset"]
