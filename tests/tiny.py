"""Tiny random Hugging Face models and a tokenizer to test with."""

import json
import random
from pathlib import Path
from typing import Any

import torch

VOCAB = 500
"""Not a multiple of 64 nor of 128·TP, so that padded vocabularies are always exercised."""

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 4, "head_dim": 32},
    "qwen2": {"num_hidden_layers": 4},
    "qwen3": {"num_hidden_layers": 4, "head_dim": 32},
    "qwen3_moe": {  # layer 1 is dense
        "num_hidden_layers": 4, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "moe_intermediate_size": 64, "mlp_only_layers": [1], "decoder_sparse_step": 1,
    },
    "mixtral": {
        "num_hidden_layers": 4, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": None,
    },
}  # fmt: skip

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    draw = random.Random(0)
    words = ["add", "sum", "the", "of", "and", "is", "equals", "plus", "minus", "times", "cat", "dog", "red", "blue"]
    corpus = [" ".join(draw.choice([*words, str(draw.randint(0, 99))]) for _ in range(12)) for _ in range(500)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def save_model(folder: Path, family: str, tied: bool, dtype: torch.dtype = torch.float32, **overrides: Any) -> None:
    """A random model of `family` (a key of SHAPES), its weights so large that a misplaced row changes the logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": [3, 1],
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(family, **{**shape, **SHAPES.get(family, {}), **overrides})
    generator = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.0 if "bias" in name else 1.0, 0.2, generator=generator)
            else:
                parameter.normal_(0.0, 0.5 if "embed" in name or "lm_head" in name else 0.12, generator=generator)
    model.to(dtype).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1], "pad_token_id": 0}))
    save_tokenizer(folder)
