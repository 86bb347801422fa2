"""The one place that knows how versions of torch, megatron-core and vLLM differ, and where they hide what we need."""

import contextlib
import functools
import importlib.util
import inspect
import queue
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as distributed_c10d

PACKED = (torch.float32, torch.bfloat16)  # what oneDNN multiplies on every CPU


def described(mlp: Any) -> Any:
    """The submodules in megatron-core's description of an MLP or a layer of experts.

    A description is a ModuleSpec in 0.16, a partial in 0.19.
    """
    return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules


def mlp_submodules(mlp: Any) -> list[Any]:
    """The submodules of every MLP in megatron-core's description of one, or of a layer of experts."""
    found = described(mlp)
    if hasattr(found, "experts"):
        return [*mlp_submodules(found.experts), *mlp_submodules(found.shared_experts)]
    return [found]


@functools.cache
def layers_take_residual() -> bool:
    """Whether a layer of megatron-core goes on with the second result of a norm that has two (0.19 does)."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    return "isinstance(pre_mlp_layernorm_output, tuple)" in inspect.getsource(TransformerLayer)


def mend_latent_attention() -> None:
    """Before megatron-core builds latent attention: its module asks classes of Transformer Engine that are not there.

    It takes Transformer Engine to be installed where the import of megatron's wrappers for it does not fail.
    """
    from megatron.core.transformer import multi_latent_attention

    multi_latent_attention.HAVE_TE = importlib.util.find_spec("transformer_engine") is not None


def take_write_results_here() -> None:
    """Before megatron-core writes a checkpoint while its caller waits: let this process hand on what was written.

    For writers that go on behind the caller megatron starts a server process, which takes seconds and outlives a rank
    that is killed.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if getattr(filesystem_async, "_results_queue", False) is None:
        filesystem_async._results_queue = queue.SimpleQueue()


def allow_grouped_queries(attention: Any) -> dict[str, bool]:
    """Keywords that let an attention function of torch take fewer key than query heads; older ones need none."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(attention).parameters else {}


def has_unsorted_groups() -> bool:
    """Whether torch can number the ranks of a new group in the order in which they are given (2.13 and later)."""
    return "sort_ranks" in inspect.signature(distributed_c10d.new_group).parameters


def keep_vllm_cpu_weights_plain() -> None:
    """Before `LLM()` on a CPU: otherwise vLLM keeps weights only packed, linear ones as parameters of shape (0,)."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils

    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
    _keep_vllm_cpu_experts_plain()
    _rotate_vllm_cpu_slices()


@functools.cache
def _rotate_vllm_cpu_slices() -> None:
    """Rotate a part of each head, as latent attention does, by torch: vLLM 0.32's kernel rotates other channels."""
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    by_kernel = RotaryEmbedding.forward_cpu

    def rotate(self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None) -> Any:
        sliced = query.dim() > 2 and not query.is_contiguous()
        return self.forward_native(positions, query, key) if sliced else by_kernel(self, positions, query, key)

    RotaryEmbedding.forward_cpu = rotate


@functools.cache
def _keep_vllm_cpu_experts_plain() -> None:
    """Let vLLM pack the weights of experts beside the parameters, not into them, and know which experts a rank has.

    vLLM 0.32 packs them in parameters of the same shape, does not pack again when weights are loaded again, and under
    expert parallelism looks for all experts on every rank.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts

    pack, multiply = Experts.process_weights_after_loading, Experts.apply

    def pack_beside(self: Any, layer: torch.nn.Module) -> None:
        self.packed = torch.nn.Module()
        for name in ("w13_weight", "w2_weight"):
            self.packed.register_parameter(name, getattr(layer, name))
        pack(self, self.packed)

    def multiply_packed(self: Any, **given: Any) -> None:
        given |= {"w1": self.packed.w13_weight, "w2": self.packed.w2_weight}
        if (local := given["expert_map"]) is not None:
            ids = local[given["topk_ids"].long()]  # -1: on another rank, which adds its part
            given["topk_weights"] = given["topk_weights"].masked_fill(ids < 0, 0)
            given["topk_ids"] = ids.clamp(min=0).to(given["topk_ids"].dtype)
        multiply(self, **given)

    Experts.process_weights_after_loading, Experts.apply = pack_beside, multiply_packed


def start_vllm_cpu_stage(llm: Any) -> None:
    """After `LLM()` on a CPU: make what a later pipeline stage receives into, which vLLM does in its GPU warm-up."""
    from vllm.distributed.parallel_state import get_pp_group

    runner, model = vllm_runner(llm), vllm_runner(llm).get_model()
    if not get_pp_group().is_first_rank:
        runner.intermediate_tensors = model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


@contextlib.contextmanager
def vllm_shared_memory(job: str) -> Iterator[None]:
    """While `LLM()` starts on a CPU: name the shared memory of its groups after the job, and leave no file behind.

    vLLM names it by ranks alone: two jobs on one machine would share it, and a killed job's would stop the next one.
    All ranks have mapped it when `LLM()` returns; after that nobody needs its name.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    by_ranks, prefix = _CPUSHMDistributed.make_group_name, f"{job}-{socket.gethostname()}"

    def by_job(group: Any) -> str:
        kind = group.unique_name.partition(":")[0]  # what follows counts the process's groups, on each rank for itself
        return "-".join([prefix, kind, *map(str, group.ranks), "cpushm"])

    _CPUSHMDistributed.make_group_name = staticmethod(by_job)
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(by_ranks)
        for path in Path("/dev/shm").glob(f"{prefix}*"):
            path.unlink(missing_ok=True)


def renew_vllm_derived(llm: Any) -> None:
    """After every write in place: compute anew what vLLM keeps besides the weights that it follows from."""
    model = vllm_model(llm)
    layers: Iterable[Any] = model.modules()
    for layer in layers:
        if hasattr(layer, "W_UK_T"):
            _renew_latent_attention(layer)
    if vllm_runner(llm).device.type == "cpu":
        _pack_vllm_cpu_weights(model)


def _renew_latent_attention(layer: Any) -> None:
    """What decoding multiplies by, per head: keys' and values' parts of `kv_b_proj`, turned. Addresses stay.

    vLLM makes them views of the weight where the dtypes agree, and tensors of their own otherwise or after a reload.
    """
    parts = layer.kv_b_proj.weight.detach().unflatten(0, (layer.num_heads, -1))
    keys, values = parts.split([layer.qk_nope_head_dim, layer.v_head_dim], 1)
    for derived, part in ((layer.W_UK_T, keys), (layer.W_UV, values.transpose(1, 2))):
        if derived.data_ptr() != part.data_ptr():
            derived.detach().copy_(part)


def _pack_vllm_cpu_weights(model: torch.nn.Module) -> None:
    """Give linear layers and experts packed copies of their weights, which multiply faster.

    Measured for linear layers: 1.2 to 1.35 times the speed of unpacked products, for as much memory again as the
    weights take.
    """
    import vllm._custom_ops as ops

    onednn = hasattr(torch.ops._C, "create_onednn_mm_handler")
    layers: Iterable[Any] = model.modules()
    for layer in layers:
        if onednn and hasattr(layer, "cpu_linear") and layer.weight.dim() == 2 and layer.weight.dtype in PACKED:
            packed = ops.create_onednn_mm(layer.weight.t())
            layer.cpu_linear = lambda x, weight, bias, packed=packed: ops.onednn_mm(packed, x, bias)
        elif hasattr(layer, "w13_weight"):
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def vllm_weights(llm: Any) -> dict[str, torch.Tensor]:
    """The live parameters of an engine of this process, without those that vLLM derives from others."""
    named = vllm_model(llm).named_parameters()
    weights = {name: parameter.detach() for name, parameter in named if not name.endswith((".W_UV", ".W_UK_T"))}
    return {vllm_parameter_name(name): weight for name, weight in weights.items()}


def vllm_parameter_name(name: str) -> str:
    """A parameter's name without the module that some versions of vLLM put between a layer and its experts."""
    return name.replace(".experts.routed_experts.", ".experts.")


def vllm_runner(llm: Any) -> Any:
    """The model runner of an engine that runs in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def vllm_model(llm: Any) -> torch.nn.Module:
    """The live model of an engine that runs in this process."""
    return vllm_runner(llm).get_model()


def vllm_keeps_state_on_gpu(llm: Any) -> bool:
    """Whether an engine's runner takes decode steps that name requests only: vLLM's second, without pipeline stages.

    What such a step must hold is the same in 0.26 and 0.32; other versions are not known to agree.
    """
    import vllm

    release = vllm.__version__.split(".")[:2]
    second = type(vllm_runner(llm)).__module__ == "vllm.v1.worker.gpu.model_runner"
    stages = llm.llm_engine.vllm_config.parallel_config.pipeline_parallel_size
    queued = llm.llm_engine.engine_core.engine_core.batch_queue is not None
    return release in (["0", "26"], ["0", "32"]) and second and stages == 1 and queued


def vllm_waiting(scheduler: Any) -> Any:
    """The request that a scheduler would admit next, None if none waits; its queues' names differ by version."""
    queues = (getattr(scheduler, name, None) for name in ("skipped_waiting", "kv_holding_waiting", "waiting"))
    return next((queue.peek_request() for queue in queues if queue), None)


def vllm_scheduler(llm: Any) -> Any:
    """The scheduler of an engine that runs in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def take_no_vllm_routing(llm: Any) -> None:
    """Let a rank whose outputs nobody reads schedule without the experts of its tokens.

    vLLM 0.32 hands them to the first tensor-parallel rank alone, and asks every rank that schedules for them.
    """
    connector = getattr(vllm_scheduler(llm), "aux_output_connector", None)
    if connector is not None:
        connector.take_output = lambda request, output: None


def vllm_cache_slots(llm: Any) -> int:
    """Tokens that the key-value cache of an engine of this process holds."""
    cache = llm.llm_engine.vllm_config.cache_config
    return int(cache.num_gpu_blocks * cache.block_size)


def vllm_routers(llm: Any) -> dict[int, Any]:
    """The routers of the layers with experts, by the layers' numbers."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    return {layer.layer_id: layer.router for layer in vllm_model(llm).modules() if isinstance(layer, MoERunner)}


def vllm_load(llm: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
    """Write Hugging Face tensors through vLLM's own loader, derived tensors included; parameters keep their storage.

    The tensors of a layer must follow each other and stay as they are until the call ends: vLLM keeps them until the
    layer is whole. Returns the names of the parameters that vLLM filled, None if the model does not say.
    """
    model: Any = vllm_model(llm)
    loaded: list[set[str] | None] = []

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        loaded.append(type(model).load_weights(model, weights))
        return loaded[0]

    model.load_weights = load
    try:
        vllm_runner(llm).reload_weights(weights_iterator=iter(tensors))
    finally:
        del model.load_weights
    return None if loaded[0] is None else {vllm_parameter_name(name) for name in loaded[0]}


def stop_vllm(llm: Any) -> None:
    """End an engine of this process with its groups, but not the job's default group, which vLLM would take along.

    vLLM 0.32 would do this at garbage collection by itself. It spares a default group that it does not see.
    """
    from vllm.distributed import parallel_state

    member = distributed_c10d.GroupMember
    world, member.WORLD = member.WORLD, None
    try:
        llm.llm_engine.engine_core.shutdown()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    finally:
        member.WORLD = world
