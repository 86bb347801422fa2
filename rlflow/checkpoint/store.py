"""Save and restore a run: weights and optimizer by `weights`, the trainer's own state and the ranks' RNGs beside them.

One rank makes and publishes the folder while the others wait, so that a checkpoint has exactly one writer of its name.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_bridge.folders import together
from rlflow.checkpoint import folders, weights
from rlflow.errors import UserError
from rlflow.parallel.sub_world import agree_on_group_names
from rlflow.roles.engine import Engine
from rlflow.run_folder import naming_full_disk

log = logging.getLogger(__name__)
STATE, RNG = "trainer.pt", "rng_{rank}.pt"


@dataclass
class State:
    """What changes during a run besides weights, optimizers and RNGs."""

    step: int = 0  # steps that are done
    updates: dict[str, int] = field(default_factory=dict)  # optimizer steps that are done, by role
    loader: dict[str, Any] | None = None  # position in the data
    kl_coef: float = 0.0  # the weight of the KL divergence, which a controller may change
    lengths: dict[str, Any] = field(default_factory=dict)  # what the rollout expects of prompts that it has answered


class Checkpoints:
    """The checkpoints of one run folder. All methods are collective over the job.

    What is saved and restored are engines by their role's name: all that training changes. Each is written by the ranks
    of its own grid, wherever they are, so that engines on disjoint ranks are written at the same time.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self.root, self.keep = root, keep

    def save(self, engines: Mapping[str, Engine], state: State) -> Path:
        """Write step `state.step`; visible under its final name only when every rank has written.

        Raises UserError where the disk is full. Nothing is left of what was not finished.
        """
        final = folders.folder_of(self.root, state.step)
        partial = final.with_suffix(folders.PARTIAL)
        with folders.removed_on_failure(partial), naming_full_disk(self.root, f"checkpoint {final.name}"):
            self._save(engines, state, partial)
        return final

    def _save(self, engines: Mapping[str, Engine], state: State, partial: Path) -> None:
        rank = dist.get_rank()
        if rank == 0:
            folders.begin(self.root, state.step)
        dist.barrier()
        for name, engine in engines.items():
            if engine.grid.is_member:
                weights.save(engine, partial / name)
        agree_on_group_names()
        torch.save(_random_states(), partial / RNG.format(rank=rank))
        if rank == 0:
            torch.save(asdict(state), partial / STATE)
        dist.barrier()
        if rank == 0:
            folders.publish(partial, state.step)
            folders.retain(self.root, self.keep, state.step)
        dist.barrier()

    def find(self, resume: str, roles: Sequence[str] = ()) -> Path | None:
        """The folder that `trainer.resume` means: `auto` the newest complete one, `never` none, else a folder.

        Raises UserError where it has nothing of one of `roles`, which the run trains; warns of roles that the run
        would start anew although the folder has them.
        """
        folder = self._find(resume)
        if folder is not None and (missing := [name for name in roles if not (folder / name).is_dir()]):
            lacks = f"{folder} holds no {' and no '.join(missing)}"
            raise UserError("trainer.resume", f"{lacks}: a run without wrote it, from which this one cannot go on")
        if folder is not None and roles:
            kept = [path.name for path in folder.iterdir() if path.is_dir() and path.name not in roles]
            for name in sorted(kept):
                log.warning("the %s in %s is not taken: this run does not change it, or has none", name, folder.name)
        return folder

    def _find(self, resume: str) -> Path | None:
        if resume == "never":
            return None
        if resume != "auto":
            if reason := folders.fault(Path(resume)):
                raise UserError("trainer.resume", f"{resume} is no complete checkpoint: {reason}")
            return Path(resume)
        # Rank 0 looks and tells: a shared file system may show ranks different things.
        found = [together(lambda: folders.latest(self.root) if dist.get_rank() == 0 else None, None)]
        dist.broadcast_object_list(found, src=0)
        return None if found[0] is None else folders.folder_of(self.root, found[0])

    def state(self, folder: Path) -> State:
        """What a checkpoint says of the run besides its models and RNGs."""
        return State(**torch.load(folder / STATE, weights_only=True))

    def load(self, engines: Mapping[str, Engine], folder: Path) -> State:
        """Restore the engines and this rank's RNGs; a rank that the writing job did not have keeps its fresh ones."""
        state = self.state(folder)
        for name, engine in engines.items():
            if engine.grid.is_member:
                weights.load(engine, folder / name, state.updates.get(name, 0))
        agree_on_group_names()
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
