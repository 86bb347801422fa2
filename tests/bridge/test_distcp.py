"""Megatron's torch_dist checkpoints in and out: bitwise, complete, refused where they are broken."""

import io
import json
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from megatron_bridge.checkpoints import load_weights, open_weights
from megatron_bridge.distcp import TRACKER, _MetadataReader, find_iteration, open_torch_dist, read_metadata
from megatron_bridge.distcp_writer import ITERATION, write_torch_dist
from megatron_bridge.errors import UserError
from megatron_bridge.export import export_hf
from megatron_bridge.families import Architecture, load_architecture
from megatron_bridge.files import open_hf
from megatron_bridge.layouts import HFLayout, MegatronLayout
from megatron_bridge.layouts.torch_dist import IGNORED
from tests.bridge.test_checkpoints import BYTE_EQUAL, folder, toy_folder
from tests.bridge.toys import empty, gathered, labelled, toy

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
FAMILIES = {
    "llama": {"model_type": "llama"},
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "experts": {"model_type": "qwen3_moe", **EXPERTS},
    "mixed": {"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [1]},
    "latent": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 6,
        "v_head_dim": 4,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}
GRIDS = [{"tp": 1, "vocab_multiple": 1}, {"tp": 2, "pp": 2}, {"tp": 4, "vocab_multiple": 128}]


def convert(source: Path, target: Path, rank: int = 0, ranks: int = 1, **options: Any) -> Path:
    """A Hugging Face folder as a Megatron one."""
    arch = load_architecture(source)
    layout = HFLayout(arch, tuple(range(ranks)))
    options["like"] = MegatronLayout(arch, **options.pop("grid", {}))
    write_torch_dist(target, layout, open_weights(source, arch), rank=rank, model=source, **options)
    return target


def read(path: Path, arch: Architecture) -> dict[str, torch.Tensor]:
    """A Megatron folder's weights under Hugging Face's names."""
    layout, tensors = open_torch_dist(path, arch)
    return gathered(layout, {0: dict(tensors)})


def shards_of(path: Path, layout: MegatronLayout) -> dict[int, dict[str, torch.Tensor]]:
    """What each rank of a layout loads from a folder."""
    held = {rank: empty(layout, rank, torch.float32) for rank in layout.ranks}
    for rank, tensors in held.items():
        load_weights(path, layout, tensors, rank=rank)
    return held


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@pytest.mark.parametrize("chunk_bytes", [2**20, 100])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_bitwise(tmp_path: Path, family: str, grid: dict[str, int], chunk_bytes: int) -> None:
    source = toy_folder(tmp_path / "source", **({"num_hidden_layers": 4, "num_key_value_heads": 4} | FAMILIES[family]))
    out = convert(source, tmp_path / "out", grid=grid, chunk_bytes=chunk_bytes)
    assert same(read(out, load_architecture(out)), open_hf(source))


@pytest.mark.parametrize("family", ["llama", "experts"])
def test_torch_itself_reads_what_is_written_and_its_whole_tensors_are_read(tmp_path: Path, family: str) -> None:
    """Its chunks hold all layers, and all experts, of a stacked tensor at once."""
    source = toy_folder(tmp_path / "source", **FAMILIES[family])
    out = convert(source, tmp_path / "out", grid={"tp": 2}, chunk_bytes=100)
    state = {key: torch.zeros(held.shape, dtype=held.dtype) for key, held in read_metadata(out / ITERATION).items()}
    dcp.load(state, checkpoint_id=out / ITERATION)
    dcp.save(state, checkpoint_id=tmp_path / "whole")
    assert same(read(tmp_path / "whole", load_architecture(source)), open_hf(source))


PASSED_OVER = (
    "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight", "chained_0.optimizer.state.fp32_param.x",
    "rng_state/shard_0.0_1.1", "opt_param_scheduler", "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2",
)  # fmt: skip
WANTED = ("decoder.layers.mlp.linear_fc1.weight", "decoder.optimizers.weight", "output_layer.weight")


def test_what_belongs_to_a_run_rather_than_to_the_model_is_passed_over() -> None:
    assert all(IGNORED.fullmatch(key) for key in PASSED_OVER)
    assert not any(IGNORED.fullmatch(key) for key in WANTED)


# ---------------------------------------------------------------- folders
def test_a_written_folder_is_one_that_training_starts_from(tmp_path: Path) -> None:  # cases.md A31, A24
    source = folder(tmp_path / "source", labelled(toy(), torch.bfloat16), {}, **BYTE_EQUAL)
    out = convert(source, tmp_path / "out")
    for name in ("config.json", *BYTE_EQUAL):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert (out / TRACKER).read_text() == "0"
    assert find_iteration(out) == out / ITERATION
    assert load_architecture(out) == load_architecture(source)
    assert not (tmp_path / "out.partial").exists()


def test_what_was_read_from_megatron_is_exported_in_its_dtypes(tmp_path: Path) -> None:
    weights = labelled(toy(), torch.bfloat16)
    weights["model.norm.weight"] = torch.rand(8)
    source = folder(tmp_path / "source", weights, {})
    out = convert(source, tmp_path / "out")
    layout = MegatronLayout(load_architecture(out))
    tensors = empty(layout, 0, torch.float32)
    load_weights(out, layout, tensors, rank=0)
    export_hf(tmp_path / "exported", layout, tensors, rank=0, source=out)
    assert same(open_hf(tmp_path / "exported"), open_hf(source))


def test_another_dtype_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    source = toy_folder(tmp_path / "source", torch.float32, torch_dtype="float32")
    out = convert(source, tmp_path / "out", dtype=torch.bfloat16)
    _, tensors = open_torch_dist(out, load_architecture(out))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(("tp", "rows"), [(1, 50304), (2, 50432), (4, 50688), (8, 51200)])
def test_the_vocabulary_keeps_its_rows_under_any_padding(tmp_path: Path, tp: int, rows: int) -> None:  # cases.md A07
    source = toy_folder(tmp_path / "source", torch.float32, vocab_size=50257, num_attention_heads=8, hidden_size=16)
    arch = load_architecture(source)
    out = convert(source, tmp_path / "out", grid={"tp": tp, "vocab_multiple": 128}, chunk_bytes=2**20)
    layout, _ = open_torch_dist(out, arch)
    assert max(box[0][1] for box in layout.boxes["embedding.word_embeddings.weight"]) == rows
    target = MegatronLayout(arch, tp=8, vocab_multiple=128)
    held = shards_of(out, target)
    embedding = torch.cat([held[rank]["embedding.word_embeddings.weight"] for rank in range(8)])
    assert embedding.shape == (51200, 16)
    assert torch.equal(embedding[:50257], open_hf(source)["model.embed_tokens.weight"])
    assert not embedding[50257:].any()


def _write_together(source: Path, target: Path) -> None:
    convert(source, target, dist.get_rank(), 2, chunk_bytes=100)


def test_several_processes_write_one_checkpoint(world: Callable[..., Any], tmp_path: Path) -> None:  # cases.md A30
    source = toy_folder(tmp_path / "source")
    world(2, _write_together, source, tmp_path / "out")
    assert same(read(tmp_path / "out", load_architecture(source)), open_hf(source))
    assert {path.name for path in (tmp_path / "out" / ITERATION).glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}


# ---------------------------------------------------------------- what is wrong with a checkpoint
def refused(path: Path, match: str, **config: Any) -> None:
    with pytest.raises(UserError, match=match):
        open_torch_dist(path, toy(**config))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return convert(toy_folder(tmp_path / "source"), tmp_path / "out")


def test_folders_without_a_checkpoint_are_named(tmp_path: Path, written: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere: no such folder")
    refused(tmp_path / "source", r"source: no checkpoint: neither .metadata nor latest_checkpointed_iteration.txt")
    (written / TRACKER).write_text("7")
    refused(written, r"latest_checkpointed_iteration.txt: names iter_0000007, which is no torch_dist checkpoint")
    (written / TRACKER).write_text("seven")
    refused(written, "'seven' is neither an iteration nor 'release'")
    (written / ITERATION).rename(written / "release")
    (written / TRACKER).write_text("release\n")
    assert find_iteration(written) == written / "release"


def test_broken_files_are_named(written: Path) -> None:
    file = written / ITERATION / "__0_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    refused(written, r"__0_0.distcp: cut short: .* ends at byte \d+ of \d+")
    file.write_bytes(bytes(len(whole)))
    refused(written, "__0_0.distcp: damaged: .* at byte [0-9]+ cannot be read")
    file.unlink()
    refused(written, "__0_0.distcp: missing: it holds a part of")
    (written / ITERATION / ".metadata").write_bytes(b"not a pickle")
    refused(written, ".metadata: broken or not of a torch_dist checkpoint")


class NamedMember:
    """Pickled as Python before 3.11.4 pickles a member of an enumeration: `getattr(the class, its name)`."""

    def __init__(self, kind: Any, name: str) -> None:
        self.call = (getattr, (kind, name))

    def __reduce__(self) -> Any:
        return self.call


def test_members_of_enumerations_are_read_however_they_were_pickled() -> None:
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as ENCODING

    member = NamedMember(ENCODING, "TORCH_CHANNELS_LAST")
    assert _MetadataReader(io.BytesIO(pickle.dumps(member))).load() is ENCODING.TORCH_CHANNELS_LAST
    other = _MetadataReader(io.BytesIO(pickle.dumps(NamedMember(dict, "fromkeys")))).load()
    assert type(other).__name__ == "_Inert"


@pytest.mark.parametrize("module", ["os", "torch.distributed.checkpoint.filesystem"])
def test_metadata_runs_no_code(written: Path, module: str) -> None:
    """A pickle may name what a module imports, too: `os.mkdir` of either."""

    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode()

    owned = os.path.relpath(written / "owned")
    call = text(module) + text("mkdir" if module == "os" else "os.mkdir") + b"\x93" + text(owned) + b"\x85R."
    (written / ITERATION / ".metadata").write_bytes(b"\x80\x04" + call)
    refused(written, ".metadata: broken or not of a torch_dist checkpoint")
    assert not (written / "owned").exists()
    pickle.loads(b"\x80\x04" + call)
    assert (written / "owned").exists()


def test_keys_that_do_not_fit_the_model_are_named(written: Path) -> None:
    refused(written, r"decoder.layers.self_attention.linear_qkv.bias is missing", model_type="qwen2")
    refused(written, r"linear_fc1.weight is \[2, 32, 8\], expected \[2, 48, 8\]", intermediate_size=24)
    refused(written, r"embedding.word_embeddings.weight is \[64, 8\], expected \[100, 8\]", vocab_size=100)
    refused(written, r"linear_fc2.weight is \[2, 8, 16\], expected \[3, 8, 16\]", num_hidden_layers=3)
    refused(written, r"self_attention.q_layernorm.weight is missing", model_type="qwen3")


def test_a_tensor_that_nobody_knows_is_named(tmp_path: Path) -> None:
    out = convert(toy_folder(tmp_path / "source", model_type="qwen2"), tmp_path / "out")
    refused(out, "decoder.layers.self_attention.linear_qkv.bias is not a tensor of a llama model")


# ---------------------------------------------------------------- what is wrong with a target
def test_an_existing_folder_is_replaced_only_if_asked(tmp_path: Path, written: Path) -> None:
    other = toy_folder(tmp_path / "other", vocab_size=40)
    with pytest.raises(UserError, match="out: exists already"):
        convert(other, written)
    assert same(read(written, toy()), open_hf(tmp_path / "source"))
    convert(other, written, overwrite=True)
    assert same(read(written, toy(vocab_size=40)), open_hf(other))
    assert {path.name for path in tmp_path.iterdir()} == {"source", "other", "out"}


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    source = toy_folder(tmp_path / "source")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # what a full disk does, in one process alone
    try:
        with pytest.raises(UserError, match=r"cannot be written: File too large"):
            convert(source, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
