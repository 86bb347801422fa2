"""Steps of the trainer's engine on random batches: their work, what they teach, and how fast they are for the GPU.

Which engine makes them, and what is reported of it, is left to the parts that measure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch

from rlflow.batch import Batch
from rlflow.roles import Engine
from tools.gpu.batches import random_batch
from tools.gpu.shapes import PEAK_FLOPS, Shape

LEARNING_RATE = 1e-5
STEPS = 8  # before losses are compared


@dataclass(frozen=True)
class Work:
    """What is computed: micro-batches of packed sequences."""

    sequences: int = 16
    length: int = 1024
    micro_batches: int = 4  # of a whole step

    @property
    def rows(self) -> int:
        """Of a micro-batch."""
        return self.sequences * self.length

    def batch(self, shape: Shape, micro_batches: int) -> Batch:
        """So many micro-batches of random tokens; prompts are of one token, so that all other rows are scored."""
        return random_batch(shape.vocab_size, prompts=micro_batches * self.sequences, prompt=1, response=self.length)


@contextmanager
def without_optimizer(engine: Engine) -> Iterator[None]:
    """Let the engine's steps end where their gradients are complete."""
    assert engine.training is not None
    with patch.object(engine.training.optimizer, "step", return_value=(True, 1.0, None)):
        yield


def loss_of(engine: Engine, batch: Batch) -> float:
    """Mean of −log-probs over the batch's tokens, in nats."""
    return -float(engine.log_probs(batch, 1.0).double().mean())


def most_memory() -> tuple[int, int]:
    """Bytes of tensors at most on this process's GPU so far, and of what torch took for them."""
    if not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def speed_of(
    shape: Shape, length: int, tokens: int, passes: int, seconds: float, gpus: int = 1
) -> tuple[float, dict[str, float]]:
    """MFU of each GPU, and seconds and tokens a second; `passes`: how many times a forward's operations."""
    usual, multiplied = (
        round(passes * shape.forward_flops(length, tokens, whole=whole) / seconds / (gpus * PEAK_FLOPS), 4)
        for whole in (True, False)
    )
    speed = {"s": round(seconds, 4), "tokens_per_s": round(tokens / seconds)}
    return usual, speed | ({} if multiplied == usual else {"without_embedding": multiplied})
