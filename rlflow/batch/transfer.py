"""Move samples between grids: lengths and scores become known everywhere, tokens go only to ranks that need them.

Who needs which sample is decided by the caller (`balance.assign`, from the catalogue that all ranks share), who sends
it by `placement.senders`. Collectives run on the tensors' device, which must be one that the group's backend serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.batch.batch import Batch
from rlflow.batch.placement import Placement, senders
from rlflow.batch.ragged import Ragged, spans
from rlflow.batch.sizes import Sizes

TOKEN_IDS = "token_ids"  # the name under which ids travel beside the fields of their tokens


@dataclass(frozen=True)
class Catalogue:
    """All samples of all ranks without their tokens, the same on every rank; a sample's number is its place here."""

    owners: list[int]  # rank in the group that holds the sample
    rows: list[int]  # its row in the owner's batch
    prompt_lengths: Tensor  # int64 [N]
    response_lengths: Tensor  # int64 [N]
    samples: dict[str, Tensor]  # per-sample fields of the batches, [N]
    ranks_per_node: int  # ranks next to each other that share a node, for which moves between nodes are avoided

    def __len__(self) -> int:
        return len(self.owners)

    @cached_property
    def groups(self) -> list[int]:
        return self.samples["group"].tolist()

    @cached_property
    def group_prompt_lengths(self) -> Tensor:
        """Prompt tokens by group number, 0 for a number that no sample has: int64."""
        lengths = self.prompt_lengths.new_zeros(max(self.groups, default=-1) + 1)
        lengths[self.samples["group"]] = self.prompt_lengths
        return lengths

    def sizes(self) -> Sizes:
        return Sizes(self.prompt_lengths.tolist(), self.response_lengths.tolist(), self.groups)

    def placement(self, ranks: int) -> Placement:
        """Who holds what as the samples were catalogued."""
        held: list[list[int]] = [[] for _ in range(ranks)]
        for number, owner in enumerate(self.owners):
            held[owner].append(number)
        return tuple(map(tuple, held))

    def first_of_groups(self, numbers: Sequence[int]) -> dict[int, int]:
        """The groups of the given samples in the order in which they appear, each with its first sample."""
        firsts: dict[int, int] = {}
        for number in numbers:
            firsts.setdefault(self.groups[number], number)
        return firsts


def catalogue(batch: Batch, group: dist.ProcessGroup | None = None, *, ranks_per_node: int | None = None) -> Catalogue:
    """Gather the lengths and per-sample fields of every rank's samples; each sample must be held by one rank only.

    Two all-gathers, 8 bytes for each field of each sample. Without `ranks_per_node` all ranks count as near each other.
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
        ranks_per_node=ranks_per_node or len(counts),
    )


def exchange(
    batch: Batch, known: Catalogue, wanted: Sequence[Sequence[int]], group: dist.ProcessGroup | None = None
) -> Batch:
    """Give every rank the samples that it wants, in its order, from the ranks that the catalogue found them on.

    Several ranks may want one sample, as tensor- and pipeline-parallel peers do. A rank gets a prompt once. Token ids
    travel as int32. One all-to-all for the prompts and one for the responses, each with all its fields; every rank
    must have the same fields, empty where it has no samples.
    """
    asked: Placement = tuple(tuple(numbers) for numbers in wanted)
    held, rank, device = known.placement(len(asked)), dist.get_rank(group), batch.prompt_of.device
    numbers = list(asked[rank])
    groups = known.first_of_groups(numbers)
    row_of = {group_number: row for row, group_number in enumerate(groups)}
    prompt_ids, prompt_tokens = _exchange_prompts(batch, known, held, asked, group)
    tokens = move_tokens({TOKEN_IDS: batch.responses.values.int()} | batch.tokens, known, held, asked, group)
    return Batch(
        prompts=Ragged(prompt_ids.long(), known.group_prompt_lengths[list(groups)].to(device)),
        responses=Ragged(tokens.pop(TOKEN_IDS).long(), known.response_lengths[numbers].to(device)),
        prompt_of=torch.tensor([row_of[known.groups[n]] for n in numbers], dtype=torch.int64, device=device),
        samples={name: known.samples[name][numbers].to(device) for name in batch.samples},
        tokens=tokens,
        prompt_tokens=prompt_tokens,
    )


def move_tokens(
    fields: Mapping[str, Tensor], known: Catalogue, held: Placement, wanted: Placement,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Bring fields of response tokens from the ranks that hold the samples to those that want them.

    Args:
        fields: [sum of the response lengths of `held[rank]`, …], flat in this order. All ranks pass the same names,
            dtypes and trailing dimensions, with no tokens where they hold no samples.
        known: the step's catalogue.
        held, wanted: who has and who needs what, the same on all ranks.

    Returns:
        The same fields, flat in the order of `wanted[rank]`. One all-to-all of all fields together, by `senders`; no
        communication at all where every rank has what it wants.
    """
    return _move(fields, known.response_lengths, known.ranks_per_node, held, wanted, group)


def move_samples(
    fields: Mapping[str, Tensor], known: Catalogue, held: Placement, wanted: Placement,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """`move_tokens` for per-sample fields [len(held[rank]), …] → [len(wanted[rank]), …]."""
    return _move(fields, torch.ones_like(known.response_lengths), known.ranks_per_node, held, wanted, group)


def share_samples(values: Tensor, placement: Placement, total: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Make per-sample values known on every rank: [len(placement[rank])] → [total], 0 for samples that nobody holds.

    Of several holders the first counts. Ranks that hold none pass an empty tensor of the same dtype. One all-reduce.
    """
    rank = dist.get_rank(group)
    earlier = set(chain.from_iterable(placement[:rank]))
    places = [place for place, number in enumerate(placement[rank]) if number not in earlier]
    numbers = [placement[rank][place] for place in places]
    return gather_samples(values[places], numbers, total, group)


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
    batch: Batch, known: Catalogue, held: Placement, wanted: Placement, group: dist.ProcessGroup | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Ids and fields of the prompts that this rank's wanted samples have, in the order in which these name them."""
    firsts = known.first_of_groups(held[dist.get_rank(group)])
    rows = batch.prompt_of[[known.rows[number] for number in firsts.values()]]
    index = batch.prompts.value_index(rows)
    fields = {TOKEN_IDS: batch.prompts.values.int()} | batch.prompt_tokens
    moved = _move(
        {name: values[index] for name, values in fields.items()},
        known.group_prompt_lengths, known.ranks_per_node,
        tuple(tuple(known.first_of_groups(numbers)) for numbers in held),
        tuple(tuple(known.first_of_groups(numbers)) for numbers in wanted),
        group,
    )  # fmt: skip
    return moved.pop(TOKEN_IDS), moved


def _move(
    fields: Mapping[str, Tensor], lengths: Tensor, ranks_per_node: int, held: Placement, wanted: Placement,
    group: dist.ProcessGroup | None,
) -> dict[str, Tensor]:  # fmt: skip
    """`move_tokens` for items of any kind, item `number` having `lengths[number]` rows in each field."""
    if held == wanted:
        return dict(fields)
    rank = dist.get_rank(group)
    chosen = senders(held, wanted, lengths.tolist(), ranks_per_node)
    outgoing = [_from(rank, target, wanted, chosen) for target in range(len(wanted))]
    incoming = [_from(source, rank, wanted, chosen) for source in range(len(wanted))]
    rows = _as_bytes(fields)
    here = list(held[rank])
    if any(sender != target for target, of_target in enumerate(chosen) for sender in of_target):
        leaving = _rows_of(list(chain.from_iterable(outgoing)), here, lengths)
        arrived = rows.new_empty(sum(received := _totals(lengths, incoming)), rows.shape[1])
        dist.all_to_all_single(
            arrived, rows[leaving.to(rows.device)], received, _totals(lengths, outgoing), group=group
        )
        rows = torch.cat([rows, arrived])
        here += chain.from_iterable(incoming)
    return _as_fields(rows[_rows_of(wanted[rank], here, lengths).to(rows.device)], fields)


def _from(source: int, target: int, wanted: Placement, chosen: Sequence[Sequence[int]]) -> list[int]:
    """What `source` sends to `target`, in the order of the target's wants; nothing to itself."""
    if source == target:
        return []
    return [number for number, sender in zip(wanted[target], chosen[target], strict=True) if sender == source]


def _rows_of(numbers: Sequence[int], among: Sequence[int], lengths: Tensor) -> Tensor:
    """Where the rows of the given items lie in the rows of the items `among`, one after the other: int64."""
    ends = lengths[list(among)].cumsum(0).tolist()
    start_of = dict(zip(among, [0, *ends], strict=False))
    starts = torch.tensor([start_of[number] for number in numbers], dtype=torch.int64)
    return spans(starts, lengths[list(numbers)])


def _totals(lengths: Tensor, parts: Sequence[Sequence[int]]) -> list[int]:
    return [int(lengths[list(part)].sum()) for part in parts]


def _as_bytes(fields: Mapping[str, Tensor]) -> Tensor:
    """Fields of R rows side by side as uint8 [R, bytes of a row], so that one collective carries every dtype."""
    columns = [values.unsqueeze(-1).flatten(1).contiguous().view(torch.uint8) for values in fields.values()]
    return torch.cat(columns, dim=1)


def _as_fields(rows: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `_as_bytes`, for fields of the dtypes and trailing dimensions of `like`."""
    widths = [values.element_size() * prod(values.shape[1:]) for values in like.values()]
    fields = {}
    for (name, values), column in zip(like.items(), rows.split(widths, dim=1), strict=True):
        own = column.clone(memory_format=torch.contiguous_format)  # a view in another dtype must start aligned
        fields[name] = own.view(values.dtype).reshape(len(rows), *values.shape[1:])
    return fields


def _gather(values: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values.contiguous(), group=group)
    return parts
