"""Tied models whose folder has an output matrix all the same: an equal one may go, another is never dropped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_bridge.checkpoints import load_weights
from megatron_bridge.distcp import read_metadata
from megatron_bridge.errors import UserError
from megatron_bridge.families import load_architecture
from megatron_bridge.layouts import MegatronLayout
from tests.bridge.test_checkpoints import folder
from tests.bridge.toys import empty, labelled, toy

TIED = {"tie_word_embeddings": True}
EMBEDDING = "embedding.word_embeddings.weight"


def load(source: Path, model: Path) -> None:
    layout = MegatronLayout(load_architecture(model))
    load_weights(source, layout, empty(layout, 0, torch.float32), rank=0)


@pytest.mark.parametrize("window", [8, 2**22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_output_matrix_of_hugging_face(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("megatron_bridge.tied.WINDOW", window)
    weights: dict[str, Any] = labelled(toy(**TIED), torch.bfloat16)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].to(dtype).clone()
    source = folder(tmp_path / "source", weights, TIED)
    load(source, source)
    weights["lm_head.weight"][-1, -1] += 32
    folder(source, weights, TIED)
    message = "tie_word_embeddings is true, but lm_head.weight and model.embed_tokens.weight differ"
    with pytest.raises(UserError, match=message):
        load(source, source)
    for command in (("import", "--hf", source, "--out"), ("reshard", "--from", source, "--to")):
        assert message in run(*command, tmp_path / "out", code=2)


def test_another_output_matrix_of_megatron(run: Callable[..., str], tmp_path: Path) -> None:
    source = folder(tmp_path / "source", labelled(toy(**TIED), torch.bfloat16), TIED)
    run("import", "--hf", source, "--out", tmp_path / "megatron", "--vocab-multiple", 64)
    place = tmp_path / "megatron" / "iter_0000000"
    state = {key: torch.zeros(held.shape, dtype=held.dtype) for key, held in read_metadata(place).items()}
    dcp.load(state, checkpoint_id=place)
    for name, row, differs in (("equal", None, False), ("padding", 40, False), ("other", 36, True)):
        head = state[EMBEDDING].clone()
        if row is not None:
            head[row] += 512
        dcp.save({**state, "output_layer.weight": head}, checkpoint_id=tmp_path / name)
        words = ("export", "--megatron", tmp_path / name, "--hf", source, "--out", tmp_path / f"{name}-hf")
        said = run(*words, code=2 if differs else 0)
        message = f"tie_word_embeddings is true, but output_layer.weight and {EMBEDDING} differ"
        assert (message in said) == differs
