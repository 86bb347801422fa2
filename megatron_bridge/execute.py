"""Carries a plan out: local copies from parameter to parameter, everything else through capped buckets.

No full tensor is ever staged. What to copy is left to `plan`, how to `copies`, the messages between ranks to `exchange`
and what all ranks must have in common to `agreement`.
"""

import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from megatron_bridge.agreement import gather_faults, is_alone, loses_precision, require_agreement
from megatron_bridge.copies import FusedCopies
from megatron_bridge.errors import SyncError
from megatron_bridge.exchange import Buckets, Exchange
from megatron_bridge.groups import Group, device_of, or_default
from megatron_bridge.layouts.layout import FLOAT32_KINDS, Layout, raise_faults
from megatron_bridge.layouts.part import Part
from megatron_bridge.plan import Plan, make_plan
from megatron_bridge.streams import ALIGNMENT, compact, messages, rounds

DEFAULT_BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Traffic:
    """What one run moved on this rank, in bytes, and the seconds it took."""

    local: int
    received: int
    sent: int
    seconds: float

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Phase:
    """What a rank does in one phase of a plan."""

    local: FusedCopies
    exchange: Exchange


class Transfer:
    """A plan bound to this rank's tensors; `run` may be called any number of times, by all ranks together.

    `source` and `target` map the layouts' parameter names to tensors, empty where the rank holds none. Tensors are
    looked at anew in each run, so a parameter whose storage was replaced needs no rebinding. `dtype` is what is sent;
    senders cast to it, receivers from it. It must hold all source tensors exactly or be the type of all target
    tensors: what arrives is then the source cast to the target's type, as local copies are. `group` is a process group
    or what `worlds.connect_worlds` returned, by default the process's default group. `bucket_bytes` caps what a rank
    sends and what it receives in one round; four such buckets are taken, or less if the plan needs less, and kept until
    `release`. With `checksum` what arrives is compared with what was sent. `following` is carried out after it by each
    run: the same tensors' units that travel in another dtype. All ranks must give the same settings.
    """

    def __init__(
        self,
        plan: Plan,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        *,
        rank: int,
        dtype: torch.dtype,
        group: Group | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        checksum: bool = False,
        following: "Transfer | None" = None,
    ) -> None:
        if plan.itemsize != dtype.itemsize:
            raise ValueError(f"the plan counts {plan.itemsize} bytes an element, {dtype} has {dtype.itemsize}")
        self.plan, self.dtype, self.group = plan, dtype, group
        self._rank, self.checksum, self.following = rank, checksum, following
        self.source = check_tensors(plan.source, rank, source)
        self.target = check_tensors(plan.target, rank, target)
        if lost := loses_precision(dtype, self.source, self.target):
            raise ValueError(lost)
        self._padding = plan.target.padding(rank)
        self.buckets = Buckets(device_of(group), dtype)
        self.phases = [self._phase(phase, bucket_bytes) for phase in range(plan.phases)]
        self.rounds = sum(len(phase.exchange.rounds) for phase in self.phases)
        self._agreed = not self.rounds and is_alone(plan.source, plan.target)

    def _phase(self, phase: int, bucket_bytes: int) -> Phase:
        """The copies of phase 0 start at the source's tensors, those of later ones at what was filled before."""
        plan, rank, source = self.plan, self._rank, self.target if phase else self.source
        count, multiple = rounds(plan, bucket_bytes, phase, self.checksum), max(1, ALIGNMENT // plan.itemsize)
        sends = {
            peer: messages(compact(plan.into(peer, rank, phase)), count, "source", multiple)
            for peer in plan.targets(rank, phase)
        }
        receives = {
            peer: messages(compact(plan.into(rank, peer, phase)), count, "target", multiple)
            for peer in plan.sources(rank, phase)
        }
        return Phase(
            FusedCopies(compact(plan.into(rank, rank, phase)), source, self.target),
            Exchange(
                sends, receives, source, self.target, self.buckets, rank=rank, rounds=count, digests=self.checksum
            ),
        )

    def bind(self, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        """Take other tensors in the place of these: all that the layouts name, of the same dtypes and devices."""
        self.source.update(check_tensors(self.plan.source, self._rank, {name: source[name] for name in self.source}))
        self.target.update(check_tensors(self.plan.target, self._rank, {name: target[name] for name in self.target}))
        if self.following is not None:
            self.following.bind(source, target)

    def unbind(self) -> None:
        """Let go of the tensors; before the next run `bind` must give others."""
        self.source.update(dict.fromkeys(self.source, torch.empty(0)))
        self.target.update(dict.fromkeys(self.target, torch.empty(0)))
        if self.following is not None:
            self.following.unbind()

    def run(self) -> Traffic:
        """Fill the target tensors, padding with zeros; returns when they hold the weights.

        SyncError if a peer is gone or silent, which also ends the group's use, or (with `checksum`, on all ranks) if
        something else arrived than was sent; the target is then not to be used.
        """
        group = or_default(self.group)
        if not self._agreed and group is not None:
            require_agreement(self, group)
            self._agreed = True
        begin = time.perf_counter()
        for phase in self.phases:
            phase.exchange.run(group, phase.local.run)
        self.zero_padding()
        for device in {tensor.device for tensor in (*self.source.values(), *self.target.values()) if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
        if self.checksum and self.rounds:
            self._verify(group)
        traffic = self.traffic(seconds)
        return traffic if self.following is None else traffic + self.following.run()

    def traffic(self, seconds: float) -> Traffic:
        """What each run moves on this rank."""
        local = sum(phase.local.elements for phase in self.phases)
        received = sum(phase.exchange.received for phase in self.phases)
        sent = sum(phase.exchange.sent for phase in self.phases)
        size = self.dtype.itemsize
        return Traffic(local * size, received * size, sent * size, seconds)

    def _verify(self, group: Group) -> None:
        faults = [fault for phase in self.phases for fault in phase.exchange.faults()]
        elsewhere = gather_faults(group, len(faults))
        if faults:
            raise SyncError("other bytes arrived than were sent: " + "; ".join(faults))
        if elsewhere:
            raise SyncError(f"other bytes arrived at ranks {elsewhere} than were sent")

    def zero_padding(self) -> None:
        """Zero the vocabulary rows that no token has."""
        for name, elements in self._padding.items():
            self.target[name].detach().view(-1)[-elements:].zero_()

    def release(self) -> None:
        """Give the buckets' memory back; the next run takes it again."""
        self.buckets.release()
        if self.following is not None:
            self.following.release()


def connect(
    source_layout: Layout,
    source: Mapping[str, Tensor],
    target_layout: Layout,
    target: Mapping[str, Tensor],
    *,
    rank: int,
    dtype: torch.dtype,
    group: Group | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ranks_per_node: int = 8,
    checksum: bool = False,
) -> Transfer:
    """A transfer between two layouts' tensors, planned and bound: build it once, run it whenever weights changed.

    Units that all systems keep in float32 are sent in it, whatever `dtype` is.
    """
    source, target = check_tensors(source_layout, rank, source), check_tensors(target_layout, rank, target)
    transfer: Transfer | None = None
    for here, there, sent in _by_dtype(source_layout, target_layout, dtype):
        transfer = Transfer(
            make_plan(here, there, itemsize=sent.itemsize, ranks_per_node=ranks_per_node),
            {name: source[name] for name in here.parameters(rank)},
            {name: target[name] for name in there.parameters(rank)},
            rank=rank, dtype=sent, group=group, bucket_bytes=bucket_bytes, checksum=checksum, following=transfer,
        )  # fmt: skip
    assert transfer is not None
    return transfer


def _by_dtype(source: Layout, target: Layout, dtype: torch.dtype) -> list[tuple[Layout, Layout, torch.dtype]]:
    """The parts of a transfer that travel in dtypes of their own, `dtype` last."""
    kinds = {u.canonical: u.kind for layout in (source, target) for rank in layout.ranks for u in layout.units(rank)}
    exact = frozenset(name for name, kind in kinds.items() if kind in FLOAT32_KINDS)
    if not exact or not dtype.is_floating_point or torch.promote_types(dtype, torch.float32) == dtype:
        return [(source, target, dtype)]
    rest = frozenset(kinds) - exact
    parts = [(exact, torch.float32), (rest, dtype)] if rest else [(exact, torch.float32)]
    return [(Part(source, names), Part(target, names), sent) for names, sent in parts]


def check_tensors(layout: Layout, rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that a layout names on a rank; UserError lists what is missing, misshapen, strided or unknown."""
    wanted, faults = layout.parameters(rank), []
    for name, param in wanted.items():
        tensor = tensors.get(name)
        if tensor is None:
            faults.append(f"{name} is missing")
        elif tuple(tensor.shape) != param.shape:
            faults.append(f"{name} is {list(tensor.shape)}, expected {list(param.shape)}")
        elif not tensor.is_contiguous():
            faults.append(f"{name} is not contiguous")
    faults += [f"{name} has no place in the layout" for name in tensors if name not in wanted]
    raise_faults(f"{type(layout).__name__} on rank {rank}", faults)
    return {name: tensors[name] for name in wanted}
