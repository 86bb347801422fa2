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
    "gemma3_text": {  # windows shorter than most sequences
        "num_hidden_layers": 4, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "glm4": {"num_hidden_layers": 4, "head_dim": 32},
    "deepseek_v3": {  # layer 0 is dense; vLLM on a CPU knows latents of 512 + 64 only
        "num_hidden_layers": 4, "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 1,
        "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "topk_method": "noaux_tc",
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
            "mscale": 1.0, "mscale_all_dim": 0.7,
        },
    },
    "glm": {"num_hidden_layers": 4, "head_dim": 32, "attention_bias": False},
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


def save_model(
    folder: Path, family: str, tied: bool, dtype: torch.dtype = torch.float32, score: bool = False, **overrides: Any
) -> None:
    """A random model of `family` (a key of SHAPES), its weights so large that a misplaced row changes the logits."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

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
    # Gemma's norms add one to their weights, and its embeddings are enlarged: a tied head would only see those.
    center, spread = (0.0, 0.1) if family == "gemma3_text" else (1.0, 0.5)
    generator = torch.Generator().manual_seed(0)
    config.num_labels = 1 if score else config.num_labels
    model = (AutoModelForSequenceClassification if score else AutoModelForCausalLM).from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.0 if "bias" in name else center, 0.2, generator=generator)
            else:
                parameter.normal_(0.0, spread if "embed" in name or "lm_head" in name else 0.12, generator=generator)
        model.to(dtype)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # float32 in every model
                buffer.data = torch.empty_like(buffer, dtype=torch.float32).normal_(0.0, 0.1, generator=generator)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1], "pad_token_id": 0}))
    save_tokenizer(folder)
