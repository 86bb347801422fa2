"""Batches between the grids of roles: what arrives is what a full gather would give, and costs no more than itself.

The bytes are those that the collectives receive, counted in real processes.
"""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.batch import (
    Batch,
    Catalogue,
    Placement,
    Sample,
    catalogue,
    exchange,
    move_samples,
    move_tokens,
    place,
    share_samples,
)
from tests.batch.samples import make_sample

GROUPS, N = 5, 3  # samples are numbered prompt after prompt on the rank that sampled them
ROUTES = 4  # experts chosen for a token


def response_length(group: int, index: int) -> int:
    return (3 * group + 5 * index) % 7


def samples_of(group: int) -> list[Sample]:
    prompt = [100 * group + place for place in range(group + 1)]
    return [
        make_sample(prompt, [10 * group + index] * response_length(group, index), str(group), index)
        for index in range(N)
    ]


def sampled_here(replicas: int) -> Batch:
    """The rollout's samples of this rank, group g on rank g mod `replicas`, with routes of all tokens."""
    groups = [group for group in range(GROUPS) if group % replicas == dist.get_rank()]
    batch = Batch.from_samples(
        [sample for group in groups for sample in samples_of(group)], {str(group): group for group in range(GROUPS)}
    )
    batch.tokens["routes"] = routes(batch.responses.values)
    batch.prompt_tokens["routes"] = routes(batch.prompts.values)
    return batch


def routes(token_ids: Tensor) -> Tensor:
    """int16 [tokens, 4], different for every token id."""
    return (token_ids[:, None] + 1000 * torch.arange(ROUTES)).short()


def values_of(known: Catalogue, numbers: tuple[int, ...]) -> Tensor:
    """A float32 for each token of the samples: 1000 · number + the token's place in the response."""
    rows = [1000 * n + torch.arange(int(known.response_lengths[n]), dtype=torch.float32) for n in numbers]
    return torch.cat([torch.empty(0), *rows])


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes that each all-to-all inside brings to this rank."""
    received: list[int] = []
    collective = dist.all_to_all_single

    def counting(output: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> None:
        received.append(output.numel() * output.element_size())
        collective(output, values, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting)
        yield received


def tokens_in(known: Catalogue, numbers: tuple[int, ...]) -> int:
    return int(known.response_lengths[list(numbers)].sum())


def prompt_tokens_in(known: Catalogue, numbers: tuple[int, ...]) -> int:
    return sum(int(known.prompt_lengths[number]) for number in known.first_of_groups(numbers).values())


def run_ppo_step() -> dict[str, Any]:
    """Rollout and actor (DP2 × TP2) on ranks 0 to 3, the critic (DP2) on ranks 4 and 5."""
    rank = dist.get_rank()
    sampled = sampled_here(replicas=4)
    known = catalogue(sampled)
    even, odd = [number for number in range(15) if number % 2 == 0], [number for number in range(15) if number % 2]
    actor = place([even, odd], [0, 0, 1, 1, None, None])
    critic = place([odd[::-1], even], [None, None, None, None, 0, 1])
    facts: dict[str, Any] = {}
    with counted() as facts["to the actor"]:
        of_actor = exchange(sampled, known, actor)
    with counted() as facts["to the critic"]:
        of_critic = exchange(sampled, known, critic)
    old = {"old_log_probs": values_of(known, actor[rank])}
    with counted() as facts["in place"]:
        assert move_tokens(old, known, actor, actor)["old_log_probs"] is old["old_log_probs"]
    values = {"values": values_of(known, critic[rank]), "kept": values_of(known, critic[rank]) > 2000}
    with counted() as facts["values to the actor"]:
        moved = move_tokens(values, known, critic, actor)
    torch.testing.assert_close(moved["values"], values_of(known, actor[rank]), rtol=0, atol=0)
    assert moved["kept"].equal(values_of(known, actor[rank]) > 2000)
    with counted() as facts["returns to the critic"]:
        moved = move_tokens({"returns": values_of(known, actor[rank])}, known, actor, critic)
    torch.testing.assert_close(moved["returns"], values_of(known, critic[rank]), rtol=0, atol=0)
    facts["held"] = [len(of_actor), len(of_critic)]
    facts["new"] = {  # tokens of prompts and responses that a role on this rank needs and the rollout left elsewhere
        name: missing(known, wanted[rank]) for name, wanted in (("actor", actor), ("critic", critic))
    }
    facts["tokens"] = {"actor": tokens_in(known, actor[rank]), "critic": tokens_in(known, critic[rank])}
    return facts


def missing(known: Catalogue, wanted: tuple[int, ...]) -> tuple[int, int]:
    rank = dist.get_rank()
    here = {group for group in range(GROUPS) if group % 4 == rank}
    absent = tuple(number for number in wanted if known.groups[number] not in here)
    return prompt_tokens_in(known, absent), tokens_in(known, absent)


def test_no_rank_receives_more_than_what_it_needs(world):
    """4 bytes for an id, 4 for a log-prob, 1 for the mask, 2 for each of 4 routes; 4 a value and 1 a flag."""
    for rank, facts in enumerate(world(6, run_ppo_step)):
        for role in ("actor", "critic"):
            prompts, responses = facts["new"][role]
            assert sum(facts[f"to the {role}"]) == prompts * (4 + 2 * ROUTES) + responses * (4 + 4 + 1 + 2 * ROUTES)
        assert facts["in place"] == []
        assert facts["values to the actor"] == [(4 + 1) * facts["tokens"]["actor"]]
        assert facts["returns to the critic"] == [4 * facts["tokens"]["critic"]]
        assert facts["held"] == ([[8, 0], [7, 0]][rank // 2] if rank < 4 else [[0, 7], [0, 8]][rank - 4])
        outside = "critic" if rank < 4 else "actor"
        assert facts["tokens"][outside] == 0
        assert facts["new"][outside] == (0, 0)


def random_placement(rng: random.Random, ranks: int, *, complete: bool) -> Placement:
    held = [rng.sample(range(GROUPS * N), rng.randint(0, GROUPS * N)) for _ in range(ranks)]
    if complete:
        missing = set(range(GROUPS * N)) - {number for numbers in held for number in numbers}
        held[rng.randrange(ranks)] += rng.sample(sorted(missing), len(missing))
    return tuple(map(tuple, held))


def run_random_moves(seed: int, trials: int) -> None:
    rank, rng = dist.get_rank(), random.Random(seed)
    sampled = sampled_here(replicas=2)
    known = catalogue(sampled, ranks_per_node=2)
    everything = Batch.concat(from_all_ranks(sampled))
    for _ in range(trials):
        held = random_placement(rng, 3, complete=True)
        wanted = random_placement(rng, 3, complete=False)
        check_batch(exchange(sampled, known, wanted), everything.select(wanted[rank]))
        with counted() as received:
            fields = {"values": values_of(known, held[rank]), "routes": everything.select(held[rank]).tokens["routes"]}
            moved = move_tokens(fields, known, held, wanted)
        assert moved["values"].equal(values_of(known, wanted[rank]))
        assert moved["routes"].equal(everything.select(wanted[rank]).tokens["routes"])
        absent = tuple(set(wanted[rank]) - set(held[rank]))
        assert sum(received) == (4 + 2 * ROUTES) * tokens_in(known, absent)
        numbers = {"numbers": torch.tensor(held[rank], dtype=torch.int64)}
        assert move_samples(numbers, known, held, wanted)["numbers"].tolist() == list(wanted[rank])
        assert share_samples(numbers["numbers"] + 1, held, len(known)).tolist() == list(range(1, len(known) + 1))


def from_all_ranks(batch: Batch) -> list[Batch]:
    batches = [batch] * dist.get_world_size()
    dist.all_gather_object(batches, batch)
    return batches


def check_batch(found: Batch, expected: Batch) -> None:
    assert found.responses.values.equal(expected.responses.values)
    assert found.responses.lengths.equal(expected.responses.lengths)
    for fields, others in ((found.tokens, expected.tokens), (found.samples, expected.samples)):
        assert fields.keys() == others.keys()
        for name in fields:
            torch.testing.assert_close(fields[name], others[name], rtol=0, atol=0, equal_nan=True)
    for row, other in zip(found.prompt_of.tolist(), expected.prompt_of.tolist(), strict=True):
        assert found.prompts.row(row).equal(expected.prompts.row(other))
    assert found.prompt_tokens["routes"].equal(routes(found.prompts.values))
    assert len(found.prompts) == len(expected.prompts)


@pytest.mark.parametrize("seed", [0, 1])
def test_what_arrives_is_what_a_full_gather_would_give(world, seed):
    """Random placements of 15 samples on 3 ranks, of which only two sampled."""
    world(3, run_random_moves, seed, 12)
