"""Model folders that are damaged or incomplete: refused in a line that names the file and what is wrong with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_bridge.distcp import TRACKER
from megatron_bridge.errors import UserError
from megatron_bridge.files import INDEX, SINGLE, read_header
from megatron_bridge.folders import NAMES
from tests.bridge.test_checkpoints import toy_folder

Run = Callable[..., str]


def refusal(run: Run, source: Path) -> str:
    """What is said of a folder, of either kind, by all commands that read it."""
    said = run("reshard", "--from", source, "--to", source.with_name("out"), code=2)
    assert said.count("\n") == 1
    assert not source.with_name("out").exists()
    return said


# ---------------------------------------------------------------- safetensors
def write(path: Path, header: Any, data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def bytes_at(begin: Any, end: Any, shape: Any = (4,), dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": bytes_at(0, 4), "b": bytes_at(2, 6)}, "b begins at byte 2 of the data, expected 4: tensors overlap"),
        ({"a": bytes_at(0, 4), "b": bytes_at(0, 4)}, "b begins at byte 0 of the data, expected 4: tensors overlap"),
        ({"a": bytes_at(0, 4), "b": bytes_at(6, 10)}, "b begins at byte 6 of the data, expected 4: a gap lies before"),
        ({"a": bytes_at(2, 6)}, "a begins at byte 2 of the data, expected 0: a gap lies before"),
        ({"a": bytes_at(4, 0)}, "a has -4 bytes"),
        ({"a": bytes_at(-4, 0)}, "a needs a dtype, a shape and data_offsets"),
        ({"a": bytes_at(0, 4, shape=(-2, -2))}, "a needs a dtype, a shape and data_offsets"),
        ({"a": bytes_at(0, "4")}, "a needs a dtype, a shape and data_offsets"),
        ({"a": bytes_at(0, 4, dtype=[])}, "a needs a dtype, a shape and data_offsets"),
        ({"a": {"shape": [4]}}, "a needs a dtype, a shape and data_offsets"),
        ({"a": None}, "a needs a dtype, a shape and data_offsets"),
        ({"a": bytes_at(0, 4), "b": bytes_at(4, 8)}, "4 bytes follow the last tensor, b"),
        ({}, "12 bytes follow the header, which has no tensors"),
    ],
)
def test_a_header_that_does_not_fit_its_file(tmp_path: Path, header: Any, message: str) -> None:
    path = write(tmp_path / SINGLE, header, bytes(12))
    with pytest.raises(UserError) as error:
        read_header(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_tensors_may_be_listed_in_any_order_and_be_empty(tmp_path: Path) -> None:
    header = {"b": bytes_at(4, 8), "none": bytes_at(4, 4, shape=(0,)), "a": bytes_at(0, 4)}
    assert read_header(write(tmp_path / SINGLE, header, bytes(8))).keys() == header.keys()


def test_an_index_of_wrong_types(run: Run, tmp_path: Path) -> None:
    source = toy_folder(tmp_path / "source")
    for file in (None, 3, ["x"]):
        (source / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
        said = refusal(run, source)
        assert said == f"error: {source / INDEX}: model.norm.weight has {json.dumps(file)} for the name of its file\n"


def test_weights_of_a_dtype_that_needs_scales(run: Run, tmp_path: Path) -> None:
    source = toy_folder(tmp_path / "source")
    weights = load_file(source / SINGLE)
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(weights, source / SINGLE)
    said = refusal(run, source)
    assert "model.norm.weight has dtype F8_E4M3, which is not supported: convert it to bf16 first" in said


def test_links_that_lead_nowhere(run: Run, tmp_path: Path) -> None:
    source = toy_folder(tmp_path / "source")
    (source / SINGLE).rename(source / "weights")
    (source / SINGLE).symlink_to("../blobs/abc")
    assert f"error: {source / SINGLE}: is a link to ../blobs/abc, which does not exist\n" == refusal(run, source)
    (source / "shard.safetensors").symlink_to("nothing")
    (source / SINGLE).unlink()
    (source / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "shard.safetensors"}}))
    assert f"{source / 'shard.safetensors'}: is a link to nothing, which does not exist\n" in refusal(run, source)


# ---------------------------------------------------------------- Megatron's folders
@pytest.fixture
def megatron(run: Run, tmp_path: Path) -> Path:
    run("import", "--hf", toy_folder(tmp_path / "source"), "--out", tmp_path / "megatron")
    return tmp_path / "megatron"


def test_a_tracker_that_is_broken_or_missing(run: Run, megatron: Path) -> None:
    for content in (b"\xff\xfe0", "²".encode(), b"latest", b""):
        (megatron / TRACKER).write_bytes(content)
        assert f"{megatron / TRACKER}: " in (said := refusal(run, megatron))
        assert "is neither an iteration nor 'release'" in said
    (megatron / TRACKER).unlink()
    said = refusal(run, megatron)
    assert said.startswith(f"error: {megatron / TRACKER}: is missing, which names the iteration to read: ")
    assert "iter_0000000" in said
    run("reshard", "--from", megatron / "iter_0000000", "--to", megatron.with_name("again"))


@pytest.mark.parametrize("said", [{"root": 3}, {"stacked": "yes"}, {"tied_head": None}, {"ranks": [0, 1]}])
def test_names_of_wrong_types(run: Run, megatron: Path, said: dict[str, Any]) -> None:
    (megatron / NAMES).write_text(json.dumps(said))
    assert f"{megatron / NAMES}: {next(iter(said))} is " in refusal(run, megatron)
