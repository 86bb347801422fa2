"""The one place that knows how versions of torch, megatron-core and vLLM differ, and where they hide what we need."""

import contextlib
import functools
import inspect
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.distributed_c10d as distributed_c10d


def mlp_submodules(mlp: Any) -> list[Any]:
    """The submodules of every MLP in megatron-core's description of one, or of a layer of experts.

    A description is a ModuleSpec in 0.16, a partial in 0.19.
    """
    found = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
    if hasattr(found, "experts"):
        return [*mlp_submodules(found.experts), *mlp_submodules(found.shared_experts)]
    return [found]


def allow_grouped_queries(attention: Any) -> dict[str, bool]:
    """Keywords that let an attention function of torch take fewer key than query heads; older ones need none."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(attention).parameters else {}


def keep_vllm_cpu_weights_plain() -> None:
    """Before `LLM()` on a CPU: otherwise vLLM keeps linear weights only packed, and leaves parameters of shape (0,)."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils

    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False


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


def pack_vllm_cpu_weights(llm: Any) -> None:
    """After every write on a CPU: give linear layers a packed copy of their weights, which oneDNN multiplies faster.

    Measured: 1.2 to 1.35 times the speed of unpacked products, for as much memory again as the weights take.
    """
    import vllm._custom_ops as ops

    if not hasattr(torch.ops._C, "create_onednn_mm_handler"):
        return
    layers: Iterable[Any] = vllm_model(llm).modules()
    for layer in layers:
        if hasattr(layer, "cpu_linear") and layer.weight.dim() == 2:
            packed = ops.create_onednn_mm(layer.weight.t())
            layer.cpu_linear = lambda x, weight, bias, packed=packed: ops.onednn_mm(packed, x, bias)


def vllm_runner(llm: Any) -> Any:
    """The model runner of an engine that runs in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def vllm_model(llm: Any) -> torch.nn.Module:
    """The live model of an engine that runs in this process."""
    return vllm_runner(llm).model


def vllm_load(llm: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write Hugging Face tensors through vLLM's own loader, derived tensors included; parameters keep their storage."""
    vllm_runner(llm).reload_weights(weights_iterator=iter(tensors))


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
