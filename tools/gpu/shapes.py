"""Random models in the shapes of real ones, for measurements that depend on sizes alone.

    python -m tools.gpu.shapes --shape 0.5b --out FOLDER

The tokenizer is the small one of `tools.make_tiny_model`: most of the vocabulary's ids stand for no text.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tools.make_tiny_model import EOS, PAD, make_tokenizer

VOCAB = 151_936
PEAK_FLOPS = 989e12
"""Dense bfloat16 operations a second of an H200, by its datasheet."""
EMBEDDING_SPREAD, MATRIX_SPREAD = 0.05, 0.02  # standard deviations of random weights
BYTES = 2  # of a weight, a key or a value in bfloat16


@dataclass(frozen=True)
class Shape:
    """A Qwen2 model; field names are those of its config.json."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    tie_word_embeddings: bool
    vocab_size: int = VOCAB

    @property
    def embedding(self) -> int:
        """Weights of the embedding, and of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def kv_size(self) -> int:
        """Numbers in a token's keys of a layer, and in its values."""
        return self.hidden_size // self.num_attention_heads * self.num_key_value_heads

    @property
    def layer(self) -> int:
        """Weights of a layer, biases and norms included."""
        projections = 2 * self.hidden_size**2 + 2 * self.hidden_size * self.kv_size
        biases_and_norms = self.hidden_size + 2 * self.kv_size + 2 * self.hidden_size
        return projections + biases_and_norms + 3 * self.hidden_size * self.intermediate_size

    @property
    def parameters(self) -> int:
        """All weights; tied ones once."""
        heads = 1 if self.tie_word_embeddings else 2
        return heads * self.embedding + self.num_hidden_layers * self.layer + self.hidden_size

    @property
    def multiplied(self) -> int:
        """Weights that a token is multiplied by: without the embedding, from which it takes one row."""
        return self.parameters - (0 if self.tie_word_embeddings else self.embedding)

    def forward_flops(self, length: int, tokens: int, *, whole: bool = True) -> float:
        """Operations of a forward of `tokens` in sequences of `length`, causal attention included.

        Two for each weight and token: of all weights as is usual for MFU, or of those that are multiplied. Training
        takes three times as many. Attention multiplies with half of the sequence's keys, and so many values.
        """
        weights = self.parameters if whole else self.multiplied
        return 2.0 * weights * tokens + 4.0 * self.num_hidden_layers * self.hidden_size * (length / 2) * tokens

    def decoding_bytes(self, sequences: int, prompt: int, response: int) -> float:
        """What decoding must read: all weights for each token of a response, and every sequence's keys and values."""
        cached = 2 * self.num_hidden_layers * self.kv_size * BYTES  # of a token
        return response * (self.multiplied * BYTES + sequences * (prompt + response / 2) * cached)


SHAPES = {
    "0.5b": Shape(24, 896, 14, 2, 4864, tie_word_embeddings=True),  # Qwen2.5-0.5B
    "1.5b": Shape(28, 1536, 12, 2, 8960, tie_word_embeddings=True),  # Qwen2.5-1.5B
    "7b8": Shape(8, 3584, 28, 4, 18_944, tie_word_embeddings=False),  # the first eight layers of Qwen2.5-7B
    "7b": Shape(28, 3584, 28, 4, 18_944, tie_word_embeddings=False),  # Qwen2.5-7B
}
TIMED = ("0.5b", "1.5b", "7b8")
"""Shapes with layers of all sizes that fit on one GPU with gradients and AdamW's state."""


def save(folder: str | Path, shape: str | Shape, *, layers: int | None = None) -> Path:
    """Write a Hugging Face folder with random bfloat16 weights and a tokenizer; returns it. A complete one is kept.

    `layers` replaces the shape's number of them. Weights are drawn on the GPU where there is one, so that folders made
    on a CPU hold other numbers.
    """
    folder = Path(folder)
    shape = SHAPES[shape] if isinstance(shape, str) else shape
    shape = shape if layers is None else replace(shape, num_hidden_layers=layers)
    if (folder / "config.json").is_file():  # written last
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(
        "qwen2", **asdict(shape), max_position_embeddings=32_768, rope_theta=1e6, rms_norm_eps=1e-6, bos_token_id=None,
        eos_token_id=EOS, pad_token_id=PAD, architectures=["Qwen2ForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    save_file(_draw_weights(config), folder / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer(0).save_pretrained(folder)
    GenerationConfig(eos_token_id=EOS, pad_token_id=PAD).save_pretrained(folder)
    config.save_pretrained(folder)
    return folder


def _draw_weights(config: Any) -> dict[str, Tensor]:
    """As trained models have them in size: logits that spread, norms about one, small biases."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, parameter in model.named_parameters():
        weight = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        if weight.dim() == 1:
            weight.normal_(0.0 if name.endswith("bias") else 1.0, 0.1, generator=generator)
        else:
            spread = EMBEDDING_SPREAD if "embed" in name else MATRIX_SPREAD
            weight.normal_(0.0, spread, generator=generator)
        weights[name] = weight.cpu()
    return weights


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--layers", type=int, help="in the place of the shape's own number")
    parser.add_argument("--out", type=Path, required=True, help="the Hugging Face folder to write")
    arguments = parser.parse_args()
    print(save(arguments.out, arguments.shape, layers=arguments.layers))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
