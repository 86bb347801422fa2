"""Let megatron-core, which names the CUDA device in its source, run on a torch without CUDA.

`install` maps that device onto the CPU, once a process, and does nothing where CUDA is available. No other module may
patch torch; which device the rest of the program uses is decided in `device`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "full", "full_like", "ones", "ones_like",
    "rand", "randint", "randn", "tensor", "zeros", "zeros_like",
)  # fmt: skip


class _FinishedStream:
    """A stream or an event on the CPU, where work is finished when its call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _FinishedStream]:
        return lambda *args, **kwargs: self


def install() -> None:
    """Patch torch for megatron-core where there is no CUDA device; further calls do nothing."""
    if torch.cuda.is_available() or hasattr(torch.cuda, "rlflow_shim"):
        return
    torch.cuda.rlflow_shim = True  # type: ignore[attr-defined]
    _patch_cuda(torch.cuda)
    _patch_tensors()
    _patch_collectives()
    # megatron's jit_fuser compiles small functions, which costs more than it saves on a CPU.
    torch.compile = lambda model=None, **kwargs: model or (lambda function: function)  # type: ignore[assignment]
    _patch_megatron()


def _patch_cuda(cuda: Any) -> None:
    cuda.current_device = lambda: torch.device("cpu")
    for name in ("synchronize", "set_device", "empty_cache", "_lazy_init"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    # Every name gets a class of its own: dynamo refuses two names for one object.
    cuda.Stream = type("Stream", (_FinishedStream,), {})
    cuda.Event = type("Event", (_FinishedStream,), {})
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_stream = lambda device=None: cuda.Stream()
    cuda.default_stream = lambda device=None: cuda.Stream()
    # The CPU's generator stands for the device's; megatron's RNG tracker forks and restores it.
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)


def _patch_tensors() -> None:
    # `with torch.device(...)` knows the factories by identity and remembers them on first use: let that be before.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    original_to, original_type = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # An integer may be a device index, but megatron never moves by one and torch's own code passes no integers.
        moved: list[Any] = ["cpu" if not isinstance(value, int) and _is_cuda(value) else value for value in args]
        return original_to(self, *moved, **kwargs)

    torch.Tensor.to = _on_cpu(to)  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]

    # The optimizers compare type() with names such as 'torch.cuda.FloatTensor'.
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original_type(self, *args, **kwargs)
        return original_type(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_  # type: ignore[assignment, method-assign]


def _patch_collectives() -> None:
    """gloo knows equal parts only; ranks that share a routed expert exchange as many rows as tokens have chosen it."""
    even_gather, even_scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(parts: Any, own: Any, group: Any = None, async_op: bool = False) -> Any:
        if async_op or len({part.shape for part in parts}) == 1:
            return even_gather(parts, own, group, async_op)
        parts[dist.get_rank(group)].copy_(own)
        for rank, part in enumerate(parts):
            dist.broadcast(part, group=group, group_src=rank)
        return None

    def reduce_scatter(
        own: Any, parts: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: Any = False
    ) -> Any:
        if async_op or len({part.shape for part in parts}) == 1:
            return even_scatter(own, parts, op, group, async_op)
        reduced = torch.cat(parts)
        dist.all_reduce(reduced, op, group)
        own.copy_(reduced.split([len(part) for part in parts])[dist.get_rank(group)])
        return None

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter  # type: ignore[assignment]


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 leaves the name out where Transformer Engine is missing
    # Made now: vLLM, when it is imported, puts streams of its own here, whose events megatron cannot wait for.
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _FinishedStream()
    # The original turns split sizes into numpy only where they were on CUDA.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
    )


def _is_cuda(device: Any) -> bool:
    return type(device) is int or (device is not None and str(device).startswith("cuda"))


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a CUDA device among its keywords replaced by the CPU."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if "device" in kwargs and _is_cuda(kwargs["device"]):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return on_cpu
