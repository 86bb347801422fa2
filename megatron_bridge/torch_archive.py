"""`torch.save` archives of one tensor: where its bytes lie, and what goes before and after them, without the bytes.

Such an archive is a zip file whose entries are stored as they are: a pickle that describes the tensor, and its storage.
What the pickle names is never run.
"""

import io
import mmap
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from megatron_bridge.boxes import row_major

LOCAL_HEADER, NAME_LENGTH = 30, 26  # bytes of a zip entry's header, and where in it two lengths of two bytes begin


class ArchiveView(io.RawIOBase):
    """A part of a mapped file as a file."""

    def __init__(self, mapped: mmap.mmap, offset: int, length: int) -> None:
        super().__init__()
        self._mapped, self._offset, self._length, self._at = mapped, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, to + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        begin = self._offset + self._at
        buffer[:count] = self._mapped[begin : begin + count]
        self._at += count
        return count


class _Description(NamedTuple):
    storage: str
    offset: int
    size: tuple[int, ...]
    strides: tuple[int, ...]


class _DescriptionReader(pickle.Unpickler):
    """Reads what a plain tensor's pickle says of it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, size, strides, *_: _Description(storage, offset, tuple(size), tuple(strides))
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a plain tensor")

    def persistent_load(self, pid: Any) -> str:
        return str(pid[2])


class Place(NamedTuple):
    """Where a tensor's bytes begin in an archive, and how many bytes before say all of what they are."""

    begin: int
    described: int


def find_data(archive: ArchiveView, shape: Sequence[int], itemsize: int) -> Place | None:
    """The bytes of a contiguous tensor of this shape in an archive; None if it holds none as plain bytes.

    Raises zipfile.BadZipFile for what is no archive.
    """
    with zipfile.ZipFile(archive) as opened:
        entries = {info.filename.partition("/")[2]: info for info in opened.infolist()}
        try:
            tensor = _DescriptionReader(io.BytesIO(opened.read(entries["data.pkl"]))).load()
        except pickle.UnpicklingError:
            return None
    if not isinstance(tensor, _Description) or tensor.size != tuple(shape):
        return None
    expected = row_major(shape)
    contiguous = all(n == 1 or a == b for n, a, b in zip(shape, tensor.strides, expected, strict=True))
    data = entries[f"data/{tensor.storage}"]
    end = (tensor.offset + prod(shape)) * itemsize
    if not contiguous or data.compress_type != zipfile.ZIP_STORED or end > data.file_size:
        return None
    archive.seek(data.header_offset + NAME_LENGTH)
    lengths = archive.read(4)
    skipped = sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
    return Place(data.header_offset + LOCAL_HEADER + skipped + tensor.offset * itemsize, data.header_offset)


# ---------------------------------------------------------------- writing
ALIGNMENT = 64  # bytes: where torch has storages begin
STORAGES = {
    torch.float64: torch.DoubleStorage, torch.float32: torch.FloatStorage, torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage, torch.int64: torch.LongStorage, torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage, torch.int8: torch.CharStorage, torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}  # fmt: skip
LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
STORED_SIZES = struct.Struct("<HHHHHIIIHH")  # version, flags, method, time, date, checksum, sizes, lengths


class _Storage(NamedTuple):
    kind: type
    elements: int


class _Described:
    """Pickled as torch pickles a contiguous tensor that is all of storage 0."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._storage, self._shape = _Storage(STORAGES[dtype], prod(shape)), tuple(shape)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        strides = row_major(self._shape)
        return torch._utils._rebuild_tensor_v2, (self._storage, 0, self._shape, strides, False, OrderedDict())


class _DescriptionWriter(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return ("storage", value.kind, "0", "cpu", value.elements) if isinstance(value, _Storage) else None


class _Entry(NamedTuple):
    name: bytes
    at: int
    extra: bytes
    checksum: int
    nbytes: int

    def fields(self, version: int) -> bytes:
        sizes = (self.nbytes, self.nbytes)
        return STORED_SIZES.pack(version, 0, 0, 0, 0x21, self.checksum, *sizes, len(self.name), len(self.extra))

    @property
    def local(self) -> bytes:
        return LOCAL + self.fields(20) + self.name + self.extra

    @property
    def central(self) -> bytes:
        attributes = struct.pack("<HHHII", 0, 0, 0, 0, self.at)
        return CENTRAL + struct.pack("<H", 20) + self.fields(20) + attributes + self.name + self.extra


@lru_cache(maxsize=4096)
def frame(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What goes before and after the bytes of a contiguous tensor, so that all is an archive that `torch.load` reads.

    The checksum of the bytes is left out, as torch itself leaves it out on request.
    """
    description = io.BytesIO()
    _DescriptionWriter(description, protocol=2).dump(_Described(shape, dtype))
    head, entries = b"", []
    for name, data in (("data.pkl", description.getvalue()), ("byteorder", b"little"), ("version", b"3\n")):
        entries.append(_Entry(f"archive/{name}".encode(), len(head), b"", zlib.crc32(data), len(data)))
        head += entries[-1].local + data
    entries.append(_Entry(b"archive/data/0", len(head), b"", 0, prod(shape) * dtype.itemsize))
    room = -(len(head) + len(entries[-1].local) + 4) % ALIGNMENT
    entries[-1] = entries[-1]._replace(extra=struct.pack("<2sH", b"FB", room) + bytes(room))
    head += entries[-1].local
    directory = b"".join(entry.central for entry in entries)
    begin = len(head) + entries[-1].nbytes
    end = struct.pack("<HHHHIIH", 0, 0, len(entries), len(entries), len(directory), begin, 0)
    return head, directory + END + end
