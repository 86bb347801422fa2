"""Rows of parquet and JSON-lines files at any fsspec URL, as dicts of plain Python values, one at a time.

What the columns mean is left to `prompts`; this module knows formats and where in a file something is broken.
"""

import json
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet

from rlflow.errors import UserError

FORMATS = {".parquet": "parquet", ".pq": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
ROWS_AT_ONCE = 1024
BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, pyarrow.ArrowException)
"""What the readers of formats and compressions raise in the middle of a file."""


@dataclass(frozen=True)
class Description:
    """What a file says of itself without being read through; `rows` is None where only reading would tell."""

    columns: tuple[str, ...]
    rows: int | None


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """Every row of the file; raises UserError with the line where a row is no JSON object."""
    return (row for _, row in placed_rows(path))


def placed_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """As `read_rows`, each row with where it stands: `line 1` is the first of a text, `row 0` of parquet."""
    with _open(path) as file:
        if _format(path) == "parquet":
            batches = _parquet(path, file).iter_batches(ROWS_AT_ONCE)
            rows = (plain(row) for batch in batches for row in batch.to_pylist())
            yield from ((f"row {number}", row) for number, row in enumerate(rows))
        else:
            yield from ((f"line {number}", row) for number, row in _json_rows(path, file))


def describe(path: str) -> Description:
    """Columns and, for parquet, rows; of JSON lines, the first row's keys. Raises UserError."""
    with _open(path) as file:
        if _format(path) == "parquet":
            metadata = _parquet(path, file).metadata
            return Description(tuple(metadata.schema.to_arrow_schema().names), metadata.num_rows)
        return Description(tuple(key for _, row in islice(_json_rows(path, file), 1) for key in row), None)


def plain(value: Any) -> Any:
    """`value` with numpy arrays and scalars, at any depth, as lists and Python numbers."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    return value.item() if isinstance(value, np.generic) else value


def _format(path: str) -> str:
    stem = path.lower()
    for ending in COMPRESSIONS:
        stem = stem.removesuffix(ending)
    for ending, name in FORMATS.items():
        if stem.endswith(ending):
            return name
    raise UserError(path, f"unknown file format; the name must end in one of {', '.join(FORMATS)}")


@contextmanager
def _open(path: str) -> Iterator[IO[bytes]]:
    _format(path)
    try:
        opened = fsspec.open(path, "rb", compression="infer")
        file = opened.open()
    except FileNotFoundError:
        raise UserError(path, "no such file") from None
    except (OSError, ValueError, ImportError) as error:
        raise UserError(path, f"cannot be opened: {error}") from error
    try:
        yield file
    except BROKEN as error:
        raise UserError(path, f"is broken or cut short: {error}") from error
    finally:
        opened.close()


def _parquet(path: str, file: IO[bytes]) -> pyarrow.parquet.ParquetFile:
    try:
        return pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise UserError(path, f"is not a parquet file: {error}") from error


def _json_rows(path: str, file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers, from 1, and rows; empty lines are none."""
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}, line {number}", f"is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {number}", "is not a JSON object: every line must be one")
            yield number, row
