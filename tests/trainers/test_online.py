"""The parts of the online loop that are its own: in which order weights are handed over, and what updates amount to."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_bridge.execute import Traffic
from rlflow.rollout.engine import Lifecycle
from rlflow.trainers.online import evaluate, finish_step, hand_over

BYTES = {"weights": 10, "kv_cache": 30}


class Memory:
    """An inference engine that counts the bytes it holds."""

    def __init__(self) -> None:
        self.held = sum(BYTES.values())

    def sleep(self, level: int) -> None:
        self.held = 0

    def wake_up(self, tags: list[str]) -> None:
        self.held += sum(BYTES[tag] for tag in tags)

    def reset_prefix_cache(self) -> bool:
        return True


class Rollout:
    """An engine with the real rules of waking, which notes what it held when the weights came."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.lifecycle = Lifecycle(self.memory, sleep_level=2)
        self.held_at_sync: list[int] = []

    def sync(self, layout: Any, tensors: dict[str, Any]) -> Traffic:
        with self.lifecycle.updating():
            self.held_at_sync.append(self.memory.held)
            return Traffic(local=layout, received=tensors["received"], sent=0, seconds=0.1)

    def wake_weights(self) -> None:
        self.lifecycle.wake("weights")

    def wake_kv_cache(self) -> None:
        self.lifecycle.wake("kv_cache")


def test_weights_are_written_while_the_cache_sleeps():
    """cases.md C11: wake weights → write → wake cache. The engine's own rule would let the cache wake first."""
    rollout = Rollout()
    residency = SimpleNamespace(load=lambda *_: None, offload=lambda *_: None)
    actor = SimpleNamespace(layout=3, parameters_by_name=lambda: {"received": 4}, residency=residency)
    rollout.lifecycle.sleep()
    tracker = SimpleNamespace(phase=lambda name: nullcontext())
    moved = hand_over(SimpleNamespace(rollout=rollout, roles=SimpleNamespace(actor=actor), tracker=tracker))
    assert rollout.held_at_sync == [BYTES["weights"]]
    assert rollout.memory.held == sum(BYTES.values())
    rollout.lifecycle.require_ready()
    assert moved == {"sync/local_bytes": 3, "sync/received_bytes": 4, "sync/sent_bytes": 0}


def test_a_step_in_which_nothing_could_be_scored_is_told(caplog: pytest.LogCaptureFixture) -> None:
    config = SimpleNamespace(evaluation=SimpleNamespace(every=0), trainer=SimpleNamespace(save_every=0))
    tracker = SimpleNamespace(end=lambda *_: None)
    run: Any = SimpleNamespace(state=SimpleNamespace(step=3), steps=9, config=config, tracker=tracker)
    caplog.set_level("INFO", "rlflow")
    finish_step(run, [], {"train/reward": 0.0})
    assert not caplog.text
    finish_step(run, [], {})
    assert "step 3: no sample could be scored" in caplog.text


def test_an_evaluation_is_a_phase_also_before_the_first_step() -> None:
    phases: list[str] = []
    tracker = SimpleNamespace(phase=lambda name: phases.append(name) or nullcontext())
    state = SimpleNamespace(step=0)
    run: Any = SimpleNamespace(tracker=tracker, rollout=None, scorer=None, held_out=[], config=None, state=state)
    assert evaluate(run) == {}
    assert phases == ["evaluate"]
