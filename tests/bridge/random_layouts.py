"""Strategies for property tests: any small model of any family, and any way that its systems may lay it out."""

from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from megatron_bridge.families import Architecture
from megatron_bridge.layouts import HFLayout, Layout, MegatronLayout, VLLMLayout
from tests.bridge.toys import toy

EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 1},
    "gemma3_text": {},
    "glm": {"attention_bias": True},
    "glm4": {},
    "deepseek_v3": {  # latents that split over as many ranks as the heads
        **EXPERTS, "num_key_value_heads": 8, "q_lora_rank": 8, "kv_lora_rank": 6, "qk_rope_head_dim": 2,
        "qk_nope_head_dim": 3, "v_head_dim": 5, "n_routed_experts": 4, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    family = draw(st.sampled_from(list(FAMILIES)))
    drawn = {
        "num_hidden_layers": draw(st.integers(2, 5)),
        "hidden_size": draw(st.sampled_from([3, 8])),
        "num_attention_heads": 8,
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4, 8])),
        "head_dim": draw(st.sampled_from([4, 8])),
        "intermediate_size": 8,
        "vocab_size": draw(st.integers(5, 130)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    return toy(model_type=family, **{**drawn, **FAMILIES[family]})


@st.composite
def megatron_layouts(draw: st.DrawFn, arch: Architecture) -> MegatronLayout:
    rows = (arch.heads // arch.kv_heads + 2) * arch.head_dim
    tp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if rows % max(1, n // arch.kv_heads) == 0]))
    pp, vpp = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    cp, dp = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    cuts = sorted(draw(st.lists(st.integers(0, arch.layers), min_size=pp * vpp - 1, max_size=pp * vpp - 1)))
    ep = etp = 1
    if arch.experts is not None:
        size = tp * cp * dp
        etp = draw(st.sampled_from([n for n in (1, 2, 4) if size % n == 0]))
        ep = draw(st.sampled_from([n for n in (1, 2, 4) if size % (etp * n) == 0]))
    names = draw(st.permutations(["tp", "cp", "dp", "ep"]))
    return MegatronLayout(
        arch, tp, pp, dp, vpp=vpp, cp=cp, ep=ep, etp=etp,
        ranks=tuple(draw(st.permutations(range(tp * cp * pp * dp + 1))))[1:],
        order="-".join(draw(st.sampled_from([["pp", *names], [*names, "pp"]]))),
        stages=tuple(hi - lo for lo, hi in pairwise([0, *cuts, arch.layers])),
        spec=draw(st.sampled_from(["local", "te"])),
        experts=draw(st.sampled_from(["sequential", "grouped"])),
        vocab_multiple=draw(st.sampled_from([None, 1, 3])),
    )  # fmt: skip


@st.composite
def vllm_layouts(draw: st.DrawFn, arch: Architecture) -> VLLMLayout:
    parts = [n for n in (1, 2, 4, 8) if arch.experts is None or n <= 4]
    tp, pp, replicas = draw(st.sampled_from(parts)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    ranks = tuple(draw(st.permutations(range(tp * pp * replicas + 1))))[1:]
    return VLLMLayout(arch, tp, ranks, pp=pp, ep=arch.experts is not None and draw(st.booleans()))


@st.composite
def file_layouts(draw: st.DrawFn, arch: Architecture) -> Layout:
    units = len(HFLayout(arch, (0,)).all_units)
    owners = tuple(draw(st.lists(st.integers(0, 2), min_size=units, max_size=units)))
    return HFLayout(arch, tuple(sorted(set(owners))), owners)
