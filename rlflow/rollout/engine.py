"""What a rollout engine must offer, and the order in which it may be used.

`Lifecycle` guards every engine alike: nothing is sampled from weights that are missing, half written or asleep, nor
with a key-value cache of older weights. How weights are written and tokens sampled is left to the engine.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from rlflow.batch.sample import Prompt, Sample
from rlflow.rollout.timing import Generation


class RolloutEngine(Protocol):
    """What the trainers see. Every rank of the job holds one and calls it in the same order."""

    @property
    def version(self) -> int:
        """The number of complete weight syncs so far."""
        ...

    @property
    def generation(self) -> Generation | None:
        """Time and tokens of the last `generate`, on the rank of each replica that returns its samples."""
        ...

    def generate(
        self, prompts: list[Prompt], *, n: int, temperature: float, step: int, greedy: bool = False,
        expected: Sequence[float] | None = None,
    ) -> list[Sample]:  # fmt: skip
        """n responses to each prompt, expected to have so many tokens each.

        All ranks pass the same prompts and expectations; a response is returned on one rank only.
        """
        ...

    def sync(self, layout: Any, tensors: dict[str, Any]) -> Any:
        """Take the weights that `tensors` hold in `layout`; returns the bridge's traffic."""
        ...

    def sleep(self) -> None:
        """Free the device memory of weights and cache."""
        ...

    def wake_weights(self) -> None: ...

    def wake_kv_cache(self) -> None: ...

    def shutdown(self) -> None:
        """Release the engine and its process groups."""
        ...


class Backend(Protocol):
    """The calls of an inference engine that `Lifecycle` puts in order (vLLM's `LLM` has them)."""

    def reset_prefix_cache(self) -> bool: ...

    def sleep(self, level: int) -> None: ...

    def wake_up(self, tags: list[str]) -> None: ...


class NotReady(RuntimeError):
    """The engine was asked to do what its weights or memory do not allow: a defect of the calling program."""


class Lifecycle:
    """Which weights an engine holds and what of it is awake.

    Args:
        backend: the inference engine, None on ranks that have none.
        sleep_level: 0 never sleeps (a CPU), 1 keeps the weights in host memory, 2 drops them.
    """

    def __init__(self, backend: Backend | None, sleep_level: int) -> None:
        self._backend = backend
        self._sleep_level = sleep_level
        self._complete = False
        self._asleep: set[str] = set()
        self._freed = 0  # bytes of the device, by the last sleep
        self.version = 0

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Write new weights inside. Only a block that ends without an error makes them complete, and the version rise.

        The prefix cache is reset after the last write and its answer checked: vLLM refuses while requests run (C01).
        """
        if "weights" in self._asleep:
            raise NotReady("weights cannot be written while their memory is asleep: wake_weights() first")
        self._complete = False
        yield
        if self._backend is not None and not self._backend.reset_prefix_cache():
            raise NotReady("the engine kept its prefix cache of the old weights: requests are still running")
        self._complete = True
        self.version += 1

    def require_ready(self) -> None:
        """Raise unless the weights are complete and everything is awake."""
        if not self._complete:
            raise NotReady("the engine holds no complete weights: generate only after a sync that finished")
        if self._asleep:
            raise NotReady(f"the engine's {' and '.join(sorted(self._asleep))} are asleep")

    def sleep(self) -> None:
        """Free weights and cache; after level 2 the weights must be written again (C10)."""
        if not self._sleep_level or self._asleep:
            return
        if self._backend is not None:
            before = _make_room()
            self._backend.sleep(self._sleep_level)
            self._freed = _free_bytes() - before
        self._asleep = {"weights", "kv_cache"}
        self._complete = self._complete and self._sleep_level == 1

    def wake(self, part: str) -> None:
        """Give `part` ("weights" or "kv_cache") its memory back; waking twice does nothing.

        The engine takes it from the device, not from what torch keeps of it for later: that is given back if need be.
        """
        if part not in self._asleep:
            return
        if self._backend is not None:
            if _free_bytes() < self._freed:
                _make_room()
            self._backend.wake_up([part])
        self._asleep.discard(part)


def _free_bytes() -> int:
    """Of the device, as its driver counts them; 0 without one."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def _make_room() -> int:
    """Give the device back what torch keeps of it for later; returns the bytes that are free then."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return _free_bytes()
