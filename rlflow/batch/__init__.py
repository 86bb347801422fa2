"""Samples, ragged batches, packing, balancing and transfer: everything between sampling and a forward pass."""

from rlflow.batch.balance import assign, balance
from rlflow.batch.batch import Batch
from rlflow.batch.measures import Load, balance_metrics, measure_load
from rlflow.batch.packing import MicroBatch, pack
from rlflow.batch.placement import Placement, place
from rlflow.batch.planning import plan_micro_batches
from rlflow.batch.ragged import Ragged
from rlflow.batch.sample import Prompt, Sample
from rlflow.batch.sizes import Sizes
from rlflow.batch.transfer import (
    Catalogue,
    catalogue,
    exchange,
    gather_samples,
    move_samples,
    move_tokens,
    share_samples,
)

__all__ = [
    "Batch",
    "Catalogue",
    "Load",
    "MicroBatch",
    "Placement",
    "Prompt",
    "Ragged",
    "Sample",
    "Sizes",
    "assign",
    "balance",
    "balance_metrics",
    "catalogue",
    "exchange",
    "gather_samples",
    "measure_load",
    "move_samples",
    "move_tokens",
    "pack",
    "place",
    "plan_micro_batches",
    "share_samples",
]
