"""Hugging Face folders in and out: bitwise, truthful, complete, one writer a file."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_bridge.checkpoints import load_hf
from megatron_bridge.errors import UserError
from megatron_bridge.export import export_hf, together
from megatron_bridge.families import load_architecture
from megatron_bridge.files import INDEX, SINGLE, open_hf
from megatron_bridge.layouts import MegatronLayout
from tests.bridge.toys import CONFIG, empty, labelled, toy

BYTE_EQUAL = {
    "generation_config.json": '{ "eos_token_id": [151645,151643] }',
    "tokenizer.json": '{"model":   {}}',
    "tokenizer_config.json": "{}\n\n",
    "chat_template.jinja": "{{ messages }}\r\n",
}


def folder(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], **files: str) -> Path:
    """A model folder with one weights file."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / SINGLE, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    for name, text in files.items():
        (path / name).write_bytes(text.encode())
    return path


def toy_folder(path: Path, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Path:
    return folder(path, labelled(toy(**config), dtype), config)


def round_trip(source: Path, target: Path, **options: Any) -> Path:
    """Load into one rank's Megatron tensors and export them again."""
    layout = MegatronLayout(load_architecture(source))
    tensors = empty(layout, 0, torch.float32)
    load_hf(source, layout, tensors, rank=0)
    export_hf(target, layout, tensors, rank=0, source=source, **options)
    return target


def _load_and_export(source: Path, target: Path, grid: dict[str, int], file_bytes: int) -> tuple[int, int]:
    layout, rank = MegatronLayout(load_architecture(source), **grid), dist.get_rank()
    tensors = empty(layout, rank, torch.float32)
    loaded = load_hf(source, layout, tensors, rank=rank)
    assert not any((tensor == -1).any() for tensor in tensors.values())
    export_hf(target, layout, tensors, rank=rank, source=source, file_bytes=file_bytes, bucket_bytes=4096)
    return loaded.received, loaded.local


@pytest.mark.parametrize("grid", [{"tp": 2}, {"pp": 2}, {"dp": 2}, {"tp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("config", [{}, {"model_type": "qwen2", "tie_word_embeddings": True}], ids=["llama", "qwen2"])
def test_files_to_megatron_to_files_bitwise(
    world: Callable[..., Any], tmp_path: Path, grid: dict[str, int], config: dict[str, Any]
) -> None:
    source = toy_folder(tmp_path / "source", num_hidden_layers=4, **config)
    size = 1
    for n in grid.values():
        size *= n
    traffic = world(size, _load_and_export, source, tmp_path / "out", grid, 2000)
    assert not any(received for received, _ in traffic)  # each rank reads its own bytes
    before, after = open_hf(source), open_hf(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(after[name], tensor)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert not (tmp_path / "out.partial").exists()


def test_the_index_is_truthful(tmp_path: Path) -> None:  # cases.md A25
    out = round_trip(toy_folder(tmp_path / "source"), tmp_path / "out", file_bytes=1000)
    index = json.loads((out / INDEX).read_text())
    held, total = {}, 0
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            held |= dict.fromkeys(file.keys(), path.name)
        total += sum(tensor.nbytes for tensor in load_file(path).values())
    assert index["weight_map"] == held
    assert held.keys() == labelled(toy()).keys()
    assert index["metadata"]["total_size"] == total == sum(t.nbytes for t in open_hf(tmp_path / "source").values())


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:  # cases.md A25
    out = round_trip(toy_folder(tmp_path / "source"), tmp_path / "out", file_bytes=1000)
    index = json.loads((out / INDEX).read_text())
    first = min(index["weight_map"])
    for change, message in (
        ({**index["weight_map"], "mtp.weight": index["weight_map"][first]}, "not in their file: mtp.weight"),
        ({k: v for k, v in index["weight_map"].items() if k != first}, f"does not list .*: {first}"),
        ({**index["weight_map"], "mtp.weight": "model-9.safetensors"}, "files that do not exist: model-9.safetensors"),
    ):
        (out / INDEX).write_text(json.dumps({"weight_map": change}))
        with pytest.raises(UserError, match=message):
            open_hf(out)


def test_unknown_and_missing_tensors_are_named(tmp_path: Path) -> None:  # cases.md A27
    weights = labelled(toy(), torch.float32)
    weights |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(1) for i in range(2)}
    out = round_trip(folder(tmp_path / "source", weights, {}), tmp_path / "out")
    assert open_hf(out).keys() == labelled(toy()).keys()  # inv_freq is ignored and not exported
    del weights["model.layers.1.self_attn.v_proj.weight"]
    with pytest.raises(UserError) as error:
        round_trip(folder(tmp_path / "bad", {**weights, "foo": torch.ones(1)}, {}), tmp_path / "out")
    assert "foo is not a tensor of a llama model" in str(error.value)
    assert "model.layers.1.self_attn.v_proj.weight is missing" in str(error.value)


def test_a_shape_that_contradicts_the_config_is_named(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", labelled(toy(vocab_size=36), torch.float32), {})
    with pytest.raises(UserError, match=r"model.embed_tokens.weight is \[36, 8\], expected \[37, 8\]"):
        round_trip(source, tmp_path / "out")


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    source = toy_folder(tmp_path / "source")
    os.truncate(source / SINGLE, (source / SINGLE).stat().st_size - 1)
    with pytest.raises(UserError, match="cut short"):
        open_hf(source)


@pytest.mark.parametrize("separate", [True, False])
def test_a_tied_model_keeps_its_key_set(tmp_path: Path, separate: bool) -> None:  # cases.md A04
    weights = labelled(toy(tie_word_embeddings=True), torch.float32)
    if separate:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    out = round_trip(folder(tmp_path / "source", weights, {"tie_word_embeddings": True}), tmp_path / "out")
    after = load_file(out / SINGLE)
    assert after.keys() == weights.keys()
    if separate:
        assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
        assert after["lm_head.weight"].data_ptr() != after["model.embed_tokens.weight"].data_ptr()


def test_what_belongs_to_the_model_is_copied_byte_for_byte(tmp_path: Path) -> None:  # cases.md A24, A07, A20, A21, A23
    config = {
        "head_dim": 2,
        "rope_parameters": {"rope_type": "yarn", "factor": 4, "rope_theta": 500000},
        "torch_dtype": "bfloat16",
    }
    source = folder(tmp_path / "source", labelled(toy(**config), torch.bfloat16), config, **BYTE_EQUAL)
    out = round_trip(source, tmp_path / "out")
    for name in ("config.json", *BYTE_EQUAL):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 37


def test_an_older_export_is_replaced_as_a_whole(tmp_path: Path) -> None:  # cases.md A24: absent in the source → absent
    round_trip(folder(tmp_path / "a", labelled(toy(), torch.float32), {}, **BYTE_EQUAL), tmp_path / "out")
    out = round_trip(toy_folder(tmp_path / "b"), tmp_path / "out", file_bytes=1000)
    assert not (out / "generation_config.json").exists()
    assert not (out / SINGLE).exists()


def test_broken_json_stops_an_export(tmp_path: Path) -> None:  # cases.md A24
    source = toy_folder(tmp_path / "source")
    (source / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="broken JSON"):
        round_trip(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_never_removes_what_is_no_model(tmp_path: Path) -> None:
    source = toy_folder(tmp_path / "source")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"holds files that are no part of a model: thesis.txt"):
        round_trip(source, tmp_path / "out")
    with pytest.raises(UserError, match="would be replaced, but it is read from"):
        round_trip(source, source)


def test_an_export_in_another_dtype_says_so(tmp_path: Path) -> None:
    source = toy_folder(tmp_path / "source", torch.float32, torch_dtype="float32")
    out = round_trip(source, tmp_path / "out", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in open_hf(out).values()} == {torch.bfloat16}
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, out))
    assert after == {**before, "torch_dtype": "bfloat16"}


def test_a_checkpoint_of_two_dtypes_keeps_both(tmp_path: Path) -> None:
    weights = labelled(toy(), torch.bfloat16)
    weights["model.norm.weight"] = torch.rand(8)
    out = round_trip(folder(tmp_path / "source", weights, {}), tmp_path / "out")
    after = load_file(out / SINGLE)
    assert all(
        after[name].dtype == tensor.dtype and torch.equal(after[name], tensor) for name, tensor in weights.items()
    )


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = toy_folder(tmp_path / "source")

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"out.partial/model.safetensors: cannot be written: No space left on device"):
        round_trip(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def _fail_on(bad: int) -> str:
    def action() -> int:
        if dist.get_rank() == bad:
            raise OSError("disk full")
        return dist.get_rank()

    try:
        together(action, None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_writers_failure_is_seen_by_all(world: Callable[..., Any]) -> None:  # cases.md A30
    first, second = world(2, _fail_on, 1)
    assert first == "RuntimeError: rank 1 failed: OSError('disk full')"
    assert second == "OSError: disk full"


def _writers(source: Path, target: Path) -> list[str]:
    layout, rank = MegatronLayout(load_architecture(source), dp=2), dist.get_rank()
    tensors = empty(layout, rank, torch.float32)
    load_hf(source, layout, tensors, rank=rank)
    opened = []
    original = os.posix_fallocate

    def count(descriptor: int, offset: int, size: int) -> None:
        opened.append(os.readlink(f"/proc/self/fd/{descriptor}").rsplit("/", 1)[-1])
        original(descriptor, offset, size)

    os.posix_fallocate = count
    try:
        export_hf(target, layout, tensors, rank=rank, source=source, file_bytes=1000)
    finally:
        os.posix_fallocate = original
    return opened


def test_each_file_has_one_writer(world: Callable[..., Any], tmp_path: Path) -> None:  # cases.md A30
    first, second = world(2, _writers, toy_folder(tmp_path / "source"), tmp_path / "out")
    assert first
    assert second
    assert sorted(first + second) == sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
