"""What is said of `torch.save` archives against what torch writes and reads."""

import io
import mmap
import zipfile
from pathlib import Path

import pytest
import torch

from megatron_bridge.torch_archive import ArchiveView, find_data, frame

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def view(path: Path, data: bytes, before: int = 13) -> tuple[mmap.mmap, ArchiveView]:
    """An archive somewhere in a mapped file."""
    path.write_bytes(bytes(before) + data + b"more")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return mapped, ArchiveView(mapped, before, len(data))


def saved(value: object, **options: bool) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (1, 1, 2, 3)], ids=str)
def test_the_bytes_of_a_saved_tensor_are_found(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    mapped, archive = view(tmp_path / "file", saved(tensor))
    place = find_data(archive, shape, dtype.itemsize)
    assert place is not None
    held = torch.frombuffer(mapped, dtype=dtype, count=tensor.numel(), offset=13 + place.begin)
    assert torch.equal(held.view(shape), tensor)


def test_a_part_of_a_storage_is_found_in_it(tmp_path: Path) -> None:
    mapped, archive = view(tmp_path / "file", saved(torch.arange(12.0).view(4, 3)[2:]))
    place = find_data(archive, (2, 3), 4)
    assert place is not None
    assert torch.frombuffer(mapped, dtype=torch.float32, count=6, offset=13 + place.begin).tolist() == [
        6,
        7,
        8,
        9,
        10,
        11,
    ]


@pytest.mark.parametrize(
    "data",
    [
        saved(torch.arange(6.0).view(3, 2).t()),  # strided
        saved(torch.nn.Parameter(torch.zeros(2, 3))),  # no plain tensor
        saved([torch.zeros(2, 3)]),
        saved(torch.zeros(3, 2)),  # another shape
    ],
)
def test_what_does_not_lie_plainly_is_left_to_torch(tmp_path: Path, data: bytes) -> None:
    assert find_data(view(tmp_path / "file", data)[1], (2, 3), 4) is None


def test_what_is_no_archive_is_said(tmp_path: Path) -> None:
    with pytest.raises(zipfile.BadZipFile):
        find_data(view(tmp_path / "file", saved(torch.zeros(2))[:-30])[1], (2,), 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (1, 1, 2, 3)], ids=str)
def test_a_framed_tensor_is_what_torch_loads(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    head, tail = frame(shape, dtype)
    assert len(head) % 64 == 0
    whole = io.BytesIO(head + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() + tail)
    assert torch.equal(torch.load(whole, weights_only=True), tensor)
