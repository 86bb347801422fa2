"""What a trained role has besides its model: megatron-core's gradient buffers and its sharded optimizer.

Gradients are summed over data-parallel ranks, never averaged: losses arrive with global weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides

from rlflow.config.schema import Optimizer
from rlflow.models import Model
from rlflow.models.self_attention import PackedSelfAttention
from rlflow.parallel import Grid, active, device


class Training:
    """DistributedDataParallel around each chunk of a stage, and their DistributedOptimizer (AdamW, fp32 main weights).

    `chunks` are the rank's virtual pipeline stages in their order; without such it is one. When it goes, so does the
    model: DistributedDataParallel's hooks on gradients hold it in cycles that Python's collector does not see, so that
    it is emptied then. So nothing that the model holds may hold this.
    """

    def __init__(self, chunks: Sequence[Model], grid: Grid, settings: Optimizer, *, overlap: bool) -> None:
        self.grid = grid
        self.overlap = overlap and max(grid.dp * grid.cp, grid.edp) > 1
        config = chunks[0].config
        for chunk in chunks:
            _name_expert_replicas(chunk)
            _add_products_to_gradients(chunk)
            if self.overlap:
                _call_head_norms(chunk)
        with active(grid):
            self.ddp = [self._replicated(chunk, first=number == 0) for number, chunk in enumerate(chunks)]
            self.optimizer = self._make_optimizer(settings, config.params_dtype)
        _fuse(self.optimizer)
        config.finalize_model_grads_func = self._finalize = partial(_finalize, grid)
        if self.overlap:
            no_sync = [chunk.no_sync for chunk in self.ddp]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        else:  # nobody waits for the moment when autograd delivers a gradient
            for weight in (weight for chunk in chunks for weight in chunk.vocabulary_weights()):
                weight.adds_to_main_grad = True  # type: ignore[attr-defined]
        for chunk in self.ddp:
            weakref.finalize(self, vars(chunk).clear).atexit = False
            if grid.dp * grid.cp == 1:
                _leave_out_collectives(chunk.bucket_groups)
            if grid.edp == 1:
                _leave_out_collectives(chunk.expert_parallel_bucket_groups)

    def _replicated(self, chunk: Model, *, first: bool) -> DistributedDataParallel:
        return DistributedDataParallel(
            chunk.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=True,
                overlap_grad_reduce=self.overlap,
                overlap_param_gather=self.overlap,
            ),
            chunk,
            # Of several chunks all but the first have their gradients long before the backward pass ends.
            disable_bucketing=not first,
            pg_collection=self.grid.groups,
        )

    def _make_optimizer(self, settings: Optimizer, dtype: torch.dtype) -> Any:
        on_host = settings.cpu_offload if device().type == "cuda" else 0.0  # elsewhere the host has everything
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            overlap_param_gather=self.overlap,
            optimizer_cpu_offload=on_host > 0,
            optimizer_offload_fraction=on_host,
            overlap_cpu_optimizer_d2h_h2d=on_host > 0,
            use_precision_aware_optimizer=on_host > 0,  # else the GPU keeps float32 weights all the same
        )
        return get_megatron_optimizer(
            config,
            self.ddp,
            config_overrides=get_standard_config_overrides(config),
            use_gloo_process_groups=False,
            pg_collection=self.grid.groups,
        )

    def finish_gradients(self) -> None:
        """What megatron's schedules do when the last micro-batch's gradients are there."""
        self._finalize(self.ddp)

    def prepare(self, lr: float) -> None:
        """Make ready for the gradients of a step at this learning rate."""
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)

    def gather_parameters(self) -> None:
        """Complete the parameters now: with overlap they are gathered by the next forward only."""
        if self.overlap:
            for chunk in self.ddp:
                chunk.start_param_sync(force_sync=True)

    def reload(self) -> None:
        """Take over model weights that were written from outside."""
        self.optimizer.reload_model_params()


def _finalize(grid: Grid, models: list[Any], num_tokens: Any = None, **_: Any) -> None:
    """Reduce gradients over replicas, sequence-parallel ranks and tied embeddings, without dividing."""
    finalize_model_grads(models, None, pg_collection=grid.groups)


def _name_expert_replicas(chunk: Model) -> None:
    """Replicas of routed experts are not those of the rest, though without expert parallelism megatron says so."""
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = False


def _add_products_to_gradients(chunk: Model) -> None:
    """Let Transformer Engine's linear layers, as models with experts have them, add to gradients while they multiply.

    A frozen model has no such gradients, which the config cannot know; grouped experts are left as they are.
    """
    if chunk.config.params_dtype == torch.bfloat16:
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation") and hasattr(module, "weight"):
                module.fuse_wgrad_accumulation = True


def _call_head_norms(chunk: Model) -> None:
    """Let norms of queries and keys run as modules: a module's call is what waits for its gathered parameters."""
    for module in chunk.modules():
        if isinstance(module, PackedSelfAttention) and module.config.qk_layernorm:
            module.fused = False


def _leave_out_collectives(bucket_groups: list[Any]) -> None:
    """A lone replica has nobody to exchange with, and gloo would copy gradients and parameters all the same."""
    for group in bucket_groups:
        for name in ("start_grad_sync", "finish_grad_sync", "start_param_sync", "finish_param_sync"):
            setattr(group, name, lambda *args, **kwargs: None)


def _fuse(optimizer: Any) -> None:
    """Let torch's AdamW update each tensor in one pass; other implementations always do."""
    for chained in optimizer.chained_optimizers:
        if isinstance(chained.optimizer, torch.optim.AdamW):
            for group in chained.optimizer.param_groups:
                group["fused"], group["foreach"] = True, False


def join_as_outsider() -> None:
    """What ranks outside the grid must do while the members make their optimizer.

    megatron compares the parameter groups of all ranks of the default world, once for dense and once for expert ones.
    """
    for _ in range(2):
        dist.all_gather_object([None] * dist.get_world_size(), [])
