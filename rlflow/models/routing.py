"""Routers that know the rows of their micro-batch: which of them count, and which experts sampled them.

megatron-core's router chooses and weighs. It can be told the choice here (rollout routing replay, R3,
arXiv:2510.11370), and shows what was chosen to an `ExpertLoad`. Whose rows carry a choice is the engine's matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from rlflow.batch import MicroBatch

if TYPE_CHECKING:
    from rlflow.models.expert_load import ExpertLoad


@dataclass(frozen=True)
class ExpertRows:
    """What routers are told of the T rows of a micro-batch, or of a context-parallel rank's part of them."""

    samples: Tensor  # float32 [T], samples that have the row in common; 0: padding
    chosen: Tensor | None = None  # [T, layers with experts, experts per token]; None: the routers choose


def expert_rows(micro_batch: MicroBatch, routing: Tensor | None) -> ExpertRows:
    """The rows of a micro-batch for the routers.

    `routing`: [prompt tokens + response tokens of the batch, layers with experts, experts per token], what each token
    was sent to; None, or without a token, lets the routers choose. Padding goes wherever the first token went.
    """
    if routing is None or not len(routing):
        return ExpertRows(micro_batch.samples_of_row)
    return ExpertRows(micro_batch.samples_of_row, routing[micro_batch.source.clamp(min=0)])


class ExpertRouter(TopKRouter):
    """megatron-core's router, which takes its choice from `rows` where they have one and reports to `load`."""

    rows: ExpertRows | None = None
    load: ExpertLoad | None = None

    @property
    def column(self) -> int:
        """How many layers below this one, on all stages, have experts."""
        return sum(self.config.moe_layer_freq[: self.layer_number - 1])

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights and choice, both [rows here, experts], from logits [rows here, 1, experts].

        Under sequence parallelism the rows here are this rank's share of the micro-batch's.
        """
        self.router_replay = None
        if self.rows is None:
            return super().routing(logits, padding_mask)
        count = logits.shape[0]
        start = self.tp_group.rank() * count if self.config.sequence_parallel else 0
        if self.rows.chosen is not None:
            self.router_replay = _Replay(self.rows.chosen[start : start + count, self.column].long())
        weights, chosen = super().routing(logits, padding_mask)
        if self.load is not None:
            weights = self.load.see(self, weights, chosen, logits[:, 0], self.rows.samples[start : start + count])
        return weights, chosen


@dataclass(frozen=True)
class _Replay:
    """A given choice in the place of the largest scores: only the weights follow from the scores, and so do gradients.

    megatron's class of this role queues choices for the backward pass in a global list; with recompute and pipeline
    stages those would have to be taken out in another order than they were put in.
    """

    chosen: Tensor  # int64 [rows, experts per token]

    def get_replay_topk(self, scores: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return scores.gather(1, self.chosen), self.chosen


def connect_routers(chunk: nn.Module) -> list[ExpertRouter]:
    """Let every layer hand its router the rows of the micro-batch that passes; the routers in the layers' order.

    Layers are given the micro-batch's `PackedInput` again when they are recomputed, whatever passed in between.
    """
    routers = []
    for layer in chunk.decoder.layers:  # type: ignore[union-attr]
        if isinstance(router := getattr(layer.mlp, "router", None), ExpertRouter):
            layer.register_forward_pre_hook(_hand_rows, with_kwargs=True)
            routers.append(router)
    return routers


def _hand_rows(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    layer.mlp.router.rows = kwargs["packed_seq_params"].experts
