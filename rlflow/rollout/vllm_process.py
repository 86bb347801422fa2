"""Starting vLLM inside a trainer's process: its environment, its options, and undoing what it changes of the process.

This is the only place that imports vLLM's `LLM`. What is then done with it is left to `vllm_engine`.
"""

import contextlib
import logging
import os
import uuid
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_bridge import compat
from megatron_bridge.families.architecture import Architecture
from rlflow.config.schema import Rollout
from rlflow.errors import UserError
from rlflow.parallel.sub_world import restore_environment
from rlflow.rollout import choice, decoding, routing
from rlflow.rollout.seeds import preserved_generators

if TYPE_CHECKING:
    from vllm import LLM

GIB = 2**30
LATENT_BLOCK_TOKENS = 128  # the largest cache block of vLLM's latent attentions, which choose it
GRAPHS = 16  # evenly spaced batch sizes with a CUDA graph each
BLOCK_TOKENS = 32  # the smallest cache block of the CPU's fast attention: small blocks share more of a short prompt

# In-process scheduler (external_launcher demands it), no progress reports, no look-ups on the network.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CONFIGURE_LOGGING": "1", "TOKENIZERS_PARALLELISM": "false"}
CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}  # there is nothing that compiles on the CPU path but its sampler
GPU_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # it hides the filtered logits, of which log-probs are wanted
CHANGED_VARIABLES = ("LOCAL_WORLD_SIZE", "LD_PRELOAD", "NUMEXPR_MAX_THREADS")


def prepare_environment(on_gpu: bool) -> None:
    """Set what vLLM reads when it is imported. A user's own choice of verbosity is kept."""
    os.environ.update(ENVIRONMENT | (GPU_ENVIRONMENT if on_gpu else CPU_ENVIRONMENT))
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def start(architecture: Architecture, model_path: str, config: Rollout, *, dtype: str, timeout_seconds: int,
          on_gpu: bool, with_routing: bool = False) -> "LLM":  # fmt: skip
    """vLLM with dummy weights on the ranks of the present default group, which must be initialised.

    `with_routing`: its outputs tell to which experts tokens were sent.
    """
    prepare_environment(on_gpu)
    options = engine_options(architecture, config, dtype=dtype, timeout_seconds=timeout_seconds, on_gpu=on_gpu)
    if with_routing and on_gpu:
        options |= routing.OPTION
    with _quiet_import(), _preserved(), contextlib.ExitStack() as stack:
        if not on_gpu:
            compat.keep_vllm_cpu_weights_plain()
            stack.enter_context(compat.vllm_shared_memory(_common_name()))
        from vllm import LLM

        _check_attention(options.get("attention_backend"))
        llm = LLM(model=model_path, **options)
        if not on_gpu:
            compat.start_vllm_cpu_stage(llm)
            if with_routing:
                routing.RoutingRecorder(llm, architecture)
        elif with_routing:
            if dist.get_rank() % config.tensor_parallel_size:
                compat.take_no_vllm_routing(llm)
        elif compat.vllm_keeps_state_on_gpu(llm):
            decoding.install(llm)
            choice.install()
        return llm


def _check_attention(name: str | None) -> None:
    """UserError for an attention that vLLM does not have; whether it can compute the model, vLLM says."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if name is not None and name not in (names := list(AttentionBackendEnum.__members__)):
        raise UserError("rollout.attention_backend", f"{name} is none of vLLM's: {', '.join(names)}")


def _common_name() -> str:
    """A name that the ranks of this engine share with no other."""
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, f"rlflow-{uuid.uuid4().hex}")
    return names[0]


def engine_options(
    architecture: Architecture, config: Rollout, *, dtype: str, timeout_seconds: int, on_gpu: bool
) -> dict[str, Any]:
    """The arguments of `LLM`: nothing is left to vLLM that depends on what else lives in the process.

    UserError for a quantization that the device lacks.
    """
    if config.quantization is not None and not on_gpu:
        raise UserError("rollout.quantization", f"{config.quantization} needs a GPU: set it to null on a CPU")
    length = config.max_prompt_length + config.max_response_length
    options: dict[str, Any] = {
        "dtype": dtype,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "enable_expert_parallel": config.expert_parallel,
        "quantization": config.quantization,
        "distributed_executor_backend": "external_launcher",
        "distributed_timeout_seconds": timeout_seconds,
        "cpu_distributed_timeout_seconds": timeout_seconds,
        "max_model_len": length,
        "max_num_seqs": config.max_num_seqs,
        "kv_cache_memory_bytes": cache_bytes(architecture, config, dtype),
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "seed": 0,
        "enforce_eager": not (on_gpu and config.cuda_graphs),
    }
    if (experts := architecture.experts) is not None and experts.score == "sigmoid":
        # transformers writes configs without these, which vLLM takes to mean another router.
        options["hf_overrides"] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    if config.match_trainer:
        options.setdefault("hf_overrides", {})["head_dtype"] = "float32"
    if on_gpu:
        return options | _gpu_options(config)
    # Of its latent attentions the one for CPUs with matrix tiles packs weights away.
    latent = {"attention_backend": "CPU_MLA"} if architecture.latent is not None else {}
    return options | {"block_size": BLOCK_TOKENS} | latent


def _gpu_options(config: Rollout) -> dict[str, Any]:
    # The cache's size is given; all that is left of the utilization is a check against the memory free at start.
    options: dict[str, Any] = {"enable_sleep_mode": config.sleep_level > 0, "gpu_memory_utilization": 0.01}
    if config.attention_backend is not None:
        options["attention_backend"] = config.attention_backend
    if config.cuda_graphs:
        sizes = capture_sizes(config.max_num_seqs)
        options["compilation_config"] = {
            "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes,
        }  # fmt: skip
    return options


def cache_bytes(architecture: Architecture, config: Rollout, dtype: str) -> int:
    """Bytes of the KV cache: as configured, but no more than `max_num_seqs` sequences of full length can fill.

    UserError where not even one fits.
    """
    block = BLOCK_TOKENS if architecture.latent is None else LATENT_BLOCK_TOKENS
    blocks = -(-(config.max_prompt_length + config.max_response_length) // block) + 1
    layers = architecture.layers // config.pipeline_parallel_size
    numbers = architecture.cached_numbers(config.tensor_parallel_size)
    token = layers * numbers * getattr(torch, dtype).itemsize
    sequence = blocks * block * token
    if config.kv_cache_gib * GIB < sequence:
        message = f"{config.kv_cache_gib} GiB hold no sequence of full length, which takes {sequence / GIB:.3g} GiB"
        raise UserError("rollout.kv_cache_gib", message)
    return int(min(config.kv_cache_gib * GIB, config.max_num_seqs * sequence))


def capture_sizes(most: int) -> list[int]:
    """Batch sizes with a CUDA graph, up to `most`, which vLLM by itself would not reach: its largest is 512.

    Powers of two, and above them even steps: few to capture, and at most a sixteenth of the largest batch is padding.
    """
    step = max(1, -(-most // GRAPHS))
    powers = {2**power for power in range(step.bit_length())}
    return sorted(powers | {min(most, step * count) for count in range(1, GRAPHS + 1)})


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """Importing vLLM warns of deprecated names in libraries that neither we nor the user call."""
    if os.environ["VLLM_LOGGING_LEVEL"] == "ERROR":
        logging.getLogger("vllm").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _preserved() -> Iterator[None]:
    """Undo what `LLM()` does to its process: thread count, torchrun's variables, every random generator."""
    set_num_threads = torch.set_num_threads
    variables = {name: os.environ.get(name) for name in CHANGED_VARIABLES}
    try:
        with preserved_generators():
            yield
    finally:
        torch.set_num_threads = set_num_threads
        restore_environment(variables)
