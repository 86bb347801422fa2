"""Writing `torch_dist` checkpoints that Megatron-LM, a stock GPTModel and rlflow's trainer start from.

What is written where follows from the layouts alone, so each process writes its file from begin to end, in memory for a
window of a tensor, from a source that it can read; one writes the metadata. Besides the weights, at iteration 0, the
folder gets what belongs to the model: config, tokenizer, generation settings. It has its name only when it is whole.
"""

import io
import json
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_bridge.boxes import shape_of
from megatron_bridge.checkpoints import cast_dtypes, dtypes_in
from megatron_bridge.distcp import METADATA, TRACKER
from megatron_bridge.families import Architecture
from megatron_bridge.files import write_all, writing
from megatron_bridge.fill import MAPPED_BYTES, Filler
from megatron_bridge.folders import Carried, NewFolder, make_durable, together
from megatron_bridge.layouts import Layout, MegatronLayout
from megatron_bridge.layouts.layout import round_up
from megatron_bridge.layouts.torch_dist import (
    TorchDistLayout,
    cut_grids,
    extra_states,
    is_homogeneous,
    key_names,
    stored,
)
from megatron_bridge.record import write_record
from megatron_bridge.torch_archive import ALIGNMENT, frame

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
    def stored_shape(self) -> tuple[int, ...]:
        """Its shape with the axes that the stored tensor has before its own."""
        return (1,) * (len(self.whole) - len(self.shape)) + self.shape


class Entry(NamedTuple):
    """What lies at a place of a file: a chunk, or for the key of no tensor what stands for nothing."""

    begin: int
    nbytes: int
    content: Chunk | str


@dataclass(frozen=True)
class Files:
    """A checkpoint to be written: its layout, whose units have owners, and the entries of each owner's file."""

    layout: TorchDistLayout
    entries: Mapping[int, Sequence[Entry]]

    @property
    def nbytes(self) -> int:
        """Bytes of all files of weights."""
        return sum(entries[-1].begin + entries[-1].nbytes for entries in self.entries.values())

    @property
    def names(self) -> dict[int, str]:
        """The file of each owner."""
        return {rank: f"__{rank}_0.distcp" for rank in self.entries}


def plan_files(
    source_layout: Layout,
    source: Mapping[str, Tensor],
    like: MegatronLayout,
    dtype: torch.dtype | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Files:
    """The files of a checkpoint whose chunks are the shards of `like`, of at most `chunk_bytes` unless one row is more.

    Each rank of the source writes about as much. `dtype` None keeps the source's.
    """
    layout = _layout(like, source_layout, chunk_bytes, dtype)
    chunks = _chunks(layout, source_layout, source, dtype)
    entries: dict[int, list[Entry]] = {}
    for rank in layout.ranks:
        keys = [key for unit in layout.units(rank) for key in extra_states(layout.arch, unit)]
        mine = layout.parameters(rank)
        contents: list[Chunk | str] = [*keys, *(chunk for chunk in chunks if chunk.parameter in mine)]
        if contents:
            entries[rank] = list(_placed(contents))
    return Files(layout, entries)


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
    mapped_bytes: int = MAPPED_BYTES,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda nbytes: None,
    beside: Mapping[str, str] | None = None,
    reads: Sequence[Path] = (),
) -> None:
    """Write weights as a Megatron-LM root at iteration 0; every rank of the group calls it and writes its share.

    `source` are the tensors of a layout of which each rank holds everything, as it does of mapped files. `model` is the
    folder whose config and generation settings are taken over, with the tokenizer files of `tokenizer` (by default the
    same). `like`, `dtype` and `chunk_bytes` as in `plan_files`; `like` is by default a layout of one rank, and its
    vocabulary padding is kept. `progress` is told of bytes as they are written. `beside` are further files' texts by
    name, `reads` further folders that must not be replaced.

    Raises UserError for a target that exists, unless `overwrite`, and where the disk is full; nothing is left then.
    """
    carried = Carried(Path(model), Path(tokenizer or model))
    new = NewFolder(Path(folder), (carried.source, carried.tokenizer, *reads), overwrite)
    files = plan_files(source_layout, source, like or MegatronLayout(source_layout.arch), dtype, chunk_bytes)
    filler = together(lambda: Filler(source_layout, source, files.layout, rank=rank, mapped_bytes=mapped_bytes), group)
    lead = rank == files.layout.ranks[0]
    together(lambda: _begin(new, carried, files) if lead else None, group)
    with new.whole_or_nothing(lead):
        together(lambda: _write_file(new.partial / ITERATION, files, rank, filler, progress), group)
        together(lambda: _finish(new, carried, files, dtype, beside or {}) if lead else None, group)


# ---------------------------------------------------------------- planning
def _layout(like: MegatronLayout, source: Layout, chunk_bytes: int, dtype: torch.dtype | None) -> TorchDistLayout:
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
    layout: TorchDistLayout, source_layout: Layout, source: Mapping[str, Tensor], dtype: torch.dtype | None
) -> list[Chunk]:
    """All chunks of a checkpoint. A stored tensor has one dtype, that of all that it is made of."""
    arch, homogeneous = layout.arch, is_homogeneous(layout.arch)
    whole = replace(layout, owners=None)
    dtypes = dtypes_in(whole, source_layout, source) if dtype is None else cast_dtypes(whole, dtype)
    chunks: list[Chunk] = []
    of_key: dict[str, torch.dtype] = {}
    for unit in layout.all_units:
        for name, boxes in dict(layout.grids)[unit.kind]:
            written = key_names(arch, unit.kind)[name].written()
            places = [stored(arch, unit.prefix + known, homogeneous) for known in written]
            shape = places[0].lead + tuple(max(hi for _, hi in intervals) for intervals in zip(*boxes, strict=True))
            for i, box in enumerate(boxes):
                parameter, key = f"{unit.prefix}{name}@{i}", places[0].key
                if (held := dtypes.get(parameter)) is not None:
                    of_key[key] = torch.promote_types(held, of_key.get(key, held))
                keys = tuple((place.key, (*place.indices, *(lo for lo, _ in box))) for place in places)
                chunks.append(Chunk(parameter, keys, shape_of(box), shape, torch.float32))
    return [replace(chunk, dtype=of_key[chunk.keys[0][0]]) for chunk in chunks]


def _placed(contents: Sequence[Chunk | str]) -> Iterator[Entry]:
    """Contents one after another, each where memory may be aligned."""
    begin = 0
    for content in contents:
        if isinstance(content, Chunk):
            head, tail = frame(content.stored_shape, content.dtype)
            nbytes = len(head) + prod(content.shape) * content.dtype.itemsize + len(tail)
        else:
            nbytes = len(_nothing())
        yield Entry(begin, nbytes, content)
        begin = round_up(begin + nbytes, ALIGNMENT)


def _nothing() -> bytes:
    """What Megatron keeps where a module has no state besides its weights."""
    return _archived([None])


def _archived(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


# ---------------------------------------------------------------- writing
def _begin(new: NewFolder, carried: Carried, files: Files) -> None:
    new.check()
    carried.check()
    new.begin(files.nbytes)
    (new.partial / ITERATION).mkdir()


def _write_file(folder: Path, files: Files, rank: int, filler: Filler, progress: Callable[[int], None]) -> None:
    if rank not in files.entries:
        return
    path = folder / files.names[rank]
    with writing(path), path.open("wb", buffering=0) as file:
        for begin, _, content in files.entries[rank]:
            write_all(file, memoryview(bytes(begin - file.tell())))
            if isinstance(content, Chunk):
                _write_chunk(file, content, filler, progress)
            else:
                write_all(file, memoryview(_nothing()))


def _write_chunk(file: io.FileIO, chunk: Chunk, filler: Filler, progress: Callable[[int], None]) -> None:
    head, tail = frame(chunk.stored_shape, chunk.dtype)
    write_all(file, memoryview(head))
    for part in filler.values(chunk.parameter, chunk.dtype):
        write_all(file, memoryview(part.view(torch.uint8).numpy()))  # type: ignore[arg-type]
        progress(part.nbytes)
    write_all(file, memoryview(tail))


def _metadata(files: Files) -> Metadata:
    """What torch is told of the files."""
    chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    tensors: dict[str, Chunk] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for rank, entries in files.entries.items():
        for begin, nbytes, content in entries:
            place = _StorageInfo(files.names[rank], begin, nbytes)
            if isinstance(content, str):
                places[MetadataIndex(content)] = place
                continue
            for key, offsets in content.keys:
                tensors[key] = content
                chunks[key].append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(content.stored_shape)))
                places[MetadataIndex(key, torch.Size(offsets))] = place
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        key: TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), torch.Size(chunk.whole), chunks[key])
        for key, chunk in tensors.items()
    }
    state |= {index.fqn: BytesStorageMetadata() for index in places if index.fqn not in state}
    return Metadata(state, storage_data=places, version=CURRENT_DCP_VERSION)


def _finish(
    new: NewFolder, carried: Carried, files: Files, dtype: torch.dtype | None, beside: Mapping[str, str]
) -> None:
    folder = new.partial / ITERATION
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    common = {"common_backend": "torch", "common_backend_version": 1}  # until megatron-core 0.16
    with writing(folder):
        (folder / METADATA).write_bytes(pickle.dumps(_metadata(files)))
        (folder / "metadata.json").write_text(json.dumps(backend | common))
        (folder / "common.pt").write_bytes(_archived(_common_state(files.layout.arch)))
        write_record(folder, files.layout.arch)
        make_durable(folder)
        (new.partial / TRACKER).write_text("0")
        for name, text in beside.items():
            (new.partial / name).write_text(text, encoding="utf-8")
        carried.copy(new.partial, dtype)
        new.publish()


def _common_state(arch: Architecture) -> dict[str, object]:
    content = {"non_homogeneous_layers": not is_homogeneous(arch), "singleton_local_shards": False}
    return {"iteration": 0, "checkpoint_version": MEGATRON_VERSION, "content_metadata": content}
