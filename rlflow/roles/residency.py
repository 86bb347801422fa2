"""What of a role's model sits on the GPU in which phase: weights, gradients and optimizer state, each by itself.

Several models and a sleeping vLLM share a GPU by taking turns. Into a rollout: optimizer and gradients leave, vLLM's
weights wake, the actor's are sent to them and leave too, the cache wakes; back in the other order. Nothing moves on a
CPU. How bytes move is left to `host_memory`, when to the caller, on all ranks of the role alike or not: no call waits
for another rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from rlflow.parallel import device
from rlflow.roles.host_memory import HostMemory, drop, zero

if TYPE_CHECKING:
    from rlflow.roles.engine import Engine

Part = Literal["weights", "gradients", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)
Storages = list[torch.UntypedStorage]


class Mover(Protocol):
    """What takes one part of a model off the device and brings it back."""

    def offload(self, part: Part) -> None: ...

    def load(self, part: Part) -> None: ...


class Residency:
    """Where the parts of one engine are. Without `offload`, and on a CPU, all of them always stay where they are.

    A part must be on the device while it is computed with, read or written: weights for every pass, for a sync, an
    export, a checkpoint and an update of the reference; all three for an optimizer step; the optimizer's state for a
    checkpoint too. Gradients are not kept from one step to the next. `mover` replaces what moves, for tests.
    """

    def __init__(self, engine: Engine, *, offload: bool, mover: Mover | None = None) -> None:
        moves = offload and device().type == "cuda"
        self._mover: Mover | None = EngineMover(engine) if moves and mover is None else mover
        self._away: set[Part] = set()

    @property
    def on_device(self) -> tuple[Part, ...]:
        """The parts that are on the device."""
        return tuple(part for part in PARTS if part not in self._away)

    def load(self, *parts: Part) -> None:
        """Bring parts to the device, by default all; those that are there stay."""
        for part in parts or PARTS:
            if part in self._away and self._mover is not None:
                self._mover.load(part)
                self._away.discard(part)

    def offload(self, *parts: Part) -> None:
        """Bring parts to the host, by default all; those that are there stay."""
        for part in parts or PARTS:
            if part not in self._away and self._mover is not None:
                self._mover.offload(part)
                self._away.add(part)

    @contextlib.contextmanager
    def using(self, *, weights: bool = False, gradients: bool = False, optimizer: bool = False) -> Iterator[None]:
        """Have the named parts on the device inside; afterwards those that had to be brought there leave again.

        Inside another `using` nothing moves twice, so that a phase of many steps is one `using` around them all.
        """
        asked: dict[Part, bool] = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
        brought = [part for part, wanted in asked.items() if wanted and part in self._away]
        if brought:
            self.load(*brought)
        yield
        if brought:
            self.offload(*brought)


class EngineMover:
    """Moves the parts of an engine between its device and host memory that it keeps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._hosts = {part: HostMemory(device()) for part in PARTS}
        self._away: dict[Part, tuple[Storages, list[int]]] = {}

    def offload(self, part: Part) -> None:
        """Free the part's storages, keeping what is in them unless it is gradients."""
        storages = storages_of(self._engine, part)
        if part == "gradients":
            self._away[part] = storages, [storage.nbytes() for storage in storages]
            drop(storages, device())
        else:
            self._away[part] = storages, self._hosts[part].take(storages)

    def load(self, part: Part) -> None:
        """Take the memory again; gradients come back as zeros."""
        storages, sizes = self._away.pop(part)
        if part == "gradients":
            zero(storages, sizes)
        else:
            self._hosts[part].give_back(storages, sizes)


def storages_of(engine: Engine, part: Part) -> Storages:
    """The storages on the device that a part of an engine consists of, each once and in no other part.

    megatron keeps the weights of a trained model in buffers of many, its main parameters either in these or apart.
    Counters of steps stay where they are, as does what the host keeps and updates.
    """
    weights = [parameter.data for chunk in engine.chunks for parameter in chunk.parameters()]
    if part == "weights":
        return _distinct(weights)
    if engine.training is None:
        return []
    buffers = [buffer for ddp in engine.training.ddp for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    if part == "gradients":
        return _distinct([buffer.grad_data for buffer in buffers])
    weight_storages = {storage._cdata for storage in _distinct(weights)}
    chained = engine.training.optimizer.chained_optimizers  # one has no parameters where a stage has no experts
    held = [tensor for each in chained if each.optimizer is not None for tensor in _optimizer_tensors(each.optimizer)]
    return [storage for storage in _distinct(held) if storage._cdata not in weight_storages]


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Main parameters and moments, also those that megatron's optimizer over two devices keeps on this one."""
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim())
    yield from getattr(optimizer, "param_to_fp32_param", {}).values()


def _distinct(tensors: Iterable[Tensor]) -> Storages:
    """The storages of the tensors on the device, each once; one that is away still counts."""
    here = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device().type)
    return list({storage._cdata: storage for storage in here}.values())
