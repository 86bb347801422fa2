"""Time of resharding, Megatron layout to vLLM layout, on tensors alone: one JSON line a pair of layouts.

    python -m tools.bench_reshard --model tiny --train tp=2,pp=2 pp=2 --rollout tp=4 tp=2  # starts its processes
    torchrun --nproc-per-node 8 -m tools.bench_reshard --model qwen2.5-7b --train tp=8 --rollout tp=2
    python -m tools.bench_reshard --model qwen2.5-7b --local                                 # one process, TP1 to TP1

NCCL where there is a GPU for each process, else gloo. Beside the bridge, in the same run: an all-to-all of the same
bytes between the same ranks followed by a plain copy of the bytes that stay, and a full gather, in which every rank
gets every tensor whole, a layer at a time, and slices its own parameters out of it as an engine's loader does. Seconds
are the slowest rank's in the best run; both ways of resharding are checked bit by bit. With `--local` the bridge's
copies are compared with one `copy_` a region and with one large copy of the same bytes (GB/s read and written).
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from megatron_bridge.boxes import shape_of, volume
from megatron_bridge.copies import region
from megatron_bridge.execute import Transfer, connect
from megatron_bridge.families import Architecture, load_architecture, read_json
from megatron_bridge.groups import Group
from megatron_bridge.layout_options import read_layouts
from megatron_bridge.layouts import HFLayout, Layout, MegatronLayout, VLLMLayout
from megatron_bridge.layouts.layout import Unit, canonical_units, tensors_of
from megatron_bridge.layouts.megatron import DEFAULT_ORDER
from megatron_bridge.layouts.part import OneRank, one_unit
from megatron_bridge.proof import KnownValues
from megatron_bridge.streams import compact
from tools.gpu.machine import leave_multicast_off

QWEN2 = {"model_type": "qwen2", "vocab_size": 152064, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "qwen2", "num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 1536, "vocab_size": 8192, "tie_word_embeddings": False,
    },
    "qwen2.5-1.5b": QWEN2 | {
        "num_hidden_layers": 28, "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2,
        "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "qwen2.5-7b": QWEN2 | {
        "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944,
    },
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LARGE_COPY = 4 << 30  # bytes, at most, of the plain copy


class Bench:
    """One pair of layouts on this process: its tensors, and the ways to fill the target."""

    def __init__(self, source: Layout, target: Layout, options: argparse.Namespace, rank: int, device: torch.device):
        self.source, self.target, self.rank, self.device = source, target, rank, device
        self._ranks_per_node = options.ranks_per_node
        self.dtype, self.train_dtype = DTYPES[options.dtype], DTYPES[options.train_dtype or options.dtype]
        self.held = self._known(source, self.train_dtype)
        self.filled = self._empty(target, self.dtype)
        self.expected = self._known(target, self.dtype)
        self.transfer = self.connect(options.bucket_mib)

    def connect(self, bucket_mib: int, group: Group | None = None) -> Transfer:
        """A transfer that fills the target, in buckets of at most this size."""
        return connect(
            self.source, self.held, self.target, self.filled, rank=self.rank, dtype=self.dtype, group=group,
            bucket_bytes=bucket_mib << 20, ranks_per_node=self._ranks_per_node,
        )  # fmt: skip

    def _empty(self, layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
        params = layout.parameters(self.rank)
        return {name: torch.full(p.shape, torch.nan, dtype=dtype, device=self.device) for name, p in params.items()}

    def _known(self, layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
        """This rank's part of weights that are the same in every layout."""
        files, tensors = HFLayout(layout.arch, (self.rank,)), self._empty(layout, dtype)
        values = KnownValues(files, self.rank, dtype, self.device)
        for unit in files.all_units if tensors else ():
            here, there = one_unit(files, unit.canonical), one_unit(layout, unit.canonical)
            held = {name: values[name] for name in here.parameters(self.rank)}
            part = {name: tensors[name] for name in there.parameters(self.rank)}
            if part:
                connect(here, held, OneRank(there, self.rank), part, rank=self.rank, dtype=dtype).run()
        return tensors

    def bitwise(self) -> bool:
        """Whether the target holds the known weights; spoils it for the next way."""
        equal = all(torch.equal(self.filled[name], tensor) for name, tensor in self.expected.items())
        for tensor in self.filled.values():
            tensor.fill_(torch.nan)
        return equal

    def staged_exchange(self) -> Callable[[], None]:
        """The same bytes between the same ranks in one all-to-all, and one plain copy of the bytes that stay."""
        ranks, traffic = range(dist.get_world_size()), self.transfer.plan.traffic
        size = self.dtype.itemsize
        sent = [traffic[self.rank, peer] * size * (peer != self.rank) for peer in ranks]
        received = [traffic[peer, self.rank] * size * (peer != self.rank) for peer in ranks]
        outgoing, incoming = (torch.ones(sum(n), dtype=torch.uint8, device=self.device) for n in (sent, received))
        stays = torch.ones(2, traffic[self.rank, self.rank] * size, dtype=torch.uint8, device=self.device)

        def run() -> None:
            dist.all_to_all_single(incoming, outgoing, received, sent)
            stays[0].copy_(stays[1])

        return run

    def full_gather(self) -> None:
        """Every tensor whole on every rank, then each rank's slices of it."""
        for unit in canonical_units(self.source.arch):
            self._load(unit, self._gather(unit))

    def _gather(self, unit: Unit) -> dict[str, Tensor]:
        """The tensors of a unit, whole: each shard packed and broadcast by one rank that holds it."""
        declared = tensors_of(self.source.arch, unit.kind)
        whole = {
            name: torch.empty(tensor.view(self.source.arch), dtype=self.dtype, device=self.device)
            for name, tensor in declared.items()
        }
        holders: dict[Any, tuple[int, str]] = {}
        for rank in self.source.ranks:
            for held in self.source.units(rank):
                if held.canonical == unit.canonical:
                    holders.setdefault(self.source.shard(rank, unit.kind), (rank, held.prefix))
        for shard, (rank, prefix) in holders.items():
            parts = [(p.name, piece) for p in self.source.params(unit.kind, shard) for piece in p.pieces]
            flat = torch.empty(sum(volume(piece.box) for _, piece in parts), dtype=self.dtype, device=self.device)
            regions = list(flat.split([volume(piece.box) for _, piece in parts]))
            for (name, piece), one in zip(parts, regions if rank == self.rank else [], strict=False):
                shape = shape_of(piece.box)
                one.view(shape).copy_(region(self.held[prefix + name], shape, piece.strides, piece.offset))
            dist.broadcast(flat, rank)
            for (_, piece), one in zip(parts, regions, strict=True):
                whole[piece.name][tuple(slice(*side) for side in piece.box)] = one.view(shape_of(piece.box))
        return whole

    def _load(self, unit: Unit, whole: Mapping[str, Tensor]) -> None:
        for mine in self.target.units(self.rank):
            if mine.canonical == unit.canonical:
                for param in self.target.params(unit.kind, self.target.shard(self.rank, unit.kind)):
                    tensor = self.filled[mine.prefix + param.name]
                    for piece in param.pieces:
                        part = whole[piece.name][tuple(slice(*side) for side in piece.box)]
                        region(tensor, shape_of(piece.box), piece.strides, piece.offset).copy_(part)
                    if param.padding:
                        tensor.view(-1)[-param.padding :].zero_()


def timed(run: Callable[[], Any], repeat: int, device: torch.device) -> tuple[float, int]:
    """Seconds of the slowest rank in the best run after the first, and the most bytes that runs allocated (GPU)."""
    on_gpu, seconds = device.type == "cuda", []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    for _ in range(repeat + 1):
        _barrier()
        begin = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(_largest(time.perf_counter() - begin, device))
    peak = torch.cuda.max_memory_allocated(device) - before if on_gpu else 0
    return min(seconds[1:]), int(_largest(peak, device))


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _largest(value: float, device: torch.device) -> float:
    if not dist.is_initialized():
        return value
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def reshard(bench: Bench, repeat: int) -> dict[str, Any]:
    """Measure one pair of layouts on all processes; sizes are the largest rank's."""
    device, plan = bench.device, bench.transfer.plan
    seconds, peak = timed(bench.transfer.run, repeat, device)
    bitwise = bench.bitwise()
    bench.transfer.run()
    extra = max(peak, bench.transfer.buckets.nbytes)
    bench.transfer.release()
    exchange_seconds, _ = timed(bench.staged_exchange(), repeat, device)
    gather_seconds, gather_peak = timed(bench.full_gather, repeat, device)
    bitwise = bench.bitwise() and bitwise
    ranks = range(dist.get_world_size())
    local, received = (max(map(count, ranks)) for count in (plan.local_bytes, plan.received_bytes))
    arch, size = bench.source.arch, bench.dtype.itemsize
    model = sum(prod(p.shape) for p in HFLayout(arch, (0,)).parameters(0).values()) * size
    largest = max(
        sum(prod(t.view(arch)) for t in tensors_of(arch, unit.kind).values()) for unit in canonical_units(arch)
    )
    return {
        "bitwise": not _largest(not bitwise, device),
        "model_bytes": model,
        "local_bytes": local,
        "received_bytes": received,
        "rounds": bench.transfer.rounds,
        "seconds": round(seconds, 5),
        "gb_s": round((local + received) / seconds / 1e9, 2),
        "all_to_all_and_copy_seconds": round(exchange_seconds, 5),
        "all_to_all_and_copy_gb_s": round((local + received) / exchange_seconds / 1e9, 2),
        "seconds_to_all_to_all_and_copy": round(seconds / exchange_seconds, 3),
        "gather_seconds": round(gather_seconds, 5),
        "gather_to_bridge": round(gather_seconds / seconds, 2),
        "extra_bytes": int(_largest(extra, device)),
        "gather_extra_bytes": max(gather_peak, 2 * largest * size),
    }


def local(bench: Bench, repeat: int) -> dict[str, Any]:
    """Measure the bridge's copies inside one process."""
    plan, device = bench.transfer.plan, bench.device
    copies = list(compact(plan.into(0, 0)))

    def one_by_one() -> None:
        for shape, source, target in copies:
            region(bench.filled[target.parameter], shape, target.strides, target.offset).copy_(
                region(bench.held[source.parameter], shape, source.strides, source.offset)
            )

    moved = plan.local_bytes(0) * (1 + bench.train_dtype.itemsize / bench.dtype.itemsize)
    seconds, peak = timed(bench.transfer.run, repeat, device)
    bitwise = bench.bitwise()
    one_by_one_seconds, _ = timed(one_by_one, repeat, device)
    large = torch.ones(2, min(LARGE_COPY, plan.local_bytes(0)), dtype=torch.uint8, device=device)
    copy_seconds, _ = timed(lambda: large[0].copy_(large[1]), repeat, device)
    return {
        "bitwise": bitwise,
        "local_bytes": plan.local_bytes(0),
        "copies": len(copies),
        "seconds": round(seconds, 6),
        "gb_s": round(moved / seconds / 1e9, 1),
        "copy_each_gb_s": round(moved / one_by_one_seconds / 1e9, 1),
        "one_large_copy_gb_s": round(2 * large[0].nbytes / copy_seconds / 1e9, 1),
        "extra_bytes": peak,
    }


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's arguments, by default those that the program was started with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help=f"{', '.join(MODELS)}, or a config.json or its folder")
    parser.add_argument("--layers", type=int, help="another number of layers than the model's")
    parser.add_argument("--train", nargs="+", default=["tp=1"], metavar="tp=2,pp=2", help="Megatron layouts")
    parser.add_argument("--rollout", nargs="+", default=["tp=1"], metavar="tp=4", help="vLLM layouts, one to each")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the engine, and what is sent")
    parser.add_argument("--train-dtype", choices=DTYPES, help="of the trainer, by default the same")
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--local", action="store_true", help="one process, without communication")
    options = parser.parse_args(words)
    if len(options.train) != len(options.rollout):
        parser.error("--train and --rollout need as many layouts")
    return options


def architecture(options: argparse.Namespace) -> Architecture:
    """Of the model that is asked for."""
    layers = {"num_hidden_layers": options.layers} if options.layers else {}
    if options.model in MODELS:
        return load_architecture(MODELS[options.model] | layers)
    path = Path(options.model)
    return load_architecture(read_json(path / "config.json" if path.is_dir() else path) | layers)


def layouts(arch: Architecture, options: argparse.Namespace) -> list[tuple[str, str, MegatronLayout, VLLMLayout]]:
    """The pairs that are asked for, each behind its words."""
    pairs = zip(options.train, options.rollout, strict=True)
    return [(train, rollout, *read_layouts(arch, train, rollout, DEFAULT_ORDER)) for train, rollout in pairs]


def _run(rank: int, world: int, store: str, options: argparse.Namespace) -> None:
    """Measure all pairs on one of `world` processes."""
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= (1 if options.local else world)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if not options.local:
        dist.init_process_group("nccl" if on_gpu else "gloo", init_method=store, rank=rank, world_size=world)
    arch = architecture(options)
    for train, rollout, source, target in layouts(arch, options):
        bench = Bench(source, target, options, rank, device)
        found = local(bench, options.repeat) if options.local else reshard(bench, options.repeat)
        if rank == 0:
            where = torch.cuda.get_device_name() if on_gpu else "cpu, gloo"
            head = {"model": options.model, "train": train, "rollout": rollout, "dtype": options.dtype, "on": where}
            print(json.dumps(head | found), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    """Run here, in the processes of torchrun, or in processes of our own."""
    options = parse()
    leave_multicast_off()
    if options.local:
        _run(0, 1, "", options)
    elif "RANK" in os.environ:
        _run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", options)
    else:
        pairs = layouts(architecture(options), options)
        world = max(rank for *_, source, target in pairs for rank in (*source.ranks, *target.ranks)) + 1
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_run, (world, f"file://{folder}/store", options), nprocs=world)


if __name__ == "__main__":
    main()
