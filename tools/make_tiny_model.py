"""Make a Hugging Face folder with a random Qwen2-like model of a million weights and a small BPE tokenizer.

For trying a whole run where no pretrained model is at hand: heads of 32, which vLLM allows on a CPU, tensor parallelism
up to 2, a chat template. The same seed gives the same folder.

    python tools/make_tiny_model.py --out models/tiny
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 2048
SPECIAL_TOKENS = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
PAD, EOS = 0, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def corpus(seed: int, lines: int = 6000) -> Iterator[str]:
    """Sums and words, so that the tokenizer has merges to make and numbers of several lengths."""
    draw = random.Random(seed)
    words = [
        "the",
        "of",
        "to",
        "and",
        "is",
        "in",
        "compute",
        "sum",
        "answer",
        "number",
        "equals",
        "plus",
        "times",
        "tree",
    ]
    for _ in range(lines):
        a, b = draw.randint(0, 999), draw.randint(0, 999)
        yield f"Compute: {a} + {b} = {a + b}\n" + " ".join(draw.choices(words, k=12)) + ".\n"


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text can be written with it."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(corpus(seed), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=SPECIAL_TOKENS[PAD], eos_token=SPECIAL_TOKENS[EOS], padding_side="left"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(seed: int) -> Qwen2ForCausalLM:
    """Random weights, float32; the vocabulary is padded beyond the tokenizer's, as in real models."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD)
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the Hugging Face folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the tokenizer's text")
    arguments = parser.parse_args()
    model, tokenizer = make_model(arguments.seed), make_tokenizer(arguments.seed)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"{arguments.out}: {weights / 1e6:.2f} million weights, {len(tokenizer)} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
