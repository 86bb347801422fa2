"""Files to rows: formats, compression, URLs, numpy values and what is said about broken files."""

import gzip
import json
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from rlflow.data.readers import Description, describe, plain, read_rows
from rlflow.errors import UserError

ROWS = [{"prompt": "a", "answer": 1}, {"prompt": [{"role": "user", "content": "b"}], "answer": None}]


def test_json_lines_keep_their_values(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    assert list(read_rows(str(path))) == ROWS
    assert describe(str(path)) == Description(("prompt", "answer"), None)


def test_compressed_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(ROWS[0]).encode()))
    assert list(read_rows(str(path))) == ROWS[:1]


def test_parquet_rows_are_plain_python(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    messages = [[{"role": "user", "content": f"q{i}"}] for i in range(2500)]
    table = pyarrow.table({"prompt": messages, "answer": list(range(2500)), "extra": [{"x": [1.5, 2.5]}] * 2500})
    pyarrow.parquet.write_table(table, path, row_group_size=700)
    rows = list(read_rows(str(path)))
    assert rows[2400] == {"prompt": messages[2400], "answer": 2400, "extra": {"x": [1.5, 2.5]}}
    assert type(rows[0]["prompt"]) is list
    assert describe(str(path)) == Description(("prompt", "answer", "extra"), 2500)


def test_any_fsspec_url() -> None:
    with fsspec.open("memory://bucket/d.jsonl", "w") as file:
        file.write(json.dumps(ROWS[0]))
    assert list(read_rows("memory://bucket/d.jsonl")) == ROWS[:1]


def test_numpy_at_any_depth_becomes_python() -> None:
    """cases.md D01."""
    messages = np.empty(1, dtype=object)
    messages[0] = {"role": "user", "content": np.str_("hi"), "tags": np.array([1, 2])}
    row = plain({"prompt": messages, "ok": np.bool_(True), "n": np.int64(3), "x": [np.float32(0.5)], "t": (1, None)})
    expected = [{"role": "user", "content": "hi", "tags": [1, 2]}]
    assert row == {"prompt": expected, "ok": True, "n": 3, "x": [0.5], "t": [1, None]}
    assert [type(row[key]) for key in ("prompt", "ok", "n")] == [list, bool, int]


@pytest.mark.parametrize(
    ("name", "content", "where", "message"),
    [
        ("d.jsonl", b'{"a": 1}\n{"a": \n', "d.jsonl, line 2", "is not JSON"),
        ("d.jsonl", b"[1]\n", "d.jsonl, line 1", "is not a JSON object"),
        ("d.parquet", b"no parquet at all", "d.parquet", "is not a parquet file"),
        ("d.jsonl.gz", b"not compressed", "d.jsonl.gz", "is broken or cut short: Not a gzipped file"),
        (
            "d.jsonl.gz",
            gzip.compress(b'{"a": 1}\n')[:-4],
            "d.jsonl.gz",
            "is broken or cut short: Compressed file ended",
        ),
        ("d.csv", b"a,b\n", "d.csv", "unknown file format; the name must end in one of .parquet"),
    ],
)
def test_broken_files_say_where(tmp_path: Path, name: str, content: bytes, where: str, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as raised:
        list(read_rows(str(tmp_path / name)))
    assert raised.value.where == f"{tmp_path}/{where}"
    assert raised.value.message.startswith(message)


@pytest.mark.parametrize("path", ["none.jsonl", "nosuch://bucket/d.jsonl"])
def test_files_that_cannot_be_opened(path: str) -> None:
    with pytest.raises(UserError) as raised:
        describe(path)
    assert raised.value.where == path
