"""One model on one grid: log-probs of samples, optimizer steps, weights in and out.

An engine runs megatron-core's pipeline schedules over packed micro-batches. Which samples a replica gets, and what the
objective is, are the caller's matter; all ranks of the job call the same methods in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_bridge.bind_megatron import bind
from megatron_bridge.checkpoints import load_weights
from megatron_bridge.export import export_hf
from megatron_bridge.families import Architecture
from megatron_bridge.layouts import MegatronLayout
from rlflow.algorithms import combine, is_maximum
from rlflow.batch import Batch, MicroBatch, pack, plan_micro_batches
from rlflow.config.schema import Optimizer
from rlflow.models import (
    Scoring,
    build_policy,
    fits_transformer_engine,
    has_transformer_engine,
    pack_for_local_spec,
    pack_for_te_spec,
    split_layers,
    transformer_config,
)
from rlflow.models.config import Recompute
from rlflow.parallel import Grid, active, device
from rlflow.roles.training import Training, join_as_outsider

Objective = Callable[[Tensor, Tensor | None, Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


class Engine:
    """A policy model, trained where `optimizer` is given, else frozen.

    Making one is collective over the job; ranks outside the grid hold no model and take part in nothing but that.
    `share_prompts` asks for prompts to be computed once; the attribute says whether the attention allows it.
    `transformer_engine` chooses the layer spec, None: Transformer Engine's where it can be used.
    """

    def __init__(
        self,
        architecture: Architecture,
        grid: Grid,
        *,
        dtype: torch.dtype,
        micro_batch_tokens: int,
        optimizer: Optimizer | None = None,
        share_prompts: bool = True,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
        overlap: bool = True,
        logprob_chunk_tokens: int = 1024,
        deterministic: bool = False,
        transformer_engine: bool | None = None,
    ) -> None:
        self.architecture, self.grid, self.dtype = architecture, grid, dtype
        self.micro_batch_tokens = micro_batch_tokens
        if transformer_engine is None:
            transformer_engine = has_transformer_engine(dtype) and fits_transformer_engine(architecture)
        self.share_prompts = share_prompts and not transformer_engine
        stages = split_layers(architecture, grid.pp)
        self.layout = MegatronLayout(
            architecture, grid.tp, grid.pp, grid.dp, grid.ranks, "-".join(grid.order), stages,
            spec="te" if transformer_engine else "local", cp=grid.cp, ep=grid.ep, etp=grid.etp,
            experts="grouped" if transformer_engine else "sequential",
        )  # fmt: skip
        self.training: Training | None = None
        if not grid.is_member:
            if optimizer is not None:
                join_as_outsider()
            return
        config = transformer_config(
            architecture, grid, dtype, stages=stages, sequence_parallel=sequence_parallel, recompute=recompute,
            deterministic=deterministic, transformer_engine=transformer_engine,
        )  # fmt: skip
        self.row_multiple = grid.tp if config.sequence_parallel else 1
        self.model = build_policy(
            architecture, grid, config, padded_vocab=self.layout.padded_vocab, chunk_tokens=logprob_chunk_tokens
        )
        if optimizer is None:
            self.model.requires_grad_(False)
        else:
            self.training = Training(self.model, grid, optimizer, overlap=overlap)

    def log_probs(self, batch: Batch, temperature: float) -> Tensor:
        """Log-probs of the replica's response tokens at a sampling temperature: float32, flat like `batch.tokens`.

        Every rank of a replica passes the same batch and gets all of its log-probs.
        """
        found = torch.zeros(len(batch.responses.values), dtype=torch.float32, device=device())
        if not self.grid.is_member:
            return found
        micro_batches = self._micro_batches(batch)
        scored = self._run(micro_batches, partial(self._score, temperature=temperature), forward_only=True)
        for token_index, log_probs in scored:
            found[token_index] = log_probs
        if self.grid.pp > 1:
            last = dist.get_global_rank(self.grid.groups.pp, self.grid.pp - 1)
            dist.broadcast(found, last, group=self.grid.groups.pp)
        return found

    def train_step(
        self, batch: Batch, objective: Objective, *, temperature: float, lr: float, with_entropy: bool = False
    ) -> dict[str, float]:
        """One optimizer step on the replicas' batches; the same metrics on every rank of the job.

        `batch.tokens` are handed to the objective, cut to a micro-batch; its loss must carry global weights. Its
        metrics are combined over micro-batches and replicas; `actor/…` are the engine's own. A replica without samples
        takes part all the same. Raises FloatingPointError where the gradient is not finite.
        """
        if not self.grid.is_member:
            return self._tell({})
        assert self.training is not None, "a frozen engine cannot be trained"
        micro_batches = self._micro_batches(batch)
        learn = partial(
            self._learn, fields=batch.to(device()).tokens, objective=objective, temperature=temperature,
            with_entropy=with_entropy,
        )  # fmt: skip
        self.training.prepare(lr)
        parts = self._run(micro_batches, learn, forward_only=False)
        with active(self.grid):
            _, grad_norm, _ = self.training.optimizer.step()
        if not math.isfinite(grad_norm):  # the same on every rank of the grid, so that all of them stop here
            raise FloatingPointError(f"the gradient's norm is {grad_norm}: no weights of this step can be used")
        return self._tell(self._measure(parts, micro_batches, float(grad_norm)))

    def _measure(
        self, parts: Sequence[Mapping[str, Tensor]], micro_batches: Sequence[MicroBatch], grad_norm: float
    ) -> dict[str, float]:
        """Metrics of an optimizer step on the last stage, which has those of the objective; {} on the others."""
        if not parts:
            return {}
        rows = sum(len(part.token_ids) for part in micro_batches)
        padding = sum(part.padding for part in micro_batches)
        found = combine(parts) | {"rows": torch.tensor(rows), "padding_rows": torch.tensor(padding)}
        metrics = self._over_replicas(found)
        metrics["actor/padding_fraction"] = metrics.pop("padding_rows") / max(metrics.pop("rows"), 1.0)
        return metrics | {"actor/grad_norm": grad_norm, "actor/micro_batches": float(len(micro_batches))}

    def _tell(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of the first replica's last stage, on every rank of the job."""
        if dist.get_world_size() == 1:
            return metrics
        shared = [metrics]
        dist.broadcast_object_list(shared, self.grid.members("pp")[0][-1], device=device())
        return shared[0]

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """The batch in packed micro-batches, on the device, as many as on every other replica and at least one."""
        sizes = batch.sizes()
        plan = partial(plan_micro_batches, sizes, self.micro_batch_tokens, share_prompts=self.share_prompts)
        bins = plan()
        count = max(len(bins), 1)
        if self.grid.dp > 1:
            most = torch.tensor(count, device=device())
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.grid.groups.dp)
            count = int(most)
        if count != len(bins):
            bins = plan(count=count)
        return pack(batch.to(device()), bins, share_prompts=self.share_prompts, multiple=self.row_multiple)

    def _run(self, micro_batches: Sequence[MicroBatch], step: Callable[..., Any], *, forward_only: bool) -> list[Any]:
        """Send micro-batches through the pipeline; what `step`'s functions return, on the last stage only."""
        with active(self.grid), torch.set_grad_enabled(not forward_only):
            return get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(micro_batches),
                model=self.model if self.training is None else self.training.ddp,
                num_microbatches=len(micro_batches),
                seq_length=self.micro_batch_tokens,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def _forward(self, micro_batch: MicroBatch, model: Any, temperature: float, with_entropy: bool) -> Any:
        scoring = Scoring(micro_batch.predict_at, micro_batch.targets, temperature, with_entropy)
        if self.layout.spec == "te":
            packed = pack_for_te_spec(micro_batch, scoring)
        else:
            packed = pack_for_local_spec(micro_batch, self.model.ropes, self.dtype, scoring)
        return model(micro_batch.token_ids[None], micro_batch.position_ids[None], None, packed_seq_params=packed)

    def _score(self, micro_batches: Iterator[MicroBatch], model: Any, temperature: float) -> tuple[Any, Any]:
        micro_batch = next(micro_batches)
        output = self._forward(micro_batch, model, temperature, with_entropy=False)
        if self.grid.is_last_stage:
            output, _ = output  # the schedule looks at the device of what a stage returns
        return output, lambda log_probs, non_loss_data: (micro_batch.token_index, log_probs)

    def _learn(
        self,
        micro_batches: Iterator[MicroBatch],
        model: Any,
        *,
        fields: Mapping[str, Tensor],
        objective: Objective,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Any, Any]:
        micro_batch = next(micro_batches)

        def loss(scored: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            cut = {name: values[micro_batch.token_index] for name, values in fields.items()}
            value, metrics = objective(*scored, cut | {"sample_index": micro_batch.sample_index})
            # The schedule would divide by the number of tokens; the weights have done that already.
            return value, torch.zeros((), dtype=torch.int), metrics

        return self._forward(micro_batch, model, temperature, with_entropy), loss

    def _over_replicas(self, metrics: Mapping[str, Tensor]) -> dict[str, float]:
        names = sorted(metrics, key=lambda name: (is_maximum(name), name))
        values = torch.stack([metrics[name].double().to(device()) for name in names])
        sums = sum(not is_maximum(name) for name in names)
        if self.grid.dp > 1:
            dist.all_reduce(values[:sums], group=self.grid.groups.dp)
            dist.all_reduce(values[sums:], dist.ReduceOp.MAX, group=self.grid.groups.dp)
        return dict(zip(names, values.tolist(), strict=True))

    def parameters_by_name(self) -> dict[str, Tensor]:
        """The live parameters of this rank under the layout's names, complete; none outside the grid."""
        if not self.grid.is_member:
            return {}
        if self.training is not None:
            self.training.gather_parameters()
        return bind(self.model, self.layout, self.grid.rank)

    def load_hf(self, folder: str | Path) -> None:
        """Fill the model with the weights of a folder, Hugging Face's or Megatron's; each rank reads its own bytes."""
        load_weights(folder, self.layout, self.parameters_by_name(), rank=self.grid.rank)
        if self.training is not None:
            self.training.reload()

    def export_hf(self, source: str | Path, folder: str | Path) -> None:
        """Write the model as a Hugging Face folder, with the other files of `source`. Collective over the job."""
        export_hf(folder, self.layout, self.parameters_by_name(), source=source, rank=self.grid.rank)
