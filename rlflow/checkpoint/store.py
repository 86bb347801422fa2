"""Save and restore a run: weights and optimizer by `weights`, the trainer's own state and the ranks' RNGs beside them.

One rank makes and publishes the folder while the others wait, so that a checkpoint has exactly one writer of its name.
"""

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from rlflow.checkpoint import folders, weights
from rlflow.errors import UserError
from rlflow.roles.engine import Engine

STATE, RNG = "trainer.pt", "rng_{rank}.pt"


@dataclass
class State:
    """What changes during a run besides weights, optimizer and RNGs."""

    step: int = 0  # steps that are done
    updates: int = 0  # optimizer steps that are done
    loader: dict[str, Any] | None = None  # position in the data


class Checkpoints:
    """The checkpoints of one run folder. All methods are collective over the job."""

    def __init__(self, root: Path, keep: int) -> None:
        self.root, self.keep = root, keep

    def save(self, engine: Engine, state: State) -> Path:
        """Write step `state.step`; visible under its final name only when every rank has written."""
        rank = dist.get_rank()
        partial = folders.folder_of(self.root, state.step).with_suffix(folders.PARTIAL)
        if rank == 0:
            folders.begin(self.root, state.step)
        dist.barrier()
        weights.save(engine, partial / "actor")
        torch.save(_random_states(), partial / RNG.format(rank=rank))
        if rank == 0:
            torch.save(asdict(state), partial / STATE)
        dist.barrier()
        if rank == 0:
            folders.publish(partial, state.step)
            folders.retain(self.root, self.keep, state.step)
        dist.barrier()
        return partial.with_suffix("")

    def find(self, resume: str) -> Path | None:
        """The folder that `trainer.resume` means: `auto` the newest complete one, `never` none, else a folder."""
        if resume == "never":
            return None
        if resume != "auto":
            if reason := folders.fault(Path(resume)):
                raise UserError("trainer.resume", f"{resume} is no complete checkpoint: {reason}")
            return Path(resume)
        # Rank 0 looks and tells: a shared file system may show ranks different things.
        found = [folders.latest(self.root) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found, src=0)
        return None if found[0] is None else folders.folder_of(self.root, found[0])

    def load(self, engine: Engine, folder: Path) -> State:
        """Restore the engine and this rank's RNGs; a rank that the writing job did not have keeps its fresh ones."""
        state = State(**torch.load(folder / STATE, weights_only=True))
        weights.load(engine, folder / "actor", state.updates)
        own = folder / RNG.format(rank=dist.get_rank())
        if own.exists():
            _set_random_states(torch.load(own, weights_only=False))
        return state


def _random_states() -> dict[str, Any]:
    states = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "megatron": get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["megatron"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
