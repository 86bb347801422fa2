"""Fixtures that all tests share: gloo processes and tiny models, each made once a session."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers import World

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """What a test draws without a seed of its own is the same in every run, whichever tests have drawn before."""
    if "torch" in sys.modules:  # else its generator is as new
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """`world(n, function, *args)`: the results, by rank, of a module-level function on n gloo processes."""
    pool = World()
    yield pool
    pool.close(patience=20)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(family="llama", tied=True, **overrides)`: the folder of a random model, made once a session."""
    made: dict[str, Path] = {}

    def make(family: str = "llama", tied: bool = True, **overrides: Any) -> Path:
        from tests.tiny import save_model

        key = repr((family, tied, sorted(overrides.items(), key=lambda item: item[0])))
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{family}-tied" if tied else family)
            save_model(folder, family, tied, **overrides)
            made[key] = folder
        return made[key]

    return make
