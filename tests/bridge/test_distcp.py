"""Megatron's torch_dist checkpoints in and out: bitwise, and as a stock GPTModel reads and writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_bridge.checkpoints import load_hf, open_weights
from megatron_bridge.distcp import TRACKER, open_torch_dist
from megatron_bridge.distcp_writer import ITERATION, write_torch_dist
from megatron_bridge.families import Architecture, load_architecture
from megatron_bridge.files import open_hf
from megatron_bridge.layouts import HFLayout, MegatronLayout
from tests.bridge.test_checkpoints import toy_folder
from tests.bridge.toys import empty, gathered

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
FAMILIES = {
    "llama": {"model_type": "llama"},
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "experts": {"model_type": "qwen3_moe", **EXPERTS},
    "mixed": {"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [1]},
}
GRIDS = [{"tp": 1}, {"tp": 2, "pp": 2}, {"tp": 4, "vocab_multiple": 128}]


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


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@pytest.mark.parametrize("chunk_bytes", [2**20, 100])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_bitwise(tmp_path: Path, family: str, grid: dict[str, int], chunk_bytes: int) -> None:
    source = toy_folder(tmp_path / "source", **(FAMILIES[family] | {"num_key_value_heads": 4}))
    out = convert(source, tmp_path / "out", grid=grid, chunk_bytes=chunk_bytes)
    assert same(read(out, load_architecture(out)), open_hf(source))


# ---------------------------------------------------------------- a stock GPTModel of megatron-core
def _stock(arch: Architecture, grid: Any, layout: MegatronLayout) -> Any:
    """This rank's stage of megatron's own model in its local spec, weights zero."""
    from rlflow import parallel  # before megatron-core, which it makes ready for a CPU
    from rlflow.models.config import transformer_config

    from megatron.core.models.gpt import GPTModel  # isort: skip
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # isort: skip

    config = transformer_config(arch, grid, torch.float32)
    if len(set(arch.layer_kinds)) == 1:
        config.moe_layer_freq = 1  # as Megatron-LM says by default that all layers are alike
    with parallel.active(grid):
        return GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm"),
            vocab_size=layout.padded_vocab,
            max_sequence_length=64,
            pre_process=grid.is_first_stage,
            post_process=grid.is_last_stage,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="rope",
            pg_collection=grid.groups,
        )


def _grids(arch: Architecture) -> tuple[Any, MegatronLayout]:
    """TP2 × PP2, or for a model with experts EP2 × PP2."""
    from rlflow import parallel

    parallel.initialize(timeout_seconds=60, seed=0)
    if arch.experts is None:
        return parallel.Grid(tensor=2, pipeline=2), MegatronLayout(arch, tp=2, pp=2, vocab_multiple=32)
    return parallel.Grid(expert=2, pipeline=2), MegatronLayout(arch, dp=2, ep=2, pp=2, vocab_multiple=32)


def _sharded(model: Any, grid: Any, **metadata: Any) -> Any:
    return model.sharded_state_dict(metadata={"dp_cp_group": grid.groups.dp_cp, **metadata})


def _load_stock(source: Path, written: Path) -> list[str]:
    """The parameters in which a model that megatron loads differs from one that the bridge fills."""
    arch = load_architecture(source)
    grid, layout = _grids(arch)
    from megatron.core import dist_checkpointing

    from megatron_bridge.bind_megatron import bind
    from rlflow import parallel

    model = _stock(arch, grid, layout)
    with parallel.active(grid):
        state = dist_checkpointing.load({"model": _sharded(model, grid)}, str(written / ITERATION))
        model.load_state_dict(state["model"])
    expected = empty(layout, dist.get_rank(), torch.float32)
    load_hf(source, layout, expected, rank=dist.get_rank())
    live = bind(model, layout, dist.get_rank())
    return [name for name in expected if not torch.equal(live[name], expected[name])]


@pytest.mark.parametrize("family", ["tied", "qwen2", "experts", "mixed"])
def test_a_stock_model_loads_what_is_written(world: Callable[..., Any], tmp_path: Path, family: str) -> None:
    source = toy_folder(tmp_path / "source", torch.float32, num_hidden_layers=4, **FAMILIES[family])
    written = convert(source, tmp_path / "out", chunk_bytes=200)
    assert world(4, _load_stock, source, written) == [[]] * 4


STYLES = {1: {}, 2: {"non_homogeneous_layers": True}, 3: {"singleton_local_shards": True}}


def _save_stock(source: Path, root: Path) -> None:
    """A checkpoint in each style of keys, as iterations 1, 2, 3."""
    arch = load_architecture(source)
    grid, layout = _grids(arch)
    from megatron.core import dist_checkpointing

    from megatron_bridge.bind_megatron import bind
    from rlflow import parallel

    model = _stock(arch, grid, layout)
    load_hf(source, layout, bind(model, layout, dist.get_rank()), rank=dist.get_rank())
    for iteration, metadata in STYLES.items():
        place = root / f"iter_{iteration:07}"
        place.mkdir(exist_ok=True)
        dist.barrier()
        with parallel.active(grid):
            dist_checkpointing.save({"model": _sharded(model, grid, **metadata)}, str(place))


@pytest.mark.parametrize("family", ["llama", "tied", "experts", "mixed"])
def test_what_a_stock_model_saves_is_read(world: Callable[..., Any], tmp_path: Path, family: str) -> None:
    source = toy_folder(tmp_path / "source", torch.float32, num_hidden_layers=4, **FAMILIES[family])
    world(4, _save_stock, source, tmp_path)
    for iteration in STYLES:
        (tmp_path / TRACKER).write_text(f"{iteration}\n")
        assert same(read(tmp_path, load_architecture(source)), open_hf(source))
