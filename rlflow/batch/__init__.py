"""Samples, ragged batches, packing, balancing and transfer: everything between sampling and a forward pass."""

from rlflow.batch.batch import Batch
from rlflow.batch.packing import MicroBatch
from rlflow.batch.ragged import Ragged
from rlflow.batch.sample import Prompt, Sample

__all__ = ["Batch", "MicroBatch", "Prompt", "Ragged", "Sample"]
