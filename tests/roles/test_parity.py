"""Every parallelism computes what one process does, dense and with experts: the matrix of docs/parallelism.md."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.bridge.toys import toy
from tests.roles.parity import BOUND, MATRIX, Matrix
from tests.roles.runs import Case


@pytest.fixture(scope="module")
def matrix(world: Callable[..., Any], tiny_model: Callable[..., Path]) -> Matrix:
    return Matrix(world, tiny_model)


@pytest.mark.parametrize(("family", "case"), MATRIX, ids=lambda given: getattr(given, "name", given))
def test_a_grid_computes_what_one_process_does(matrix: Matrix, family: str, case: Case) -> None:
    """cases.md A05 (tied embeddings over stages), B10 (CP counts tokens once), B23, B24 (gradients through TP)."""
    found = matrix.measure(family, case)
    assert {column: error for column, error in found.items() if not error <= BOUND} == {}


@pytest.mark.parametrize(("pp", "chunks"), [(2, 2), (2, 4), (4, 2), (8, 2)])
def test_virtual_stages_never_use_the_exchange_that_confuses_chunks(pp: int, chunks: int) -> None:
    from rlflow.models import transformer_config

    grid: Any = SimpleNamespace(tp=1, pp=pp, cp=1, ep=1, etp=1)
    config = transformer_config(toy(num_hidden_layers=16), grid, torch.float32, virtual_pipeline=chunks)
    assert config.virtual_pipeline_model_parallel_size == chunks
    assert config.overlap_p2p_comm
    assert not config.batch_p2p_comm
