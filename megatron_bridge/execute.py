"""Carries a plan out: local copies from parameter to parameter, everything else through capped buckets.

Each round packs one bucket, exchanges it with one `all_to_all_single` and unpacks it straight into the destination's
storage, the next bucket being packed meanwhile. No full tensor is ever staged. What to copy is left to `plan`, in
which order to `streams`.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.layouts.layout import Layout, raise_faults
from megatron_bridge.plan import Plan, make_plan
from megatron_bridge.streams import Message, compact, messages

DEFAULT_BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Traffic:
    """What one run moved on this rank, in bytes, and the seconds it took."""

    local: int
    received: int
    sent: int
    seconds: float


class Transfer:
    """A plan bound to this rank's tensors; `run` may be called any number of times, by all ranks together.

    `source` and `target` map the layouts' parameter names to tensors, empty where the rank holds none. Tensors are
    looked at anew in each run, so a parameter whose storage was replaced needs no rebinding. `dtype` is what is sent;
    senders cast to it. It must hold every target dtype without loss, so that local and received values agree.
    `bucket_bytes` caps what a rank sends and what it receives in one round; two rounds are in flight. Buckets live
    where the group's backend can send from.
    """

    def __init__(
        self,
        plan: Plan,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        *,
        rank: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        if plan.itemsize != dtype.itemsize:
            raise ValueError(f"the plan counts {plan.itemsize} bytes an element, {dtype} has {dtype.itemsize}")
        self.plan, self.dtype, self.group = plan, dtype, group
        self.source = check_tensors(plan.source, rank, source)
        self.target = check_tensors(plan.target, rank, target)
        for name, tensor in self.target.items():
            if torch.promote_types(dtype, tensor.dtype) != dtype:
                raise ValueError(f"{name} is {tensor.dtype}: sending it as {dtype} would lose precision")
        self.device = _device_of(group)
        self.rounds = plan.rounds(bucket_bytes)
        self._padding = plan.target.padding(rank)
        self._local = list(compact(plan.into(rank, rank)))
        self.sends = {
            peer: messages(compact(plan.into(peer, rank)), self.rounds, "source") for peer in plan.targets(rank)
        }
        self.receives = {
            peer: messages(compact(plan.into(rank, peer)), self.rounds, "target") for peer in plan.sources(rank)
        }

    @torch.no_grad()
    def run(self) -> Traffic:
        """Fill the target tensors, padding with zeros; returns when they hold the weights."""
        begin = time.perf_counter()
        received = sent = 0
        in_flight = self._send(0) if self.rounds else None
        local = self.copy_local()
        for k in range(self.rounds):
            following = self._send(k + 1) if k + 1 < self.rounds else None
            assert in_flight is not None
            in_flight.work.wait()
            received += self.unpack(k, in_flight.incoming)
            sent += in_flight.outgoing.numel()
            in_flight = following
        self.zero_padding()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        size = self.dtype.itemsize
        return Traffic(local * size, received * size, sent * size, time.perf_counter() - begin)

    def copy_local(self) -> int:
        """Copy what this rank holds itself, from parameter to parameter; returns the number of elements."""
        copied = 0
        for shape, source, target in self._local:
            part = _region(self.target[target.parameter], shape, target.strides, target.offset)
            part.copy_(_region(self.source[source.parameter], shape, source.strides, source.offset))
            copied += part.numel()
        return copied

    def pack(self, k: int) -> Tensor:
        """The bucket that this rank sends in round k: its messages, by ascending peer."""
        bucket = self._bucket(self.sends, k)
        for message, tensor in _by_peer(self.sends, k, bucket):
            for name, shape, strides, offset, at in message.regions:
                tensor[at : at + prod(shape)].view(shape).copy_(_region(self.source[name], shape, strides, offset))
        return bucket

    def unpack(self, k: int, bucket: Tensor) -> int:
        """Write the bucket received in round k into the target; returns the number of elements."""
        copied = 0
        for message, tensor in _by_peer(self.receives, k, bucket):
            for name, shape, strides, offset, at in message.regions:
                part = _region(self.target[name], shape, strides, offset)
                part.copy_(tensor[at : at + prod(shape)].view(shape))
                copied += part.numel()
        return copied

    def zero_padding(self) -> None:
        """Zero the vocabulary rows that no token has."""
        for name, elements in self._padding.items():
            self.target[name].detach().view(-1)[-elements:].zero_()

    def _send(self, k: int) -> "_Exchange":
        outgoing, incoming = self.pack(k), self._bucket(self.receives, k)
        work = dist.all_to_all_single(
            incoming.view(torch.uint8),  # bytes, as not every backend exchanges every dtype
            outgoing.view(torch.uint8),
            self._split_bytes(self.receives, k),
            self._split_bytes(self.sends, k),
            group=self.group,
            async_op=True,
        )
        return _Exchange(work, outgoing, incoming)

    def _bucket(self, streams: "_Streams", k: int) -> Tensor:
        return torch.empty(sum(stream[k].elements for stream in streams.values()), dtype=self.dtype, device=self.device)

    def _split_bytes(self, streams: "_Streams", k: int) -> list[int]:
        sizes = [0] * dist.get_world_size(self.group)
        for peer, stream in streams.items():
            sizes[peer] = stream[k].elements * self.dtype.itemsize
        return sizes


_Streams = dict[int, list[Message]]  # peer, ascending -> its message of each round


class _Exchange(NamedTuple):
    work: dist.Work
    outgoing: Tensor
    incoming: Tensor


def connect(
    source_layout: Layout,
    source: Mapping[str, Tensor],
    target_layout: Layout,
    target: Mapping[str, Tensor],
    *,
    rank: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ranks_per_node: int = 8,
) -> Transfer:
    """A transfer between two layouts' tensors, planned and bound: build it once, run it whenever weights changed."""
    plan = make_plan(source_layout, target_layout, itemsize=dtype.itemsize, ranks_per_node=ranks_per_node)
    return Transfer(plan, source, target, rank=rank, dtype=dtype, group=group, bucket_bytes=bucket_bytes)


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


def _by_peer(streams: _Streams, k: int, bucket: Tensor) -> Iterator[tuple[Message, Tensor]]:
    begin = 0
    for stream in streams.values():
        yield stream[k], bucket[begin : begin + stream[k].elements]
        begin += stream[k].elements


def _region(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
    tensor = tensor.detach()
    return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    if dist.is_initialized() and "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
