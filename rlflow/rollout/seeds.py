"""Seeds of sampling: which number each response or each engine starts from, and how a process's generators take it.

Every seed depends on the run, the step and what is sampled, never on what was sampled before: a resumed run repeats
itself. Hashing is left to `parallel.seeds`.
"""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from rlflow.parallel.seeds import derive_seed


def response_seed(run_seed: int, step: int, prompt_id: str, index: int) -> int:
    """The seed of response `index` to a prompt: the same on every layout of the rollout (cases.md C03)."""
    return derive_seed(run_seed, "response", step, prompt_id, index)


def engine_seed(run_seed: int, step: int, replica: int) -> int:
    """The seed that all tensor-parallel ranks of a replica give their generators before they sample step `step`."""
    return derive_seed(run_seed, "engine", step, replica)


@contextlib.contextmanager
def preserved_generators() -> Iterator[None]:
    """Give every default generator of the process (Python, numpy, torch, CUDA) its state back at the end."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)


@contextlib.contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed every default generator, and keep this from the trainer, whose own streams go on afterwards.

    vLLM's CPU runner and its first GPU runner draw from torch's generators, its second GPU runner from numpy's.
    """
    with preserved_generators():
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        yield
