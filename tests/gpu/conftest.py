"""Fixtures of the GPU tests: processes with one GPU each, and models."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.devices import EXPERTS, GEMMA, LATENT, save_qwen
from tests.workers import World


@pytest.fixture(scope="module")
def gpus() -> Iterator[World]:
    """`gpus(n, function, *args)` on n GPUs, in processes that the tests of a module share."""
    pool = World("nccl")
    yield pool
    pool.close()


@pytest.fixture
def fresh_gpus() -> Iterator[World]:
    """The same in processes of the test's own: vLLM's allocator serves one engine a process."""
    pool = World("nccl")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random model in the shape of Qwen2.5-0.5B."""
    return save_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="session")
def shallow_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with four layers, for whole runs, whose checkpoints are then a third of the size."""
    return save_qwen(tmp_path_factory.mktemp("shallow_qwen"), num_hidden_layers=4)


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Qwen3-MoE."""
    return save_qwen(tmp_path_factory.mktemp("experts"), "qwen3_moe", **EXPERTS)


@pytest.fixture(scope="session")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random DeepSeek-V3."""
    return save_qwen(tmp_path_factory.mktemp("latent"), "deepseek_v3", **LATENT)


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Gemma-3."""
    return save_qwen(tmp_path_factory.mktemp("gemma"), "gemma3_text", **GEMMA)
