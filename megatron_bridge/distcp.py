"""Reading `torch_dist` checkpoints: which folder holds one, and its weights as views of the mapped files.

A checkpoint is a set of `.distcp` files in which boxes of tensors lie as small `torch.save` archives, uncompressed, and
a `.metadata` pickle that says where. Bytes are read when they are copied. Which box is what, is the layout's business
(`layouts.torch_dist`); writing is left to `distcp_writer`.
"""

import io
import mmap
import pickle
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import EnumMeta
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_bridge.boxes import Box, Param, shape_of, volume
from megatron_bridge.errors import UserError
from megatron_bridge.families import Architecture
from megatron_bridge.files import MappedTensors, holds_weights
from megatron_bridge.layouts import Unit
from megatron_bridge.layouts.torch_dist import (
    IGNORED,
    Grid,
    Grids,
    Stored,
    TorchDistLayout,
    are_layers_stacked,
    candidates,
    key_names,
    whole_params,
)
from megatron_bridge.prediction import say_left_out
from megatron_bridge.record import check_record
from megatron_bridge.tied import check_tied, equal, shared
from megatron_bridge.torch_archive import ArchiveView, find_data

METADATA, TRACKER = ".metadata", "latest_checkpointed_iteration.txt"
OURS = "actor"  # where in a step's folder rlflow's trainer keeps the model
PREDICTION = "mtp."  # keys of layers that predict further tokens
EMBEDDING, OWN_HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
FAULTS_SHOWN = 12


# ---------------------------------------------------------------- folders
def find_iteration(folder: str | Path) -> Path:
    """The folder with the `.metadata` file that a path means: itself, a Megatron-LM root's latest iteration (or
    `release`), or a step of rlflow's trainer. UserError says what is missing."""
    root = Path(folder)
    if not root.is_dir():
        raise UserError(root, "no such folder")
    for place in (root, root / OURS):
        if (place / METADATA).is_file():
            return place
    tracker = root / TRACKER
    if not tracker.is_file():
        if iterations := _iterations(root):
            raise UserError(tracker, f"is missing, which names the iteration to read: give {iterations[-1]} itself")
        raise UserError(root, f"no checkpoint: neither {METADATA} nor {TRACKER} is here")
    named = tracker.read_bytes().decode(errors="replace").strip()
    if named != "release" and not re.fullmatch("[0-9]+", named):
        raise UserError(tracker, f"{named!r} is neither an iteration nor 'release'")
    place = root / (named if named == "release" else f"iter_{int(named):07d}")
    if not (place / METADATA).is_file():
        raise UserError(tracker, f"names {place.name}, which is no torch_dist checkpoint: it has no {METADATA}")
    return place


def is_torch_dist(folder: str | Path) -> bool:
    """Whether a folder looks like a checkpoint that `find_iteration` finds, be it broken."""
    root = Path(folder)
    return any((root / name).is_file() for name in (METADATA, TRACKER, f"{OURS}/{METADATA}")) or (
        not holds_weights(root) and bool(_iterations(root))
    )


def _iterations(root: Path) -> list[Path]:
    """The iterations in a Megatron-LM root, in their order."""
    return sorted(path.parent for path in root.glob(f"iter_*/{METADATA}"))


# ---------------------------------------------------------------- metadata
DESCRIBING = {  # what torch's metadata is made of; every other name in a pickle stays a name
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"),
    ("torch", "Size"), ("collections", "OrderedDict"),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),  # as torch 2.2 and older wrote
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
}  # fmt: skip


class _Inert:
    """Stands for what a checkpoint's metadata says to others; nothing that a pickle names is run."""

    def __init__(self, *arguments: object) -> None:
        pass

    __setstate__ = __init__


def _member(kind: object, name: str) -> object:
    """What Python 3.11 before 3.11.4 pickles an enumeration's member as: `getattr` of it, and here of nothing else."""
    return kind[name] if isinstance(kind, EnumMeta) else _Inert()


class _MetadataReader(pickle.Unpickler):
    """Reads metadata with torch's own classes for it; everything else becomes `_Inert`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in DESCRIBING:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        return getattr(torch, name) if is_dtype else _Inert


class Chunk(NamedTuple):
    """A box of a stored tensor, and where it lies: file, first byte, bytes."""

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: its shape, dtype, and the chunks that it is stored in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


def read_metadata(folder: Path) -> dict[str, StoredTensor]:
    """Key -> tensor, for a folder with a `.metadata` file; objects that are no tensors are left out."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataReader(file).load()
        where = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
        kept = metadata.state_dict_metadata.items()
        return {key: _tensor(key, held, where) for key, held in kept if hasattr(held, "chunks")}
    except (pickle.UnpicklingError, EOFError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(path, f"broken or not of a torch_dist checkpoint: {error!r}") from error


def _tensor(key: str, held: Any, where: Mapping[Any, Any]) -> StoredTensor:
    """From torch's TensorStorageMetadata, and where the chunks are by key and offsets."""
    chunks = []
    for chunk in held.chunks:
        info = where[key, tuple(chunk.offsets)]
        box = tuple((at, at + n) for at, n in zip(chunk.offsets, chunk.sizes, strict=True))
        chunks.append(Chunk(box, info.relative_path, info.offset, info.length))
    return StoredTensor(tuple(held.size), held.properties.dtype, tuple(chunks))


# ---------------------------------------------------------------- what is a parameter of the model
class Part(NamedTuple):
    """A box of a parameter, and the chunk that holds it, at `indices` along the axes that the chunk has before."""

    box: Box
    key: str
    chunk: Chunk
    indices: tuple[int, ...]


class Located(NamedTuple):
    """Where a parameter of the model lies in a checkpoint."""

    dtype: torch.dtype
    parts: tuple[Part, ...]


class _Locator:
    """Finds the parameters of a model among the keys of a checkpoint, and says what is wrong with them."""

    def __init__(self, held: Mapping[str, StoredTensor], arch: Architecture) -> None:
        self.held, self.arch = held, arch
        self.faults: dict[str, None] = {}
        self.known: set[str] = set()
        self.stacked = are_layers_stacked(held)
        self._by_index: dict[tuple[str, int], dict[tuple[int, ...], list[Part]]] = {}

    def locate(self) -> dict[str, Located]:
        """Full parameter name -> place, for those without a fault."""
        found = {}
        for unit in TorchDistLayout(self.arch, (0,), ()).all_units:
            for name, param in whole_params(self.arch, unit.kind).items():
                located = self._parameter(unit, name, param)
                if located is not None:
                    found[unit.prefix + name] = located
        ignored = {OWN_HEAD} if self.arch.tied else set()
        for key in sorted(self.held.keys() - self.known - ignored):
            if not IGNORED.fullmatch(key) and not key.startswith(PREDICTION):
                self.faults[f"{key} is not a tensor of a {self.arch.family} model"] = None
        return found

    def own_head(self) -> tuple[Part, ...]:
        """The chunks of an output matrix that a tied model's checkpoint has all the same."""
        has_one = self.arch.tied and OWN_HEAD in self.held
        return tuple(self._parts(Stored(OWN_HEAD))) if has_one else ()

    def _parameter(self, unit: Unit, name: str, param: Param) -> Located | None:
        names = key_names(self.arch, unit.kind)[name]
        present = [
            places
            for known in names.known()
            for places in candidates(self.arch, unit.prefix + known)
            if all(place.key in self.held for place in places)
        ]
        if not present:
            expected = next(
                places for places in candidates(self.arch, unit.prefix + names.te) if self.stacked or not places[0].lead
            )
            self.faults[f"{expected[0].key} is missing"] = None
            return None
        self.known.update(place.key for places in present for place in places)
        return self._checked(unit, param, present[0])

    def _checked(self, unit: Unit, param: Param, places: Sequence[Stored]) -> Located | None:
        rows = param.shape[0] // len(places)
        parts: list[Part] = []
        for place in places:
            tensor, due = self.held[place.key], (*place.lead, rows, *param.shape[1:])
            shape = tensor.shape
            if unit.kind == "vocab" and len(shape) == 2:  # padded
                due = (max(shape[0], rows), *due[1:])
            if shape != due:
                self.faults[f"{place.key} is {list(shape)}, expected {list(due)}"] = None
                return None
            held = self._parts(place)
            if sum(volume(part.box) for part in held) != prod(shape[len(place.lead) :]):
                self.faults[f"{place.key} is not complete: its chunks leave something out"] = None
                return None
            parts += [_moved(part, place.part * rows) for part in held]
        return Located(self.held[places[0].key].dtype, tuple(sorted(parts)))

    def _parts(self, place: Stored) -> list[Part]:
        """The chunks of a key at an index of its leading axes."""
        count = len(place.lead)
        if (place.key, count) not in self._by_index:
            by_index = self._by_index[place.key, count] = defaultdict(list)
            for chunk in self.held[place.key].chunks:
                for index, inside in _each(chunk.box[:count]):
                    by_index[index].append(Part(chunk.box[count:], place.key, chunk, inside))
        return self._by_index[place.key, count].get(place.indices, [])


def _each(box: Box) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every index in a box, with the same index counted from the box's begin."""
    for inside in product(*(range(hi - lo) for lo, hi in box)):
        yield tuple(lo + i for (lo, _), i in zip(box, inside, strict=True)), inside


def _moved(part: Part, rows: int) -> Part:
    (lo, hi), *rest = part.box
    return part._replace(box=((lo + rows, hi + rows), *rest))


def locate(folder: Path, arch: Architecture) -> dict[str, Located]:
    """Where each parameter of a model, by its full name in `TorchDistLayout`, lies in a checkpoint.

    The output matrix that a tied model has all the same is there too, as `OWN_HEAD`, which no layout knows. UserError
    lists the keys that are missing, of another shape, or none of the model's.
    """
    held = read_metadata(folder)
    locator = _Locator(held, arch)
    found = locator.locate()
    if faults := list(locator.faults):
        more = f"; and {len(faults) - FAULTS_SHOWN} more" if len(faults) > FAULTS_SHOWN else ""
        raise UserError(folder, "; ".join(faults[:FAULTS_SHOWN]) + more)
    if left_out := sum(key.startswith(PREDICTION) for key in held):
        say_left_out(str(folder), left_out)
    if own := locator.own_head():
        found[OWN_HEAD] = Located(held[OWN_HEAD].dtype, own)
    return found


# ---------------------------------------------------------------- tensors
def open_torch_dist(
    folder: str | Path, arch: Architecture, ranks: Sequence[int] = (0,)
) -> tuple[TorchDistLayout, MappedTensors]:
    """A checkpoint's layout as a source for `ranks`, and its tensors under the layout's names, mapped.

    `folder` is anything that `find_iteration` takes. UserError names keys and files that are missing or broken.
    """
    place = find_iteration(folder)
    found = locate(place, arch)
    check_record(place, arch)
    own_head = found.pop(OWN_HEAD, None) if arch.tied else None
    layout = TorchDistLayout(arch, tuple(ranks), _grids(place, arch, found))
    files = _Files(place)
    tensors = {
        f"{name}@{i}": files.tensor(part, located.dtype)
        for name, located in found.items()
        for i, part in enumerate(located.parts)
    }
    if own_head is not None:
        check_tied(place, OWN_HEAD, EMBEDDING, _is_embedding(own_head, found[EMBEDDING], files, arch.vocab))
    return layout, MappedTensors(tensors, files.maps.values())


def _is_embedding(head: Located, embedding: Located, files: "_Files", rows: int) -> bool:
    """Whether two matrices, which may be cut into other boxes, agree in their first rows, those without padding."""
    for mine, yours in product(head.parts, embedding.parts):
        here, there = shared(mine.box, yours.box, rows)
        a, b = files.tensor(mine, head.dtype)[here], files.tensor(yours, embedding.dtype)[there]
        if not equal(a, b, files.release):
            return False
    return True


def _grids(folder: Path, arch: Architecture, found: Mapping[str, Located]) -> Grids:
    """The boxes of each kind's parameters, which must be the same in all its units."""
    grids: dict[str, Grid] = {}
    for unit in TorchDistLayout(arch, (0,), ()).all_units:
        names = [(name, found[unit.prefix + name].parts) for name in whole_params(arch, unit.kind)]
        grid = tuple((name, tuple(part.box for part in parts)) for name, parts in names)
        for (name, boxes), (_, usual) in zip(grid, grids.setdefault(unit.kind, grid), strict=True):
            if boxes != usual:
                key = found[unit.prefix + name].parts[0].key
                raise UserError(folder, f"{key} is cut into other boxes at {unit.canonical}* than elsewhere: resave it")
    return tuple(grids.items())


class _Files:
    """The mapped files of a checkpoint, and the chunks in them as tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.maps: dict[str, mmap.mmap] = {}
        self._chunks: dict[Chunk, Tensor] = {}
        self._places: dict[tuple[object, ...], tuple[bytes, int]] = {}

    def tensor(self, part: Part, dtype: torch.dtype) -> Tensor:
        """A part's elements, in its box's shape."""
        if part.chunk not in self._chunks:
            self._chunks[part.chunk] = self._open(part, dtype)
        return self._chunks[part.chunk][part.indices]

    def release(self) -> None:
        """Give the memory of what was read back."""
        MappedTensors({}, self.maps.values()).release()

    def _open(self, part: Part, dtype: torch.dtype) -> Tensor:
        _, name, offset, length = part.chunk
        path = self.folder / name
        mapped = self._map(path, part.key)
        if offset + length > len(mapped):
            raise UserError(path, f"cut short: {part.key} ends at byte {offset + length} of {len(mapped)}")
        shape = shape_of(part.chunk.box)
        try:
            begin = self._begin(mapped, part.chunk, dtype)
            if begin is not None:
                return torch.frombuffer(mapped, dtype=dtype, count=prod(shape), offset=offset + begin).view(shape)
            tensor = torch.load(io.BytesIO(mapped[offset : offset + length]), map_location="cpu", weights_only=True)
        except (zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, KeyError, EOFError) as error:
            raise UserError(path, f"damaged: {part.key} at byte {offset} cannot be read ({error})") from error
        if tuple(tensor.shape) != shape:
            raise UserError(path, f"{part.key} at byte {offset} is {list(tensor.shape)}, expected {list(shape)}")
        return tensor.to(dtype).contiguous()

    def _begin(self, mapped: mmap.mmap, chunk: Chunk, dtype: torch.dtype) -> int | None:
        """Where in a chunk's archive its bytes begin.

        Archives alike (same length, same description before the bytes) are many: only the first one is taken apart.
        """
        likeness = (shape_of(chunk.box), dtype, chunk.length)
        described, begin = self._places.get(likeness, (b"", 0))
        if described and mapped[chunk.offset : chunk.offset + len(described)] == described:
            return begin
        place = find_data(ArchiveView(mapped, chunk.offset, chunk.length), shape_of(chunk.box), dtype.itemsize)
        if place is None:
            return None
        described = mapped[chunk.offset : chunk.offset + place.described]
        self._places[likeness] = described, place.begin
        return place.begin

    def _map(self, path: Path, key: str) -> mmap.mmap:
        if path.name not in self.maps:
            if not path.is_file() or not path.stat().st_size:
                raise UserError(path, f"{'empty' if path.is_file() else 'missing'}: it holds a part of {key}")
            with path.open("rb") as file:
                self.maps[path.name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self.maps[path.name]
