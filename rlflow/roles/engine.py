"""One model on one grid: log-probs or values of samples, optimizer steps, weights in and out.

An engine runs megatron-core's pipeline schedules over packed micro-batches. Which samples a replica gets, and what the
objective is, are the caller's matter; all ranks of the job call the same methods in the same order, and ranks outside
the grid go on at once, so that engines on other ranks compute at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_bridge.bind_megatron import bind
from megatron_bridge.checkpoints import load_weights
from megatron_bridge.export import export_hf
from megatron_bridge.families import Architecture
from megatron_bridge.layouts import MegatronLayout
from megatron_bridge.score import load_language_model
from rlflow.algorithms import combine, is_maximum
from rlflow.batch import Batch, MicroBatch, pack, plan_micro_batches
from rlflow.batch.routing import ROUTING, RoutingShape
from rlflow.config.schema import Optimizer
from rlflow.errors import UserError
from rlflow.models import (
    Model,
    build_policy,
    build_value,
    fits_transformer_engine,
    has_transformer_engine,
    layer_spec,
    split_layers,
    transformer_config,
)
from rlflow.models.config import Recompute
from rlflow.models.expert_load import AuxiliaryLoss, ExpertLoad
from rlflow.parallel import Grid, active, device
from rlflow.roles.forward import Forward, Loss, Objective, Scored
from rlflow.roles.graphs import GraphedPasses, row_multiple
from rlflow.roles.residency import Residency
from rlflow.roles.training import Training, join_as_outsider


class Values(NamedTuple):
    """What a value model says of n responses with R tokens."""

    tokens: Tensor  # float32 [R], at the row that predicts the token: V_t, known before the token is
    last: Tensor  # float32 [n], at the last response token, or the prompt's last of an empty response


class Engine:
    """A model, trained where `optimizer` is given, else frozen: a policy, or with a score head a value model.

    Making one is collective over the job; ranks outside the grid hold no model and take part in nothing but that.
    `share_prompts` asks for prompts to be computed once; the attribute says whether the attention allows it.
    `routing` is the shape of the batches' field of that name, from which routers then take their choice of experts.
    `virtual_pipeline` is the number of chunks of layers on each pipeline stage. `transformer_engine` is used as
    `models.layer_spec` says, with None where it can be. With `offload` each pass brings what it needs to the GPU and
    away again, unless `residency` is told to keep it there. `cuda_graphs` replays micro-batches on a GPU, for a dense
    model that is whole on its rank and stays there. `exact_logits` are float32 ones of half-precision factors. Raises
    UserError where Transformer Engine is asked for and cannot be had.
    """

    def __init__(
        self,
        architecture: Architecture,
        grid: Grid,
        *,
        dtype: torch.dtype,
        micro_batch_tokens: int,
        optimizer: Optimizer | None = None,
        virtual_pipeline: int = 1,
        share_prompts: bool = True,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
        overlap: bool = True,
        logprob_chunk_tokens: int = 2048,
        exact_logits: bool = False,
        deterministic: bool = False,
        transformer_engine: bool | None = None,
        router_replay: bool = False,
        moe_aux_loss_coef: float = 0.0,
        moe_aux_loss: AuxiliaryLoss = "global",
        offload: bool = False,
        cuda_graphs: bool = False,
    ) -> None:
        self.architecture, self.grid, self.dtype = architecture, grid, dtype
        self.micro_batch_tokens = micro_batch_tokens
        transformer_engine = takes_transformer_engine(transformer_engine, architecture, dtype)
        cuda_graphs = cuda_graphs and device().type == "cuda"
        assert not (cuda_graphs and offload), "a graph reads weights where they lay when it was captured"
        self.share_prompts = share_prompts and grid.cp == 1
        self.layout = _layout(architecture, grid, virtual_pipeline, transformer_engine)
        self.routing = _routing_shape(architecture) if router_replay else None
        self.chunks: list[Model] = []
        self.training: Training | None = None
        self.residency = Residency(self, offload=offload)
        if not grid.is_member:
            if optimizer is not None:
                join_as_outsider()
            return
        config = transformer_config(
            architecture, grid, dtype, stages=self.layout.stages, virtual_pipeline=virtual_pipeline,
            sequence_parallel=sequence_parallel, recompute=recompute, deterministic=deterministic,
            transformer_engine=transformer_engine,
        )  # fmt: skip
        self.row_multiple = grid.tp if config.sequence_parallel else 1
        self.graphs: GraphedPasses | None = None
        if cuda_graphs:
            self.graphs = GraphedPasses(grid)
            self.row_multiple = row_multiple(micro_batch_tokens, self.row_multiple)
        build: Callable[..., Model] = build_value
        if architecture.head == "lm":
            build = partial(build_policy, chunk_tokens=logprob_chunk_tokens, exact_logits=exact_logits)
        self.chunks = [
            build(architecture, grid, config, padded_vocab=self.layout.padded_vocab, chunk=chunk)
            for chunk in range(virtual_pipeline)
        ]
        if optimizer is not None:
            with nullcontext() if self.graphs is None else self.graphs.on_stream():
                self.training = Training(self.chunks, grid, optimizer, overlap=overlap and not cuda_graphs)
        for chunk in self.chunks:
            chunk.requires_grad_(optimizer is not None)
        self.load: ExpertLoad | None = None
        if (experts := architecture.experts) is not None:
            self.load = ExpertLoad(
                self.chunks, grid, experts=experts.count, coef=moe_aux_loss_coef, over=moe_aux_loss
            )  # fmt: skip

    @property
    def speaker(self) -> int:
        """The rank of the job that knows the metrics of a step: one on the first replica's last stage."""
        return self.grid.members("pp")[0][-1]

    @property
    def micro_batch_multiple(self) -> int:
        """The number of micro-batches is a multiple of it: chunks of a pipeline take turns in whole rounds of them."""
        return self.grid.pp if len(self.chunks) > 1 else 1

    def log_probs(self, batch: Batch, temperature: float) -> Tensor:
        """Log-probs of the replica's response tokens at a sampling temperature: float32, flat like `batch.tokens`.

        Every rank of a replica passes the same batch and gets all of its log-probs; zeros outside the grid.
        """
        assert self.architecture.head == "lm", "a value model has no log-probs"
        found = torch.zeros(len(batch.responses.values), dtype=torch.float32, device=device())
        for micro_batch, scored in self._score(batch, temperature=temperature):
            found[micro_batch.token_index] = scored.tokens
        self._from_last_stage(found)
        return found

    def values(self, batch: Batch) -> Values:
        """The values of the replica's responses. Every rank of a replica passes the same batch and gets all of them."""
        assert self.architecture.head == "score", "a policy has no values"
        tokens = len(batch.responses.values)
        found = torch.zeros(tokens + len(batch), dtype=torch.float32, device=device())
        for micro_batch, scored in self._score(batch, with_last=True):
            assert scored.last is not None
            assert micro_batch.last_samples is not None
            found[micro_batch.token_index] = scored.tokens
            found[tokens + micro_batch.last_samples] = scored.last
        self._from_last_stage(found)
        return Values(found[:tokens], found[tokens:])

    def _score(self, batch: Batch, *, with_last: bool = False, **how: Any) -> list[tuple[MicroBatch, Scored]]:
        """What the last stage says of each micro-batch; nothing on other stages and outside the grid."""
        if not self.grid.is_member:
            return []
        forward, micro_batches = self._forward(batch, **how), self._micro_batches(batch, with_last=with_last)
        with self.residency.using(weights=True):
            if self.graphs is not None:
                found = self.graphs.look(self.chunks[0], micro_batches, forward)
                return list(zip(micro_batches, found, strict=True))
            return self._run(micro_batches, partial(_look, forward=forward), forward_only=True)

    def _forward(self, batch: Batch, **how: Any) -> Forward:
        """How this batch goes through; where routing is replayed, to the experts that sampled it."""
        routing = None
        if self.routing is not None:
            tokens = torch.cat([batch.prompt_tokens[ROUTING], batch.tokens[ROUTING]])
            routing = tokens.to(device()).unflatten(1, self.routing[:2])
        return Forward(self.grid, self.dtype, routing=routing, **how)

    def _from_last_stage(self, found: Tensor) -> None:
        if self.grid.is_member and self.grid.pp > 1:
            last = dist.get_global_rank(self.grid.groups.pp, self.grid.pp - 1)
            dist.broadcast(found, last, group=self.grid.groups.pp)

    def train_step(
        self, batch: Batch, objective: Objective, *, lr: float, temperature: float = 1.0, with_entropy: bool = False
    ) -> dict[str, float]:
        """One optimizer step on the replicas' batches; its metrics on `speaker`, of which `tell` informs the others.

        `batch.tokens` are handed to the objective, cut to a micro-batch; its loss must carry global weights. Its
        metrics are combined over micro-batches and replicas; `engine/…` are the engine's own. A replica without samples
        takes part all the same. Raises FloatingPointError where the gradient is not finite.
        """
        if not self.grid.is_member:
            return {}
        assert self.training is not None, "a frozen engine cannot be trained"
        micro_batches = self._micro_batches(batch)
        forward = self._forward(batch, temperature=temperature, with_entropy=with_entropy)
        fields = {name: values for name, values in batch.to(device()).tokens.items() if name != ROUTING}
        with self.residency.using(weights=True, gradients=True, optimizer=True):
            if self.load is not None:
                look = partial(_look, forward=forward)
                self.load.prepare(
                    micro_batches, forward.routing, lambda: self._run(micro_batches, look, forward_only=True)
                )
            self.training.prepare(lr)
            if self.graphs is not None:
                parts = self.graphs.learn(self.training, micro_batches, forward, fields, objective)
            else:
                learn = partial(_learn, forward=forward, fields=fields, objective=objective)
                parts = self._run(micro_batches, learn, forward_only=False)
            with active(self.grid):
                _, grad_norm, _ = self.training.optimizer.step()
        if not math.isfinite(grad_norm):  # the same on every rank of the grid, so that all of them stop here
            raise FloatingPointError(f"the gradient's norm is {grad_norm}: no weights of this step can be used")
        metrics = self._measure(parts, micro_batches, float(grad_norm))
        if self.load is not None:
            metrics |= {f"engine/{name}": value for name, value in self.load.metrics().items()}
        return metrics if self.grid.rank == self.speaker else {}

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
        metrics["engine/padding_fraction"] = metrics.pop("padding_rows") / max(metrics.pop("rows"), 1.0)
        return metrics | {"engine/grad_norm": grad_norm, "engine/micro_batches": float(len(micro_batches))}

    def _over_replicas(self, metrics: Mapping[str, Tensor]) -> dict[str, float]:
        names = sorted(metrics, key=lambda name: (is_maximum(name), name))
        values = torch.stack([metrics[name].double().to(device()) for name in names])
        sums = sum(not is_maximum(name) for name in names)
        if self.grid.dp > 1:
            dist.all_reduce(values[:sums], group=self.grid.groups.dp)
            dist.all_reduce(values[sums:], dist.ReduceOp.MAX, group=self.grid.groups.dp)
        return dict(zip(names, values.tolist(), strict=True))

    def tell(self, metrics: list[dict[str, float]]) -> list[dict[str, float]]:
        """What `speaker` knows of some steps, on every rank of the job. Collective over the job."""
        shared = [metrics]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(shared, self.speaker, device=device())
        return shared[0]

    def _micro_batches(self, batch: Batch, *, with_last: bool = False) -> list[MicroBatch]:
        """The batch in packed micro-batches, on the device, as many as on every other replica and at least one."""
        sizes = replace(batch.sizes(), context=self.grid.cp, with_last=with_last)
        plan = partial(
            plan_micro_batches, sizes, self.micro_batch_tokens, share_prompts=self.share_prompts,
            hidden=self.architecture.hidden, multiple_of=self.micro_batch_multiple,
        )  # fmt: skip
        bins = plan()
        count = max(len(bins), self.micro_batch_multiple)
        if self.grid.dp > 1:
            most = torch.tensor(count, device=device())
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.grid.groups.dp)
            count = int(most)
        if count != len(bins):
            bins = plan(count=count)
        return pack(
            batch.to(device()), bins, share_prompts=self.share_prompts, multiple=self.row_multiple,
            context=self.grid.cp, with_last=with_last,
        )  # fmt: skip

    def _run(self, micro_batches: Sequence[MicroBatch], step: Callable[..., Any], *, forward_only: bool) -> list[Any]:
        """Send micro-batches through the pipeline; what `step`'s functions return, on the last stage only."""
        chunks: Sequence[Any] = self.chunks if self.training is None else self.training.ddp
        several = len(chunks) > 1
        schedule = get_forward_backward_func(self.grid.pp, len(chunks) if several else None)
        with active(self.grid), torch.set_grad_enabled(not forward_only):
            return schedule(
                forward_step_func=step,
                data_iterator=[iter(micro_batches) for _ in chunks] if several else iter(micro_batches),
                model=list(chunks) if several else chunks[0],
                num_microbatches=len(micro_batches),
                seq_length=self.micro_batch_tokens,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def parameters_by_name(self) -> dict[str, Tensor]:
        """The live parameters of this rank under the layout's names, complete; none outside the grid.

        They must be on the device (`residency`), as they are when the engine is made and first filled.
        """
        if not self.grid.is_member:
            return {}
        if self.training is not None:
            self.training.gather_parameters()
        return bind(self.chunks, self.layout, self.grid.rank)

    def load_hf(self, folder: str | Path) -> None:
        """Fill the model with the weights of a folder, Hugging Face's or Megatron's; each rank reads its own bytes."""
        load_weights(folder, self.layout, self.parameters_by_name(), rank=self.grid.rank)
        self._take_over()

    def load_language_model(self, folder: str | Path, *, head: Literal["zero", "random"], seed: int) -> None:
        """Fill a value model with the weights of a language model and a new head: "zero", or "random" from `seed`."""
        load_language_model(folder, self.layout, self.parameters_by_name(), rank=self.grid.rank, head=head, seed=seed)
        self._take_over()

    def _take_over(self) -> None:
        if self.training is not None:
            self.training.reload()

    def export_hf(self, source: str | Path, folder: str | Path) -> None:
        """Write the model as a Hugging Face folder, with the other files of `source`. Collective over the job."""
        with self.residency.using(weights=True):
            export_hf(folder, self.layout, self.parameters_by_name(), source=source, rank=self.grid.rank)


def _look(
    micro_batches: Iterator[MicroBatch], chunk: Any, *, forward: Forward
) -> tuple[Any, Callable[..., tuple[MicroBatch, Scored | None]]]:
    """A forward of the next micro-batch without a loss."""
    micro_batch = next(micro_batches)
    output, scored = forward(micro_batch, chunk)
    return output, lambda _, non_loss_data: (micro_batch, scored)


def _learn(
    micro_batches: Iterator[MicroBatch],
    chunk: Any,
    *,
    forward: Forward,
    fields: Mapping[str, Tensor],
    objective: Objective,
) -> tuple[Any, Any]:
    """A training forward of the next micro-batch, and its loss for the schedule."""
    micro_batch = next(micro_batches)
    cut = {name: values[micro_batch.token_index] for name, values in fields.items()}
    loss = Loss.of(objective, micro_batch, cut)
    output, scored = forward(micro_batch, chunk, loss)

    def learn(tokens: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        assert scored is not None, "only the last stage has a loss"
        value, metrics = loss(scored._replace(tokens=tokens))
        # The schedule would divide by the number of tokens; the weights have done that already.
        return value, torch.zeros((), dtype=torch.int), metrics

    return output, learn


def _routing_shape(arch: Architecture) -> RoutingShape:
    """Of what batches bring along for the routers, where these take the rollout's choice."""
    assert arch.experts is not None, "there is no routing to replay in a model without experts"
    return RoutingShape(len(arch.expert_layers), arch.experts.per_token, arch.experts.count)


def takes_transformer_engine(
    asked: bool | None, arch: Architecture, dtype: torch.dtype, key: str = "transformer_engine"
) -> bool:
    """Whether it is used: by default where it can be. UserError about `key` where it was asked for and cannot."""
    lacks = {
        "is not installed for the device and dtype": not has_transformer_engine(dtype),
        "does not compute this model": not fits_transformer_engine(arch),
    }
    reason = next((words for words, holds in lacks.items() if holds), None)
    if asked and reason:
        raise UserError(key, f"Transformer Engine {reason}: take null or false")
    return asked is not False and reason is None


def _layout(arch: Architecture, grid: Grid, virtual_pipeline: int, transformer_engine: bool) -> MegatronLayout:
    spec = layer_spec(arch, transformer_engine)
    return MegatronLayout(
        arch, grid.tp, grid.pp, grid.dp, grid.ranks, "-".join(grid.order),
        split_layers(arch, grid.pp) if virtual_pipeline == 1 else (),
        spec=spec, vpp=virtual_pipeline, cp=grid.cp, ep=grid.ep, etp=grid.etp,
        experts="grouped" if spec == "te" else "sequential",
    )  # fmt: skip
