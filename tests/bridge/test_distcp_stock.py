"""Megatron's torch_dist checkpoints as a stock GPTModel of megatron-core, and rlflow's trainer, write and read them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_bridge.checkpoints import load_hf, open_weights
from megatron_bridge.distcp import TRACKER
from megatron_bridge.distcp_writer import ITERATION
from megatron_bridge.families import Architecture, load_architecture
from megatron_bridge.files import open_hf
from megatron_bridge.layouts import MegatronLayout
from tests.bridge.test_checkpoints import toy_folder
from tests.bridge.test_distcp import FAMILIES, convert, read, same
from tests.bridge.toys import empty


class NoAttention(torch.nn.Module):
    """The local spec's own takes no latents; it has no parameters, and nothing is computed here."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()


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
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        if arch.latent is not None:
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = NoAttention
        return GPTModel(
            config,
            spec,
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


@pytest.mark.parametrize("family", ["tied", "qwen2", "experts", "mixed", "latent"])
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


@pytest.mark.parametrize("family", ["llama", "tied", "experts", "mixed", "latent"])
def test_what_a_stock_model_saves_is_read(world: Callable[..., Any], tmp_path: Path, family: str) -> None:
    source = toy_folder(tmp_path / "source", torch.float32, num_hidden_layers=4, **FAMILIES[family])
    world(4, _save_stock, source, tmp_path)
    for iteration in STYLES:
        (tmp_path / TRACKER).write_text(f"{iteration}\n")
        assert same(read(tmp_path, load_architecture(source)), open_hf(source))


# ---------------------------------------------------------------- rlflow's trainer
def _train_and_save(model: Path, root: Path) -> None:
    from rlflow.checkpoint import Checkpoints, State
    from tests.checkpoint.test_resume import _engine, _step

    engine = _engine(model, {"tensor": 2}, torch.float32)
    _step(engine, 0)
    Checkpoints(root, keep=0).save({"actor": engine}, State(step=1, updates={"actor": 1}))
    engine.export_hf(model, root / "exported")


def test_a_step_of_the_trainer_is_read(world: Callable[..., Any], tmp_path: Path, tiny_model: Any) -> None:
    """Its optimizer's state lies in the same files, and is passed over."""
    model = tiny_model("qwen2")
    world(2, _train_and_save, model, tmp_path)
    assert same(read(tmp_path / "step_000001", load_architecture(model)), open_hf(tmp_path / "exported"))


EVERY_FAMILY = [
    ("qwen3", True), ("qwen3_moe", False), ("mixtral", False), ("gemma3_text", True), ("glm4", False), ("glm", True),
    ("deepseek_v3", False),
]  # fmt: skip


def _save_policies(models: list[Path], root: Path) -> None:
    """The policy model of each folder, as the trainer builds it, on two pipeline stages."""
    from megatron_bridge.families import load_architecture
    from rlflow import parallel
    from rlflow.roles import Engine

    from megatron.core import dist_checkpointing  # isort: skip

    parallel.initialize(60, 0)
    grid = parallel.Grid(pipeline=2)
    for model in models:
        engine = Engine(load_architecture(model), grid, dtype=torch.float32, micro_batch_tokens=64)
        engine.load_hf(model)
        (root / model.name).mkdir(exist_ok=True)
        dist.barrier()
        with parallel.active(grid):
            state = {"model": engine.chunks[0].sharded_state_dict(metadata={"dp_cp_group": grid.groups.dp_cp})}
            dist_checkpointing.save(state, str(root / model.name))


def test_every_familys_model_is_read(world: Callable[..., Any], tmp_path: Path, tiny_model: Any) -> None:
    models = [tiny_model(family, tied=tied) for family, tied in EVERY_FAMILY]
    world(2, _save_policies, models, tmp_path)
    for model in models:
        arch = load_architecture(model)
        assert same(read(tmp_path / model.name, arch), dict(open_weights(model, arch))), model.name
