"""The parts of the online loop that are its own: in which order weights are handed over, and what updates amount to."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_bridge.execute import Traffic
from rlflow.rollout.engine import Lifecycle
from rlflow.trainers.online import finish_step, hand_over
from rlflow.trainers.passes import update_metrics

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
    actor = SimpleNamespace(layout=3, parameters_by_name=lambda: {"received": 4})
    rollout.lifecycle.sleep()
    moved = hand_over(SimpleNamespace(rollout=rollout, roles=SimpleNamespace(actor=actor)))
    assert rollout.held_at_sync == [BYTES["weights"]]
    assert rollout.memory.held == sum(BYTES.values())
    rollout.lifecycle.require_ready()
    assert moved == {"sync/local_bytes": 3, "sync/received_bytes": 4, "sync/sent_bytes": 0}


def test_metrics_of_several_updates():
    """Means over all tokens, losses and norms over updates; the first update alone tells whether it was on-policy."""
    first = {"tokens": 2.0, "clipped": 1.0, "ratio_error_max": 0.0, "loss": 1.0, "engine/grad_norm": 1.0}
    second = {"tokens": 6.0, "clipped": 1.0, "ratio_error_max": 0.5, "loss": 3.0, "engine/grad_norm": 3.0}
    assert update_metrics([first, second], "actor") == pytest.approx(
        {
            "actor/trainable_tokens": 8.0,
            "actor/clip_fraction": 2 / 8,
            "actor/ratio_error_max": 0.5,
            "actor/first_ratio_error": 0.0,
            "actor/loss": 2.0,
            "actor/grad_norm": 2.0,
        }
    )


def test_a_step_in_which_nothing_could_be_scored_is_told(caplog: pytest.LogCaptureFixture) -> None:
    config = SimpleNamespace(evaluation=SimpleNamespace(every=0), trainer=SimpleNamespace(save_every=0))
    tracker = SimpleNamespace(end=lambda *_: None)
    run: Any = SimpleNamespace(state=SimpleNamespace(step=3), steps=9, config=config, tracker=tracker)
    finish_step(run, [], {"train/reward": 0.0})
    assert not caplog.text
    finish_step(run, [], {})
    assert "step 3: no sample could be scored" in caplog.text
