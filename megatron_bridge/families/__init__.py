"""Model families by the `model_type` of their Hugging Face config, and the way from a folder to an Architecture."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_bridge.errors import UserError
from megatron_bridge.families.architecture import Architecture, read_architecture
from megatron_bridge.families.declare import Family
from megatron_bridge.families.deepseek_v3 import DEEPSEEK_V3
from megatron_bridge.families.gemma3 import GEMMA3
from megatron_bridge.families.glm4 import GLM, GLM4
from megatron_bridge.families.llama import LLAMA
from megatron_bridge.families.mixtral import MIXTRAL
from megatron_bridge.families.qwen2 import QWEN2
from megatron_bridge.families.qwen3 import QWEN3
from megatron_bridge.families.qwen3_moe import QWEN3_MOE
from megatron_bridge.families.values import ALL_EXPERTS, read_values

_ALL = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL, DEEPSEEK_V3, GEMMA3, GLM, GLM4)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
INSTEAD = {  # what to do with a model of which a family here is a part
    "gemma3": "it has a vision part: load it as transformers' Gemma3ForConditionalGeneration, make a"
    " Gemma3ForCausalLM of its config.text_config, give it the former's model.language_model as its model, and save it",
}

__all__ = ["FAMILIES", "Architecture", "Family", "load_architecture", "read_json"]


def load_architecture(source: str | Path | Mapping[str, Any], *, reads_weights: bool = True) -> Architecture:
    """The architecture of a Hugging Face folder, or of a config given as a dict; UserError where it is unusable.

    Quantized weights are no fault to a caller that reads none.
    """
    if isinstance(source, Mapping):
        where, config, generation = "config", dict(source), {}
    else:
        path = Path(source) / "config.json"
        if not path.parent.is_dir():
            raise UserError(source, "no such folder; a model is read from a folder, not downloaded")
        if not path.is_file():
            raise UserError(source, "no config.json here: not a Hugging Face model folder")
        where, config = str(path), read_json(path)
        beside = path.with_name("generation_config.json")
        generation = read_json(beside) if beside.exists() else {}
    name = str(config.get("model_type"))
    family = FAMILIES.get(name)
    if family is None:
        advice = f"; {INSTEAD[name]}" if name in INSTEAD else ""
        raise UserError(where, f"model_type {config.get('model_type')!r} is not one of {', '.join(FAMILIES)}{advice}")
    values, faults = read_values(config)
    stops, more = read_values({key: generation.get(key) for key in ("eos_token_id",)})
    faults += [f"generation_config.json: {fault}" for fault in more] + family.check(values)
    if reads_weights and values.get("quantization_config"):
        faults.append(
            "quantization_config: quantized weights are not supported; convert them first, and remove the key"
        )
    arch = read_architecture(family.name, values, stops, family.facts, where, faults)
    if arch.experts is not None and arch.layers * arch.experts.count > ALL_EXPERTS:
        fault = f"{arch.layers} layers of {arch.experts.count} experts are more than anything can list"
        raise UserError(where, fault)
    return replace(arch, hf_config=config)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; UserError names the file and the place where it is broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(path, f"broken JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(path, "not a JSON object")
    return value
