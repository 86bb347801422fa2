"""The kernels that choose tokens, on a GPU, with as many tokens as a vocabulary has."""

import pytest
import torch

from tests.gpu.devices import needs_gpus
from tests.rollout.test_choice import check, check_frequencies

pytestmark = needs_gpus(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [151_936, 4096, 1000])
def test_scores_and_greedy_tokens(dtype: torch.dtype, vocab: int) -> None:
    check("cuda", dtype, 300, vocab)


@pytest.mark.parametrize("vocab", [50, 20_000])
def test_frequencies(vocab: int) -> None:
    check_frequencies("cuda", vocab, 400_000)
