"""Writing `torch_dist` checkpoints that Megatron-LM, a stock GPTModel and rlflow's trainer start from.

Chunks are made one at a time, when their turn to be written comes, by the bridge's plan from a source that every
writing process can read; torch.distributed.checkpoint writes them. Besides the weights, at iteration 0, the folder gets
what belongs to the model: config, tokenizer, generation settings. It has its name only when it is whole.
"""

import errno
import io
import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_bridge.boxes import shape_of
from megatron_bridge.distcp import TRACKER
from megatron_bridge.errors import UserError
from megatron_bridge.export import Carried, together
from megatron_bridge.families import Architecture
from megatron_bridge.files import MappedTensors
from megatron_bridge.layouts import Layout, MegatronLayout
from megatron_bridge.layouts.torch_dist import (
    TorchDistLayout,
    cut_grids,
    extra_states,
    is_homogeneous,
    key_names,
    stored,
)
from megatron_bridge.plan import Copy, make_plan

CHUNK_BYTES = 64 * 2**20
ITERATION = "iter_0000000"
MEGATRON_VERSION = 3.0  # of the checkpoint's content: q, k and v lie head by head


@dataclass(frozen=True)
class Chunk:
    """A chunk to write: the layout's parameter, and the keys and offsets under which it is stored."""

    parameter: str
    keys: tuple[tuple[str, tuple[int, ...]], ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]  # shape of the whole stored tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def items(self) -> Iterator[WriteItem]:
        """What torch is asked to write."""
        lead = (1,) * (len(self.whole) - len(self.shape))
        for key, offsets in self.keys:
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(lead + self.shape))
            data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), torch.Size(self.whole))
            yield WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)


def write_torch_dist(
    folder: str | Path,
    source_layout: Layout,
    source: Mapping[str, Tensor],
    *,
    rank: int,
    model: str | Path,
    like: MegatronLayout | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: str | Path | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write weights as a Megatron-LM root at iteration 0; every rank of the group calls it and writes its share.

    `source` are the tensors of a layout of which each rank holds everything, as it does of mapped files. `model` is the
    folder whose config and generation settings are taken over, with the tokenizer files of `tokenizer` (by default the
    same). Chunks are the shards of `like` (by default of one rank), of at most `chunk_bytes`; its vocabulary padding is
    kept. `dtype` None keeps the source's. `progress` is told of the bytes of each chunk. A process needs memory for one
    chunk.

    Raises UserError for a target that exists, unless `overwrite`, and where the disk is full; nothing is left then.
    """
    target, partial = Path(folder), Path(f"{folder}.partial")
    carried = Carried(Path(model), Path(tokenizer or model))
    layout = _target(like or MegatronLayout(source_layout.arch), source_layout, chunk_bytes, dtype)
    chunks = _chunks(layout, source_layout, source, rank, dtype)
    maker = together(lambda: _Maker(source_layout, source, layout, rank, chunks, progress), group)
    lead = rank == layout.ranks[0]
    together(lambda: _prepare(target, partial, carried, chunks, overwrite) if lead else None, group)
    try:
        _save(partial / ITERATION, maker, group)
        together(lambda: _finish(target, partial, carried, layout.arch, dtype) if lead else None, group)
    except Exception:
        if lead:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _target(like: MegatronLayout, source: Layout, chunk_bytes: int, dtype: torch.dtype | None) -> TorchDistLayout:
    """The layout to write: each unit by one rank, large ones first to whoever has least."""
    grids = cut_grids(like, chunk_bytes // (dtype or torch.float32).itemsize)
    whole = TorchDistLayout(like.arch, source.ranks[:1], grids)
    sizes = {kind: sum(prod(param.shape) for param in whole.params(kind, 0)) for kind, _ in grids}
    filled: Counter[int] = Counter(dict.fromkeys(source.ranks, 0))
    owners = {}
    for at, unit in sorted(enumerate(whole.all_units), key=lambda item: -sizes[item[1].kind]):
        owners[at] = min(source.ranks, key=lambda rank: (filled[rank], rank))
        filled[owners[at]] += sizes[unit.kind]
    return TorchDistLayout(like.arch, tuple(source.ranks), grids, tuple(owners[at] for at in sorted(owners)))


def _chunks(
    layout: TorchDistLayout, source_layout: Layout, source: Mapping[str, Tensor], rank: int, dtype: torch.dtype | None
) -> list[Chunk]:
    """All chunks of a checkpoint. A stored tensor has one dtype, that of all that it is made of."""
    arch, homogeneous = layout.arch, is_homogeneous(layout.arch)
    of = _dtypes(source_layout, source, rank)
    chunks: list[Chunk] = []
    promoted: dict[str, torch.dtype] = {}
    for unit in layout.all_units:
        params = {param.name: param for param in layout.params(unit.kind, 0)}
        for name, boxes in dict(layout.grids)[unit.kind]:
            written = key_names(arch, unit.kind)[name].written()
            places = [stored(arch, unit.prefix + known, homogeneous) for known in written]
            whole = places[0].lead + tuple(max(hi for _, hi in intervals) for intervals in zip(*boxes, strict=True))
            for i, box in enumerate(boxes):
                pieces = params[f"{name}@{i}"].pieces
                for held in (of[unit.canonical + piece.name] for piece in pieces):
                    promoted[places[0].key] = torch.promote_types(held, promoted.get(places[0].key, held))
                keys = tuple((place.key, (*place.indices, *(lo for lo, _ in box))) for place in places)
                chunks.append(Chunk(f"{unit.prefix}{name}@{i}", keys, shape_of(box), whole, torch.float32))
    return [replace(chunk, dtype=dtype or promoted[chunk.keys[0][0]]) for chunk in chunks]


def _dtypes(layout: Layout, tensors: Mapping[str, Tensor], rank: int) -> dict[str, torch.dtype]:
    """Canonical tensor name -> dtype in the source."""
    found: dict[str, torch.dtype] = {}
    for unit in layout.units(rank):
        for param in layout.params(unit.kind, layout.shard(rank, unit.kind)):
            dtype = tensors[unit.prefix + param.name].dtype
            for name in {unit.canonical + piece.name for piece in param.pieces}:
                found[name] = torch.promote_types(dtype, found.get(name, dtype))
    return found


class _Maker:
    """Makes a rank's chunks from the source, one at a time, in the same memory."""

    def __init__(
        self, source_layout: Layout, source: Mapping[str, Tensor], layout: TorchDistLayout, rank: int,
        chunks: Sequence[Chunk], progress: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        plan = make_plan(source_layout, layout)
        if plan.sources(rank):
            raise ValueError(f"rank {rank} does not hold all of the source: chunks are made without communication")
        self._source, self._progress, self._padding = source, progress, layout.padding(rank)
        mine = layout.parameters(rank)
        self._chunks = {
            item.index: (item, chunk) for chunk in chunks if chunk.parameter in mine for item in chunk.items()
        }
        self._copies: dict[str, list[Copy]] = defaultdict(list)
        for copy in plan.into(rank, rank):
            self._copies[copy.target.parameter].append(copy)
        extra = [key for unit in layout.units(rank) for key in extra_states(layout.arch, unit)]
        self._objects = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in extra]
        self._memory = bytearray(max((chunk.nbytes for _, chunk in self._chunks.values()), default=1))

    @property
    def items(self) -> list[WriteItem]:
        """What is to be written, in order."""
        return self._objects + [item for item, _ in self._chunks.values()]

    def make(self, item: WriteItem) -> Tensor:
        """A chunk's values, until the next one is made."""
        _, chunk = self._chunks[item.index]
        # A tensor with more storage than it needs would be cloned by the writer, and kept.
        tensor = torch.frombuffer(self._memory, dtype=chunk.dtype, count=prod(chunk.shape))
        if chunk.parameter in self._padding:
            tensor[-self._padding[chunk.parameter] :].zero_()
        for shape, source, target in self._copies[chunk.parameter]:
            held = self._source[source.parameter].detach()
            values = held.as_strided(shape, source.strides, held.storage_offset() + source.offset)
            tensor.as_strided(shape, target.strides, target.offset).copy_(values)
        if isinstance(self._source, MappedTensors):
            self._source.release()
        if self._progress is not None:
            self._progress(chunk.nbytes)
        return tensor.view(item.tensor_data.chunk.sizes)  # type: ignore[union-attr]


class _Planner(DefaultSavePlanner):
    """Has torch write what a maker makes, when it is its turn."""

    def __init__(self, maker: _Maker) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._maker = maker
        nothing = io.BytesIO()
        torch.save([None], nothing)
        self._nothing = nothing.getvalue()

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._maker.items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """As they are: the bridge's plan has proven that the chunks fill each tensor once."""
        return create_default_global_save_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return io.BytesIO(self._nothing) if write_item.type == WriteItemType.BYTE_IO else self._maker.make(write_item)


def _save(folder: Path, maker: _Maker, group: dist.ProcessGroup | None) -> None:
    # Read ahead, torch would ask for the next chunk before it has written the last, in the same memory.
    writer = dcp.FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    try:
        dcp.save(
            {}, storage_writer=writer, planner=_Planner(maker), process_group=group, no_dist=not dist.is_initialized()
        )
    except dcp.api.CheckpointException as error:
        for failure, _ in error.failures.values():
            if isinstance(failure, UserError):
                raise failure from None
            if isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise UserError(folder, f"cannot be written: {failure.strerror}") from error
        raise


# ---------------------------------------------------------------- folders
def _prepare(target: Path, partial: Path, carried: Carried, chunks: Sequence[Chunk], overwrite: bool) -> None:
    if target.exists() and not overwrite:
        raise UserError(target, "exists already")
    if target.exists() and target.resolve() in (carried.source.resolve(), carried.tokenizer.resolve()):
        raise UserError(target, "would be replaced, but it is read from")
    carried.check()
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    needed = sum(chunk.nbytes * len(chunk.keys) for chunk in chunks)
    free = shutil.disk_usage(partial).free
    if needed > free:
        partial.rmdir()
        raise UserError(target, f"needs {needed / 1e9:,.1f} GB, but {free / 1e9:,.1f} GB are free there")
    (partial / ITERATION).mkdir()


def _finish(target: Path, partial: Path, carried: Carried, arch: Architecture, dtype: torch.dtype | None) -> None:
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    common = {"common_backend": "torch", "common_backend_version": 1}  # until megatron-core 0.16
    (partial / ITERATION / "metadata.json").write_text(json.dumps(backend | common))
    content = {"non_homogeneous_layers": not is_homogeneous(arch), "singleton_local_shards": False}
    state = {"iteration": 0, "checkpoint_version": MEGATRON_VERSION, "content_metadata": content}
    torch.save(state, partial / ITERATION / "common.pt")
    (partial / TRACKER).write_text("0")
    carried.copy(partial, dtype)
    replaced = Path(f"{target}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
