"""Move samples between grids: lengths and scores become known everywhere, tokens go only to ranks that need them.

Who needs which sample is decided by the caller (`balance.assign`, from the catalogue that all ranks share).
Collectives run on the batch's device, which must be one that the group's backend serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.batch.batch import Batch
from rlflow.batch.ragged import Ragged
from rlflow.batch.sizes import Sizes


@dataclass(frozen=True)
class Catalogue:
    """All samples of all ranks without their tokens, the same on every rank; a sample's number is its place here."""

    owners: list[int]  # rank in the group that holds the sample
    rows: list[int]  # its row in the owner's batch
    prompt_lengths: Tensor  # int64 [N]
    response_lengths: Tensor  # int64 [N]
    samples: dict[str, Tensor]  # per-sample fields of the batches, [N]

    def __len__(self) -> int:
        return len(self.owners)

    @cached_property
    def groups(self) -> list[int]:
        return self.samples["group"].tolist()

    def sizes(self) -> Sizes:
        return Sizes(self.prompt_lengths.tolist(), self.response_lengths.tolist(), self.groups)

    def held_by(self, rank: int, numbers: Sequence[int]) -> list[int]:
        """Those of the given samples that the rank holds, in the given order."""
        return [number for number in numbers if self.owners[number] == rank]

    def first_of_groups(self, numbers: Sequence[int]) -> list[int]:
        """The first of the given samples of each group: they stand for the prompts."""
        return list({self.groups[number]: number for number in reversed(numbers)}.values())


def catalogue(batch: Batch, group: dist.ProcessGroup | None = None) -> Catalogue:
    """Gather the lengths and per-sample fields of every rank's samples; each sample must be held by one rank only.

    Two all-gathers, 8 bytes for each field of each sample.
    """
    fields = {"prompt_length": batch.prompts.lengths[batch.prompt_of], "response_length": batch.responses.lengths}
    fields |= batch.samples
    # float64 holds every int64 below 2^53 and every float32 exactly
    local = torch.stack([values.double() for values in fields.values()])
    counts = _gather(torch.tensor([len(batch)], device=local.device), group)
    widest = max(int(count) for count in counts)
    padded = torch.nn.functional.pad(local, (0, widest - len(batch)))
    parts = [part[:, : int(count)] for part, count in zip(_gather(padded, group), counts, strict=True)]
    columns = zip(fields.items(), torch.cat(parts, dim=1).cpu(), strict=True)
    gathered = {name: column.to(values.dtype) for (name, values), column in columns}
    return Catalogue(
        owners=[rank for rank, count in enumerate(counts) for _ in range(int(count))],
        rows=[row for count in counts for row in range(int(count))],
        prompt_lengths=gathered.pop("prompt_length"),
        response_lengths=gathered.pop("response_length"),
        samples=gathered,
    )


def exchange(
    batch: Batch, known: Catalogue, destinations: Sequence[Sequence[int]], group: dist.ProcessGroup | None = None
) -> Batch:
    """Give every rank the samples that it asks for, in its order: `destinations[rank]` lists their numbers.

    Several ranks may ask for one sample, as tensor- and pipeline-parallel peers do. A prompt goes once to a rank, from
    each owner of its responses. One all-to-all for the prompts, one for the responses and one for each token field.
    """
    rank = dist.get_rank(group)
    outgoing = [known.held_by(rank, wanted) for wanted in destinations]
    incoming = [known.held_by(source, destinations[rank]) for source in range(len(destinations))]
    rows = torch.tensor([known.rows[number] for part in outgoing for number in part], dtype=torch.int64)
    token_index = batch.responses.value_index(rows.to(batch.prompt_of.device))
    sent, received = _totals(known.response_lengths, outgoing), _totals(known.response_lengths, incoming)

    def tokens(values: Tensor) -> Tensor:
        return _all_to_all(values[token_index], sent, received, group)

    numbers = [number for part in incoming for number in part]
    device = batch.prompt_of.device
    arrived = Batch(
        prompts=_exchange_prompts(batch, known, outgoing, incoming, group),
        responses=Ragged(tokens(batch.responses.values), known.response_lengths[numbers].to(device)),
        prompt_of=_prompt_rows(known, incoming).to(device),
        samples={name: known.samples[name][numbers].to(device) for name in batch.samples},
        tokens={name: tokens(values) for name, values in batch.tokens.items()},
    )
    place = {number: row for row, number in enumerate(numbers)}
    return Batch.concat([arrived]).select([place[number] for number in destinations[rank]])


def gather_samples(
    values: Tensor, numbers: Sequence[int], total: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Make per-sample values known everywhere: [n] of the samples `numbers` here → [total] of all.

    No two ranks of the group may hold the same sample (so: a data-parallel group).
    """
    everywhere = values.new_zeros(total)
    everywhere[torch.tensor(numbers, dtype=torch.int64, device=values.device)] = values
    dist.all_reduce(everywhere, group=group)
    return everywhere


def _exchange_prompts(
    batch: Batch,
    known: Catalogue,
    outgoing: Sequence[Sequence[int]],
    incoming: Sequence[Sequence[int]],
    group: dist.ProcessGroup | None,
) -> Ragged:
    """The prompts of the arriving samples, source after source, once from each."""
    outgoing = [known.first_of_groups(part) for part in outgoing]
    incoming = [known.first_of_groups(part) for part in incoming]
    rows = batch.prompt_of[[known.rows[number] for part in outgoing for number in part]]
    sent, received = _totals(known.prompt_lengths, outgoing), _totals(known.prompt_lengths, incoming)
    values = _all_to_all(batch.prompts.select(rows).values, sent, received, group)
    lengths = known.prompt_lengths[[number for part in incoming for number in part]]
    return Ragged(values, lengths.to(values.device))


def _prompt_rows(known: Catalogue, incoming: Sequence[Sequence[int]]) -> Tensor:
    """Rows of the arriving samples' prompts among those of `_exchange_prompts`."""
    rows: list[int] = []
    offset = 0
    for part in incoming:
        row_of = {known.groups[number]: offset + row for row, number in enumerate(known.first_of_groups(part))}
        rows += [row_of[known.groups[number]] for number in part]
        offset += len(row_of)
    return torch.tensor(rows, dtype=torch.int64)


def _totals(lengths: Tensor, parts: Sequence[Sequence[int]]) -> list[int]:
    return [int(lengths[list(part)].sum()) for part in parts]


def _all_to_all(values: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Flat values in the order of their destinations → flat values in the order of their sources."""
    wire = values.to(torch.uint8) if values.dtype == torch.bool else values
    arrived = wire.new_empty(sum(received))
    dist.all_to_all_single(arrived, wire.contiguous(), received, sent, group=group)
    return arrived.to(values.dtype)


def _gather(values: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values.contiguous(), group=group)
    return parts
