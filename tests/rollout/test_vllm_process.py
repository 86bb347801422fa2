"""vLLM's options that follow from the configuration."""

import dataclasses
from types import SimpleNamespace

import pytest

from megatron_bridge.compat import take_no_vllm_routing
from megatron_bridge.families import Architecture
from rlflow.config.schema import Rollout
from rlflow.errors import UserError
from rlflow.rollout.vllm_process import cache_bytes, capture_sizes, engine_options

QWEN2_0B5 = Architecture(
    family="qwen2", layers=24, hidden=896, heads=14, kv_heads=2, head_dim=64, ffn=4864, vocab=151936, tied=True,
    qkv_bias=True, norm_eps=1e-6, rope_theta=1e6, rope_scaling=None, max_positions=32768,
)  # fmt: skip
TOKEN = 2 * 24 * 2 * 64 * 2  # keys and values, layers, KV heads, head size, bytes of bfloat16


def test_the_cache_is_as_large_as_configured() -> None:
    assert cache_bytes(QWEN2_0B5, Rollout(kv_cache_gib=1.5), "bfloat16") == 1.5 * 2**30


def test_the_cache_is_no_larger_than_the_sequences_can_fill() -> None:
    config = Rollout(max_prompt_length=100, max_response_length=28, max_num_seqs=4)
    assert cache_bytes(QWEN2_0B5, config, "bfloat16") == 4 * (128 + 32) * TOKEN


def test_tensor_parallel_ranks_hold_their_own_heads_and_at_least_one() -> None:
    config = Rollout(max_prompt_length=100, max_response_length=28, max_num_seqs=4)
    sizes = [
        cache_bytes(QWEN2_0B5, dataclasses.replace(config, tensor_parallel_size=size), "bfloat16") for size in (1, 2, 4)
    ]
    assert sizes == [sizes[0], sizes[0] // 2, sizes[0] // 2]


def test_a_cache_that_holds_no_sequence_is_refused() -> None:
    config = Rollout(max_prompt_length=16384, max_response_length=16384, kv_cache_gib=0.1)
    with pytest.raises(UserError, match=r"rollout.kv_cache_gib: 0.1 GiB hold no sequence of full length"):
        cache_bytes(QWEN2_0B5, config, "bfloat16")


def test_a_cpu_has_neither_graphs_nor_sleep() -> None:
    config = Rollout(cuda_graphs=True, sleep_level=2)
    on_cpu = engine_options(QWEN2_0B5, config, dtype="float32", timeout_seconds=5, on_gpu=False)
    assert on_cpu["enforce_eager"]
    assert "enable_sleep_mode" not in on_cpu
    on_gpu = engine_options(QWEN2_0B5, config, dtype="bfloat16", timeout_seconds=5, on_gpu=True)
    assert not on_gpu["enforce_eager"]
    assert on_gpu["enable_sleep_mode"]


@pytest.mark.parametrize("most", [1, 5, 64, 256, 1000, 1024])
def test_graphs_reach_the_largest_batch_and_pad_a_sixteenth_of_it_at_most(most: int) -> None:
    sizes = capture_sizes(most)
    assert sizes[-1] == most
    assert len(sizes) <= 27  # 16 steps, and powers of two below the first
    padding = [min(size for size in sizes if size >= batch) - batch for batch in range(1, most + 1)]
    assert max(padding) < max(2, most / 16 + 1)


def test_matching_the_trainer_takes_float32_logits() -> None:
    def overrides(match_trainer: bool) -> object:
        config = Rollout(match_trainer=match_trainer)
        return engine_options(QWEN2_0B5, config, dtype="bfloat16", timeout_seconds=5, on_gpu=True).get("hf_overrides")

    assert overrides(False) is None
    assert overrides(True) == {"head_dtype": "float32"}


def test_an_attention_is_chosen_for_a_gpu_alone() -> None:
    config = Rollout(attention_backend="TRITON_ATTN")
    chosen = [
        engine_options(QWEN2_0B5, config, dtype="bfloat16", timeout_seconds=5, on_gpu=on_gpu).get("attention_backend")
        for on_gpu in (True, False)
    ]
    assert chosen == ["TRITON_ATTN", None]


def test_pipeline_stages_hold_the_cache_of_their_own_layers() -> None:
    config = Rollout(max_prompt_length=100, max_response_length=28, max_num_seqs=4)
    stage = dataclasses.replace(config, pipeline_parallel_size=4)
    assert cache_bytes(QWEN2_0B5, stage, "float16") == cache_bytes(QWEN2_0B5, config, "float16") // 4


def test_vllm_is_told_how_the_model_is_cut_and_kept() -> None:
    config = Rollout(pipeline_parallel_size=2, expert_parallel=True, quantization="fp8")
    options = engine_options(QWEN2_0B5, config, dtype="bfloat16", timeout_seconds=5, on_gpu=True)
    assert options["pipeline_parallel_size"] == 2
    assert options["enable_expert_parallel"] is True
    assert options["quantization"] == "fp8"


def test_a_cpu_does_not_quantize() -> None:
    with pytest.raises(UserError, match=r"rollout\.quantization: fp8 needs a GPU: set it to null on a CPU"):
        engine_options(QWEN2_0B5, Rollout(quantization="fp8"), dtype="bfloat16", timeout_seconds=5, on_gpu=False)


def test_a_rank_whose_outputs_nobody_reads_schedules_without_routing() -> None:
    """vLLM 0.32 would fail there: its connector asserts that the rank's own worker has told of every request."""
    connector = SimpleNamespace(take_output=lambda request, output: output[request])
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=SimpleNamespace(aux_output_connector=connector)))
    take_no_vllm_routing(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core)))
    assert connector.take_output("request", None) is None
