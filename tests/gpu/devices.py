"""Which GPU tests run here, and the random models of real shapes that they run on."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import save_tokenizer

QWEN_0_5B: dict[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": 24,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": [3, 1],
    "pad_token_id": 0,
}
"""The shape of Qwen2.5-0.5B; the ids are those of the tests' tokenizer."""


EXPERTS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
"""A small Qwen3-MoE with the proportions of a real one."""


LATENT: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 4,
    "q_lora_rank": 384,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 512,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}
"""A small DeepSeek-V3 with heads and latents of the real sizes."""


GEMMA: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "num_hidden_layers": 6,
    "sliding_window": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
}
"""The width of Gemma-3-1B, heads half as large, every sixth layer without a window."""


needs_transformer_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
)

SPECS = [
    pytest.param(False, id="torch"),
    pytest.param(True, id="Transformer Engine", marks=needs_transformer_engine),
]
"""Values of `transformer_engine`."""


def needs_gpus(count: int) -> list[pytest.MarkDecorator]:
    """Marks of a test module that needs GPUs; elsewhere its tests are skipped."""
    return [
        pytest.mark.gpu,
        pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} CUDA devices"),
    ]


def save_qwen(folder: Path, family: str = "qwen2", **overrides: Any) -> Path:
    """A random bfloat16 model in Qwen2.5-0.5B's shape, drawn on the GPU, with logits that spread like real ones."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**QWEN_0_5B, **overrides})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    gemma = family.startswith("gemma")  # its norms multiply by 1 + w, its embeddings by the root of their size
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.0 if "bias" in name or gemma else 1.0, 0.1, generator=generator)
            else:
                parameter.normal_(0.0, 0.05 if "embed" in name and not gemma else 0.02, generator=generator)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder
