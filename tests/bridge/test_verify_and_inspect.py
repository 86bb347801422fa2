"""Comparing and describing model folders."""

import json
from pathlib import Path

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
