"""Predicted memory: bytes that can be counted by hand, and which of it is there in which phase."""

from typing import Any

import pytest

from megatron_bridge.families import Architecture, load_architecture
from megatron_bridge.score import with_score_head
from rlflow.config.load import interpret
from rlflow.config.schema import Config
from rlflow.inspect.calibration import GIB, Calibration
from rlflow.inspect.memory import Peak, predict
from rlflow.inspect.placed import PlacedRollout

EXACT = Calibration(libraries=0.0, rollout=0.0, sampling=0.0, prefill=0.0)
"""What can be counted, alone."""

HIDDEN, FFN, LAYERS, VOCAB = 64, 128, 4, 2048
LAYER = 4 * HIDDEN**2 + 3 * HIDDEN + 3 * HIDDEN * FFN + 2 * HIDDEN  # projections, biases, feed-forward, norms
WEIGHTS = LAYERS * LAYER + VOCAB * HIDDEN + HIDDEN  # tied


def qwen2(**changes: Any) -> Architecture:
    """Two heads of 32, keys and values of their own for each, so that all of attention has the hidden size."""
    return load_architecture({
        "model_type": "qwen2", "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCAB, "tie_word_embeddings": True, **changes,
    })  # fmt: skip


def configuration(**sections: dict[str, Any]) -> Config:
    """A step of 10 samples of 100 rows, 10 prompt and 91 response tokens, in one micro-batch."""
    small = {
        "actor": {"micro_batch_tokens": 1000, "share_prompts": False},
        "rollout": {"max_prompt_length": 10, "max_response_length": 91, "ignore_eos": True, "n": 2},
        "trainer": {"prompts_per_step": 5},
    }
    merged = {name: small.get(name, {}) | sections.get(name, {}) for name in small | sections}
    config, faults = interpret({"model": {"path": "model", "dtype": "bfloat16"}, **merged})
    assert not faults
    return config


def peaks(config: Config, world_size: int = 1, **options: Any) -> dict[str, Peak]:
    policy = qwen2()
    models = dict.fromkeys(("actor", "reference", "reward_model"), policy) | {"critic": with_score_head(policy)}
    return predict(config, models, world_size, EXACT, **options)


def parts(peak: Peak) -> dict[str, float]:
    return {part.what: part.nbytes for part in peak.parts}


def test_a_trained_model_takes_18_bytes_a_weight_and_its_activations() -> None:
    """Of a row a layer keeps 4 hidden states, 4 widths of attention and 3 of the feed-forward part; 2 bytes each."""
    found = parts(peaks(configuration(), with_rollout=False)["update/actor"])
    rows = 10 * 100
    assert found == {
        "libraries": GIB,
        "actor's weights": 2 * WEIGHTS,
        "actor's gradients": 4 * WEIGHTS,
        "actor's optimizer": 12 * WEIGHTS,
        "activations": 2 * rows * (LAYERS * (4 * HIDDEN + 4 * HIDDEN + 3 * FFN) + 2 * HIDDEN),
        "logits": 2 * 910 * VOCAB,  # of all scored tokens: they are fewer than logprob_chunk_tokens
    }


def test_exact_logits_are_there_beside_their_gradient() -> None:
    found = parts(peaks(configuration(rollout={"match_trainer": True}))["update/actor"])
    assert found["logits"] == (4 + 2) * 910 * VOCAB


def test_float32_needs_no_second_copy_of_the_weights() -> None:
    found = parts(peaks(configuration(model={"path": "m", "dtype": "float32"}))["update/actor"])
    assert [found[f"actor's {part}"] / WEIGHTS for part in ("weights", "gradients", "optimizer")] == [4, 4, 8]


def test_recomputation_keeps_a_hidden_state_a_layer() -> None:
    whole = parts(peaks(configuration(actor={"logprob_chunk_tokens": 1}))["update/actor"])
    again = parts(peaks(configuration(actor={"logprob_chunk_tokens": 1, "recompute": "full"}))["update/actor"])
    assert again["activations"] == 2 * 1000 * (LAYERS + 2) * HIDDEN
    assert again["a layer again"] == (whole["activations"] - 2 * 1000 * 2 * HIDDEN) / LAYERS


def test_what_is_offloaded_is_there_only_where_it_is_needed() -> None:
    config = configuration(
        actor={"offload": True}, algorithm={"kl_coef": 0.1, "mini_batches": 2}, reference={"update_every": 1}
    )
    found = {phase: set(parts(peak)) for phase, peak in peaks(config).items()}
    assert list(found) == ["generate", "predict/reference", "predict/actor", "update/actor", "sync"]
    vllm = {"libraries", "vLLM's own", "vLLM's weights", "KV cache"}
    assert found["generate"] >= vllm
    assert not [what for what in found["generate"] if "actor" in what or "reference" in what]
    assert [what for what in found["predict/actor"] if "'s w" in what] == ["actor's weights"]
    assert {"actor's weights", "actor's optimizer"} <= found["update/actor"]
    assert "vLLM's weights" not in found["update/actor"]  # it sleeps


def test_a_hand_over_has_the_actors_weights_or_the_cache() -> None:
    """Whichever is larger: the weights leave before the cache is there again."""
    for cache_gib, larger in ((0.01, "KV cache"), (0.0004, "actor's weights")):
        config = configuration(actor={"offload": True}, rollout={"kv_cache_gib": cache_gib, "max_num_seqs": 256})
        found = parts(peaks(config)["sync"])
        assert {"KV cache", "actor's weights"} & set(found) == {larger}
        assert found["vLLM's weights"] == 2 * WEIGHTS


def test_an_engine_that_does_not_sleep_stays() -> None:
    found = parts(peaks(configuration(rollout={"sleep_level": 0}))["update/actor"])
    assert {"vLLM's weights", "KV cache"} <= set(found)


def test_ranks_share_layers_optimizer_and_stages() -> None:
    """TP2 cuts all but norms, DP2 the optimizer's state alone; the first of two stages keeps two micro-batches."""
    whole = parts(peaks(configuration())["update/actor"])
    replicated = parts(peaks(configuration(), 2)["update/actor"])
    assert replicated["actor's weights"] == whole["actor's weights"]
    assert replicated["actor's optimizer"] == whole["actor's optimizer"] / 2
    halved = parts(peaks(configuration(actor={"tensor_parallel_size": 2}), 2)["update/actor"])
    norms = (2 * LAYERS + 1) * HIDDEN
    assert halved["actor's weights"] == 2 * ((WEIGHTS - norms) / 2 + norms)
    stages = {"pipeline_parallel_size": 2, "micro_batch_tokens": 100}
    first = peaks(configuration(actor=stages), 2)["update/actor"]
    assert first.rank == 0
    assert parts(first)["activations"] == 2 * 100 * 2 * (3 * (8 * HIDDEN + 3 * FFN))  # 3 of 4 layers, no head
    small_cache = configuration(actor=stages, rollout={"kv_cache_gib": 0.0002})
    assert parts(peaks(small_cache, 2)["sync"])["transfer"] == 4 * 2 * WEIGHTS  # buckets as large as all that arrives


def test_graphs_keep_their_activations_between_steps() -> None:
    """Rows come in eighths of the budget, and prompts are not shared."""
    graphed = peaks(configuration(actor={"cuda_graphs": True}))
    assert parts(graphed["generate"])["activations"] == parts(graphed["update/actor"])["activations"]
    assert "activations" not in parts(peaks(configuration())["generate"])


def test_a_shared_prompt_is_computed_once_and_its_keys_are_there_for_each_response() -> None:
    """5 prompts of 10 rows and 10 responses of 90; each response's queries see 100 rows of keys and values."""
    found = parts(peaks(configuration(actor={"share_prompts": True}))["update/actor"])
    by_row = LAYERS * (6 * HIDDEN + 3 * FFN) + 2 * HIDDEN
    assert found["activations"] == 2 * ((5 * 10 + 10 * 90) * by_row + 10 * 100 * LAYERS * 2 * HIDDEN)


def test_a_critic_has_no_logits() -> None:
    config = configuration(algorithm={"advantage": "gae"}, critic={"offload": False})
    assert "logits" not in parts(peaks(config)["update/critic"])


def test_an_average_micro_batch_is_as_full_as_it_can_be() -> None:
    """Where responses may end early, up to the budget; a sample that is longer gets a micro-batch of its own."""
    rows = {}
    for tokens in (250, 50):
        config = configuration(actor={"micro_batch_tokens": tokens}, rollout={"ignore_eos": False})
        found = parts(peaks(config)["update/actor"])
        rows[tokens] = found["activations"] / (2 * (LAYERS * (8 * HIDDEN + 3 * FFN) + 2 * HIDDEN))
    assert rows == pytest.approx({250: 250, 50: 100})


def test_vllms_sampler_works_on_the_logits_where_they_are() -> None:
    """In the weights' precision, of which match_trainer makes float32."""
    policy = qwen2()
    found = [
        PlacedRollout(configuration(rollout={"match_trainer": matched, "max_num_seqs": 7}), policy, 1).logits
        for matched in (False, True)
    ]
    assert found == [2 * 7 * VOCAB, 4 * 7 * VOCAB]
