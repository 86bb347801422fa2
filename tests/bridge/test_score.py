"""Score models: read from classifiers of one label, or made of language models on demand."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_bridge.checkpoints import load_hf, open_source
from megatron_bridge.distcp_writer import write_torch_dist
from megatron_bridge.errors import UserError
from megatron_bridge.families import load_architecture
from megatron_bridge.layouts import MegatronLayout
from megatron_bridge.score import load_language_model, with_score_head
from tests.bridge.toys import CONFIG, empty


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_score_model_is_made_of_either_kind_of_folder(
    tiny_model: Callable[..., Path], tmp_path: Path, tied: bool
) -> None:
    folder = tiny_model("qwen2", tied=tied)
    arch = load_architecture(folder)
    write_torch_dist(tmp_path / "megatron", *open_source(folder, arch), rank=0, model=folder)
    layout = MegatronLayout(with_score_head(arch))
    made = []
    for source in (folder, tmp_path / "megatron"):
        made.append(empty(layout, 0, torch.float32))
        load_language_model(source, layout, made[-1], rank=0, head="random")
    assert made[0]["output_layer.weight"].shape == (1, arch.hidden)
    assert [name for name in made[0] if not torch.equal(made[0][name], made[1][name])] == []


def test_nothing_is_made_up_unasked(tiny_model: Callable[..., Path]) -> None:
    language_model, score_model = tiny_model("qwen2", tied=True), tiny_model("llama", tied=False, score=True)
    layout = MegatronLayout(with_score_head(load_architecture(language_model)))
    with pytest.raises(UserError, match=r"score\.weight is missing"):
        load_hf(language_model, layout, {}, rank=0)
    with pytest.raises(UserError, match="this model has a score head already"):
        load_language_model(score_model, layout, {}, rank=0, head="zero")


def test_a_classifier_of_several_labels_is_refused() -> None:
    classifier = {**CONFIG, "architectures": ["LlamaForSequenceClassification"]}
    assert load_architecture({**classifier, "id2label": {"0": "LABEL_0"}}).head == "score"
    for labels in ({}, {"num_labels": 2}, {"id2label": {"0": "bad", "1": "good"}}):
        with pytest.raises(UserError, match="a classifier of 2 labels: a score model has one output"):
            load_architecture({**classifier, **labels})
