"""How evenly tokens spread over the routed experts in an optimizer step, and the loss that evens it out.

For a layer with E experts, of which each token goes to k, the loss is E · Σᵢ fᵢ·Pᵢ (Switch Transformer,
arXiv:2101.03961, eq. 4 to 6): fᵢ is expert i's share of all choices, Pᵢ the mean of its scores; 1 where all are even.
Means go over rows, a prompt's counted for each of its responses, padding never, so that it does not matter how samples
are packed. fᵢ can be that of the whole optimizer step (arXiv:2501.11873) or of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor, nn

from rlflow.batch import MicroBatch
from rlflow.models.routing import ExpertRouter, connect_routers, expert_rows
from rlflow.parallel import Grid, device

AuxiliaryLoss = Literal["global", "micro-batch"]


def router_scores(logits: Tensor, kind: str) -> Tensor:
    """What P is the mean of: a router's scores of all experts, which sum to 1. float32 like `logits`, [rows, E]."""
    if kind == "softmax":
        return torch.softmax(logits.float(), dim=-1)
    scores = torch.sigmoid(logits.float())
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


class ExpertLoad:
    """The load of the experts in the layers of this rank; the ranks of the grid make and call theirs alike.

    `coef` is the weight of each layer's auxiliary loss, which is added in the backward pass alone; 0: none.
    `over` says whose load is evened out. With "global" a step begins with forwards that only count: every row's
    gradient depends on where all other rows go. megatron's own global form uses the counts of the micro-batches
    before, and so depends on how they are cut.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], grid: Grid, *, experts: int, coef: float, over: AuxiliaryLoss
    ) -> None:
        self.grid, self.experts, self.coef, self.over = grid, experts, coef, over
        routers = [router for chunk in chunks for router in connect_routers(chunk)]
        self.place = {router.column: number for number, router in enumerate(routers)}
        for router in routers:
            router.load = self
        self.counting = False
        self.rows = 0.0  # of the step, on all replicas
        self.shares: Tensor | None = None  # float32 [layers, experts], f of the step
        self._clear()

    def _clear(self) -> None:
        shape = (len(self.place), self.experts)
        self.counts = torch.zeros(shape, dtype=torch.float64, device=device())  # choices of each expert by rows here
        self.scores = torch.zeros_like(self.counts)  # sums of their scores

    def prepare(
        self, micro_batches: Sequence[MicroBatch], routing: Tensor | None, forward: Callable[[], object]
    ) -> None:
        """Before the forwards of a step; `forward` runs them once without gradients, where the loss needs that.

        It does not where `routing`, as `expert_rows` wants it, gives the choice.
        """
        rows = torch.stack([part.samples_of_row.sum(dtype=torch.float64) for part in micro_batches]).sum()
        if self.grid.dp > 1:
            dist.all_reduce(rows, group=self.grid.groups.dp)
        self.rows = float(rows)
        self._clear()
        if not self.coef or self.over != "global":
            return
        if routing is not None:
            self._count_given(micro_batches, routing)
        else:
            self.counting = True
            forward()
            self.counting = False
        self.shares = _shares(self._over_ranks(self.counts)).float()
        self._clear()

    def _count_given(self, micro_batches: Sequence[MicroBatch], routing: Tensor) -> None:
        """Count a given choice, each row on one of the ranks that know of it."""
        if self.grid.here["tp"] or self.grid.here["cp"] or not len(routing):
            return
        for part in micro_batches:
            rows = expert_rows(part, routing)
            assert rows.chosen is not None
            for column, place in self.place.items():
                chosen = rows.chosen[:, column].long()
                weights = rows.samples.double()[:, None].expand_as(chosen)
                self.counts[place].index_add_(0, chosen.flatten(), weights.flatten())

    def see(self, router: ExpertRouter, weights: Tensor, chosen: Tensor, logits: Tensor, samples: Tensor) -> Tensor:
        """Take note of a router's choice; returns its `weights`, behind which the loss waits for the backward pass.

        Forwards without gradients are passed over, unless they are those that count: so is a forward whose layers
        are recomputed, and counted then. weights, chosen, logits: [rows, E]; samples: [rows].
        """
        if not self.counting and not torch.is_grad_enabled():
            return weights
        place = self.place[router.column]
        counts = samples @ chosen.float()
        self.counts[place] += counts
        if self.counting:
            return weights
        sums = samples @ router_scores(logits, router.score_function)
        self.scores[place] += sums.detach()
        if not self.coef or not self.rows:
            return weights
        loss = self.coef * self.experts / self.rows * (self._shares_for(place, counts) @ sums)
        return MoEAuxLossAutoScaler.apply(weights, loss)

    def _shares_for(self, place: int, counts: Tensor) -> Tensor:
        if self.over == "global":
            assert self.shares is not None, "call prepare before the forwards of a step"
            return self.shares[place]
        if self.grid.tp * self.grid.cp > 1:
            counts = counts.clone()
            dist.all_reduce(counts, group=self.grid.groups.tp_cp)
        return _shares(counts)

    def metrics(self) -> dict[str, float]:
        """After a step's forwards, on all ranks of the grid the same; collective over it.

        `moe_tokens_max_over_mean`: the busiest expert's tokens over the mean of its layer, in the worst layer;
        `moe_balance_entropy`: of an expert's shares, over its largest value, mean over layers; `moe_aux_loss`: the
        loss of the step without its weight, mean over layers.
        """
        shares = _shares(self._over_ranks(self.counts))
        scores = self._over_ranks(self.scores) / max(self.rows, 1.0)
        entropy = torch.special.entr(shares).sum() / math.log(self.experts) if self.experts > 1 else shares.sum()
        loss = self.experts * (shares * scores).sum()
        sums = torch.stack([entropy, loss, loss.new_tensor(float(len(shares)))])
        peak = torch.cat([shares.flatten(), shares.new_zeros(1)]).max() * self.experts
        if self.grid.pp > 1:
            dist.all_reduce(sums, group=self.grid.groups.pp)
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=self.grid.groups.pp)
        entropy, loss = (sums[:2] / sums[2]).tolist()
        return {"moe_tokens_max_over_mean": float(peak), "moe_balance_entropy": entropy, "moe_aux_loss": loss}

    def _over_ranks(self, values: Tensor) -> Tensor:
        """Sums over the ranks that hold other rows of the same layers; tensor-parallel ones do, as experts need it."""
        if self.grid.tp * self.grid.cp * self.grid.dp > 1:
            values = values.clone()
            dist.all_reduce(values, group=self.grid.groups.tp_dp_cp)
        return values


def _shares(counts: Tensor) -> Tensor:
    """Counts of choices [..., E] as shares of them; zeros where there are none."""
    return counts / counts.sum(-1, keepdim=True).clamp(min=1.0)
