"""Comparing and describing model folders."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_bridge.families import load_architecture
from megatron_bridge.files import SINGLE, open_hf
from tests.bridge.test_checkpoints import folder, toy_folder
from tests.bridge.test_conversion import Run
from tests.bridge.test_distcp import FAMILIES


def test_differences_are_named(run: Run, tmp_path: Path) -> None:
    source = toy_folder(tmp_path / "source", torch.float32)
    weights = load_file(source / SINGLE)
    weights["model.norm.weight"][3] += 0.25
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].double()
    weights["foo"] = weights.pop("lm_head.weight")
    weights["model.layers.0.input_layernorm.weight"] = torch.full((8,), float("nan"))
    other = folder(tmp_path / "other", weights, {})
    lines = run("verify", source, other, code=1).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "model.embed_tokens.weight float32 and float64",
        "model.layers.0.input_layernorm.weight 8 elements differ, at most by inf",
        "model.norm.weight 1 elements differ, at most by 0.25",
        f"lm_head.weight missing in {other}",
        f"foo extra in {other}",
        "22 tensors: 17 equal, 5 not (2 missing, extra or of another shape), largest difference inf",
    ]
    assert "1 elements" not in run("verify", source, other, "--atol", "0.5", code=1)
    run("verify", other, other)


def test_two_models_of_other_sizes(run: Run, tmp_path: Path) -> None:
    a, b = toy_folder(tmp_path / "a"), toy_folder(tmp_path / "b", intermediate_size=32)
    run("import", "--hf", b, "--out", tmp_path / "megatron")
    assert "shapes [16, 8] and [32, 8]" in run("verify", a, tmp_path / "megatron", code=1)


def test_inspection(run: Run, tmp_path: Path) -> None:
    source = toy_folder(tmp_path / "source", **FAMILIES["mixed"], num_hidden_layers=3)
    found = json.loads(run("inspect", source, "--json"))
    arch = load_architecture(source)
    assert (found["family"], found["layers"], found["layer_kinds"]) == ("qwen3_moe", 3, {"moe": 2, "layer": 1})
    assert found["experts"]["count"] == arch.experts.count == 4  # type: ignore[union-attr]
    assert found["parameters"] == sum(tensor.numel() for tensor in open_hf(source).values())
    assert found["dtypes"] == {"bfloat16": 2 * found["parameters"]}
    assert "model.layers.{0…2}.mlp.experts.{0…3}.up_proj.weight  [8, 8] bfloat16" in run("inspect", source)
    run("import", "--hf", source, "--out", tmp_path / "megatron")
    (tmp_path / "megatron" / "config.json").unlink()
    said = run("inspect", tmp_path / "megatron")
    assert "none: give --hf to convert" in said
    assert "decoder.final_layernorm.weight  [8] bfloat16" in said


@pytest.mark.parametrize(
    ("a", "b", "atol", "said"),
    [
        (0.0, -0.0, None, "1 elements differ, at most by 0"),
        (0.0, -0.0, 0, ""),
        (float("inf"), float("-inf"), None, "1 elements differ, at most by inf"),
        (float("inf"), 1.0, 9, "1 elements differ, at most by inf"),
        (float("nan"), 1.0, 1e30, "1 elements differ, at most by inf"),
        (float("inf"), float("inf"), None, ""),
        (1.0, 1.5, 0.25, "1 elements differ, at most by 0.5"),
    ],
)
def test_what_counts_as_equal(run: Run, tmp_path: Path, a: float, b: float, atol: float | None, said: str) -> None:
    folders = [toy_folder(tmp_path / name, torch.float32) for name in "ab"]
    for path, value in zip(folders, (a, b), strict=True):
        weights = load_file(path / SINGLE)
        weights["model.norm.weight"][0] = value
        folder(path, weights, {})
    words = [] if atol is None else ["--atol", atol]
    assert said in run("verify", *folders, *words, code=1 if said else 0)


def test_payloads_of_nan_are_bits(run: Run, tmp_path: Path) -> None:
    folders = [toy_folder(tmp_path / name, torch.float32) for name in "ab"]
    for path, bits in zip(folders, (0x7FC00000, 0x7FC00001), strict=True):
        weights = load_file(path / SINGLE)
        weights["model.norm.weight"].view(torch.int32)[0] = bits
        folder(path, weights, {})
    assert "1 elements differ, at most by 0" in run("verify", *folders, code=1)
    run("verify", *folders, "--atol", 0)


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "-inf", "much"])
def test_a_tolerance_is_a_number(run: Run, tmp_path: Path, text: str) -> None:
    said = run("verify", tmp_path, tmp_path, f"--atol={text}", code=2)
    assert f"argument --atol: must be a finite number of at least 0, not {text}" in said


@pytest.mark.parametrize("second", ["import", "reshard"])
def test_two_megatron_folders_from_other_names(run: Run, tmp_path: Path, second: str) -> None:
    source = toy_folder(tmp_path / "source", **FAMILIES["experts"])
    run("import", "--hf", source, "--out", tmp_path / "a")
    if second == "import":
        run("reshard", "--from", source, "--to", tmp_path / "stacked", "--experts", "stacked")
        run("import", "--hf", tmp_path / "stacked", "--out", tmp_path / "b")
    else:
        run("reshard", "--from", tmp_path / "a", "--to", tmp_path / "b", "--experts", "stacked")
    assert "0 not" in run("verify", tmp_path / "a", tmp_path / "b")
    assert "0 not" in run("verify", tmp_path / "b", tmp_path / "a")
