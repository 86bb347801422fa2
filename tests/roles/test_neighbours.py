"""What stands beside a sample in a forward does not move its log-probs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.roles.runs import Case, make_engine
from tests.roles.samples import random_batch

WHOLE = {"micro_batch_tokens": 10_000}
SHARED = Case("prompts shared", 1, {}, WHOLE)
PACKED = Case("prompts repeated", 1, {}, {**WHOLE, "share_prompts": False})
TP2_SP = Case("rows padded to TP2 with sequence parallelism", 2, {"tensor": 2}, {**WHOLE, "sequence_parallel": True})

TEMPERATURE = 20.0
"""Brings the test model's logits from near ±100 to the size of a trained one's, where float32 is exact enough."""


def alone_and_together(folder: Path, case: Case) -> tuple[Tensor, Tensor]:
    """Log-probs of the random batch, sample by sample and in one micro-batch."""
    engine, batch = make_engine(folder, case), random_batch()
    alone = [engine.log_probs(batch.select([sample]), TEMPERATURE) for sample in range(len(batch))]
    return torch.cat(alone), engine.log_probs(batch, TEMPERATURE)


@pytest.mark.parametrize("case", [SHARED, PACKED, TP2_SP], ids=lambda case: case.name)
def test_a_sample_alone_has_the_log_probs_that_it_has_among_others(
    world: Callable[..., Any], tiny_model: Callable[..., Path], case: Case
) -> None:
    """cases.md B31: without an update in between, the ratio of the two is 1 ± 1e-6 in float32."""
    for alone, together in world(case.ranks, alone_and_together, tiny_model("qwen2", tied=True), case):
        assert torch.expm1(together.double() - alone.double()).abs().max() <= 1e-6
