"""Safetensors files: reading maps them and touches only the bytes that are copied, writing maps them or goes on and on.

One file at a time lives here, and a folder's index. Which tensors go where is left to layouts and plans, what else a
model folder holds to `folders`.
"""

import contextlib
import io
import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from megatron_bridge.errors import UserError
from megatron_bridge.families import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
WRITE_BYTES = 2**17  # above it kernels seek larger free pages, which cost up to five times the copy on a busy machine
CODES = {dtype: code for code, dtype in DTYPES.items()}


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> `{"dtype", "shape", "data_offsets"}`, offsets in the file; UserError if it is broken."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise UserError(path, "not a safetensors file, or cut short")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise UserError(path, f"broken safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise UserError(path, "broken safetensors header: not a JSON object")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        _check_entry(path, name, entry)
    _check_places(path, header, size - 8 - length)
    for entry in header.values():
        entry["data_offsets"] = tuple(8 + length + offset for offset in entry["data_offsets"])
    return header


def _check_entry(path: Path, name: str, entry: Any) -> None:
    """UserError unless an entry of a header makes sense by itself."""
    known = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (known.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise UserError(path, f"broken safetensors header: {name} needs a dtype, a shape and data_offsets, two numbers")
    if dtype not in DTYPES:
        raise UserError(path, f"{name} has dtype {dtype}, which is not supported")
    if (held := offsets[1] - offsets[0]) != prod(shape) * DTYPES[dtype].itemsize:
        raise UserError(path, f"broken safetensors header: {name} has {held} bytes for {shape}")


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_places(path: Path, header: Mapping[str, Mapping[str, Any]], size: int) -> None:
    """UserError unless the tensors fill the `size` bytes after a header, one after another."""
    places = sorted((*entry["data_offsets"], name) for name, entry in header.items())
    if places and (last := max(places, key=lambda place: place[1]))[1] > size:
        raise UserError(path, f"cut short: {last[2]} ends at byte {last[1]} of {size} after the header")
    due, before = 0, "the header, which has no tensors"
    for begin, end, name in places:
        if begin != due:
            fault = "tensors overlap" if begin < due else "a gap lies before"
            raise UserError(path, f"damaged: {name} begins at byte {begin} of the data, expected {due}: {fault}")
        due, before = end, f"the last tensor, {name}"
    if due != size:
        raise UserError(path, f"damaged: {size - due} bytes follow {before}")


def holds_weights(folder: Path) -> bool:
    """Whether a folder has safetensors under the names that Hugging Face gives them."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, for a folder with one safetensors file or an index.

    UserError where the index and what lies in the files differ, or where there are no weights.
    """
    index = folder / INDEX
    if not index.exists():
        _check_links(folder, (INDEX, SINGLE))
        if not (folder / SINGLE).exists():
            others = sorted(path.name for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))
            found = f", but {', '.join(others[:3])}" if others else ""
            raise UserError(folder, f"neither {SINGLE} nor {INDEX} is here{found}")
        return dict.fromkeys(read_header(folder / SINGLE), folder / SINGLE)
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict):
        raise UserError(index, "has no weight_map")
    for name, file in listed.items():
        if not isinstance(file, str):
            raise UserError(index, f"{name} has {json.dumps(file)} for the name of its file")
    if (folder / SINGLE).exists() and SINGLE not in listed.values():
        raise UserError(folder, f"holds two models: {SINGLE}, and the files that {INDEX} lists")
    _check_links(folder, listed.values())
    if absent := sorted(name for name in set(listed.values()) if not (folder / name).exists()):
        raise UserError(index, f"lists files that do not exist: {', '.join(absent)}")
    held = {file: set(read_header(folder / file)) for file in sorted(set(listed.values()))}
    if lost := sorted(name for name, file in listed.items() if name not in held[file]):
        raise UserError(index, f"lists tensors that are not in their file: {', '.join(lost[:8])}")
    if hidden := sorted(name for file, names in held.items() for name in names if listed.get(name) != file):
        raise UserError(index, f"does not list tensors that the files hold: {', '.join(hidden[:8])}")
    return {name: folder / file for name, file in listed.items()}


def _check_links(folder: Path, names: Iterable[str]) -> None:
    """UserError for a link that leads nowhere, as in a cache from which files were removed."""
    for path in (folder / name for name in sorted(set(names))):
        if path.is_symlink() and not path.exists():
            raise UserError(path, f"is a link to {path.readlink()}, which does not exist")


class MappedTensors(dict[str, Tensor]):
    """Tensors by name that are views of mapped files; what was read of them stays in memory until `release`."""

    def __init__(self, tensors: Mapping[str, Tensor], maps: Iterable[mmap.mmap]) -> None:
        super().__init__(tensors)
        self._maps = tuple(maps)

    def only(self, names: Iterable[str]) -> "MappedTensors":
        """Those with these names."""
        return MappedTensors({name: self[name] for name in names}, self._maps)

    def release(self) -> None:
        """Give the memory of what was read back; what is needed again is read again. Values written are lost."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)


def open_hf(folder: str | Path) -> MappedTensors:
    """Every tensor of a model folder as a view of its mapped file; bytes are read when they are copied.

    Writing to a view changes this process's memory only, never the file.
    """
    tensors: dict[str, Tensor] = {}
    maps = []
    files = tensor_files(Path(folder))
    for path in sorted(set(files.values())):
        with path.open("rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        tensors |= _views(maps[-1], read_header(path))
    return MappedTensors(tensors, maps)


def _views(mapped: mmap.mmap, header: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    views = {}
    for name, entry in header.items():
        shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
        if prod(shape) == 0:
            views[name] = torch.empty(shape, dtype=dtype)
            continue
        flat = torch.frombuffer(mapped, dtype=dtype, count=prod(shape), offset=entry["data_offsets"][0])
        views[name] = flat.view(shape)
    return views


Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def encode_header(shapes: Shapes) -> tuple[bytes, dict[str, Any]]:
    """What a new file begins with, and its tensors' entries in their order, widest dtypes first: so all are aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in sorted(shapes.items(), key=lambda item: -item[1][1].itemsize):
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    del header["__metadata__"]
    return len(text).to_bytes(8, "little") + text, header


def stream_file(path: Path, shapes: Shapes, values: Callable[[str, torch.dtype], Iterator[Tensor]]) -> None:
    """Write a new file from begin to end, and make it durable.

    `values(name, dtype)` yields the elements of a tensor part by part, each contiguous and looked at once.
    """
    beginning, entries = encode_header(shapes)
    with writing(path), path.open("wb", buffering=0) as file:
        write_all(file, memoryview(beginning))
        for name in entries:
            for part in values(name, shapes[name][1]):
                write_all(file, memoryview(part.view(torch.uint8).numpy()))  # type: ignore[arg-type]
        os.fsync(file.fileno())


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the disk refuses to take is a UserError that names the path."""
    try:
        yield
    except OSError as error:
        raise UserError(path, f"cannot be written: {error.strerror}") from error


def write_all(file: io.RawIOBase, data: memoryview) -> None:
    """Write all bytes to an unbuffered file, in parts for which the kernel need not look for large free pages."""
    while data:
        data = data[file.write(data[:WRITE_BYTES]) :]


class MappedFile:
    """A new safetensors file of full size, its tensors mapped for writing; `close` makes it durable."""

    def __init__(self, path: Path, shapes: Shapes) -> None:
        beginning, entries = encode_header(shapes)
        size = len(beginning) + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        with writing(path), path.open("w+b") as file:
            file.write(beginning)
            file.flush()
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk fails here, not in a page fault
            self._mapped = mmap.mmap(file.fileno(), size)
        self.tensors = _views(self._mapped, read_header(path))

    def close(self) -> None:
        """Write everything out; the tensors must not be used any more."""
        self.tensors = {}
        self._mapped.flush()


def close_files(files: Iterable[MappedFile]) -> None:
    """Make new files durable; their tensors must not be used any more."""
    for file in files:
        file.close()


def write_index(folder: Path) -> None:
    """The index of a folder of shards, from what physically lies in them."""
    weight_map, total = {}, 0
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in read_header(path).items():
            begin, end = entry["data_offsets"]
            weight_map[name] = path.name
            total += end - begin
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
