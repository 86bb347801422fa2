"""Who holds what and who sends it: the same plan everywhere, near senders first, work shared among the others."""

import random

import pytest

from rlflow.batch import Placement, place
from rlflow.batch.placement import senders


def test_ranks_of_a_replica_hold_the_same_samples_and_others_none():
    assert place([[4, 1], [0, 2, 3]], [0, 0, None, 1]) == ((4, 1), (4, 1), (), (0, 2, 3))


def test_a_rank_sends_to_itself_what_it_holds():
    held = ((0, 1), (1, 2))
    assert senders(held, ((1,), (2, 1)), [1, 1, 1], ranks_per_node=2) == [[0], [1, 1]]


def test_a_holder_on_the_node_is_preferred():
    """Sample 0 lies on ranks 0 and 2; with nodes of two ranks, rank 1 is next to rank 0 and rank 3 next to rank 2."""
    held = ((0,), (), (0,), (), (), ())
    wanted = ((), (0,), (), (0,), (0,), (0,))
    assert senders(held, wanted, [5], ranks_per_node=2) == [[], [0], [], [2], [0], [2]]


def test_of_several_holders_the_least_loaded_sends():
    """Ranks 0 and 1 hold all: 0 sends rank 2 its 9 tokens, so 1 sends rank 3 its 2, and 4 and 5 their 4 each."""
    held: Placement = ((0, 1, 2), (0, 1, 2), (), (), (), ())
    wanted: Placement = ((), (), (0,), (1,), (2,), (2,))
    assert senders(held, wanted, [9, 2, 4], ranks_per_node=6) == [[], [], [0], [1], [1], [1]]


def test_what_lies_on_the_same_ranks_comes_from_one_sender():
    held = ((0, 1, 2, 3), (0, 1, 2, 3), ())
    assert len(set(senders(held, ((), (), (3, 0, 2)), [1] * 4, ranks_per_node=3)[2])) == 1


def test_peers_of_a_large_replica_share_the_sending():
    """A replica of 8 ranks serves 16 others: two each."""
    replica_of = [0] * 8 + [None] * 16
    held, wanted = place([[0, 1]], replica_of), place([[0, 1]], [None] * 8 + [0] * 16)
    chosen = senders(held, wanted, [10, 20], ranks_per_node=24)
    assert sorted(of_rank[0] for of_rank in chosen if of_rank) == sorted([*range(8), *range(8)])


def test_every_wanted_sample_comes_from_a_holder():
    rng = random.Random(0)
    for _ in range(50):
        held = tuple(tuple(rng.sample(range(20), rng.randint(0, 20))) for _ in range(6))
        known = sorted({number for numbers in held for number in numbers})
        wanted = tuple(tuple(rng.sample(known, rng.randint(0, len(known)))) for _ in range(6))
        for numbers, chosen in zip(wanted, senders(held, wanted, [1] * 20, ranks_per_node=2), strict=True):
            assert all(number in held[sender] for number, sender in zip(numbers, chosen, strict=True))


def test_a_sample_that_nobody_holds_is_refused():
    with pytest.raises(KeyError):
        senders(((0,), ()), ((), (1,)), [1, 1], ranks_per_node=2)
