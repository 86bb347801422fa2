"""Where in a `torch.save` archive the bytes of its one tensor lie, without reading them.

Such an archive is a zip file whose entries are stored as they are: a pickle that describes the tensor, and its storage.
What the pickle names is never run.
"""

import io
import mmap
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

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


def data_offset(archive: ArchiveView, shape: Sequence[int], itemsize: int) -> int | None:
    """The byte of the archive at which a contiguous tensor of this shape begins; None if it holds none as plain bytes.

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
    return data.header_offset + LOCAL_HEADER + skipped + tensor.offset * itemsize
