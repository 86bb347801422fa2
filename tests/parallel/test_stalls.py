"""Who waits for whom, from what ranks say of themselves."""

from dataclasses import replace

from rlflow.parallel.stalls import Sign, describe, find_stall

AT_WORK = Sign(0, told=100.0, number=3, phase="update", since=10.0, still=99.0, place="step:1", collectives={"dp": 4})


def sign(rank: int, **changes: object) -> Sign:
    return replace(AT_WORK, rank=rank, **changes)  # type: ignore[arg-type]


def test_a_sign_survives_the_store() -> None:
    assert Sign.from_json(AT_WORK.to_json().encode()) == AT_WORK


def test_ranks_in_one_place_wait_for_nobody() -> None:
    """Even if nothing of them moves: a reward that asks a service, say."""
    assert find_stall([sign(rank, still=10.0) for rank in range(4)], now=100, patience=50) is None


def test_a_rank_that_moves_does_not_wait() -> None:
    """Rank 1 is a phase behind, but rank 0 still works."""
    assert find_stall([sign(0), sign(1, number=1)], now=100, patience=50) is None


def test_the_rank_in_an_earlier_phase_is_waited_for() -> None:
    signs = [sign(0, still=20.0), sign(1, number=1, phase="generate", since=5.0), sign(2, still=30.0), sign(3)]
    stall = find_stall(signs, now=100, patience=50)
    assert stall is not None
    assert [sign.rank for sign in stall.waiting] == [0, 2]
    assert [sign.rank for sign in stall.absent] == [1]
    assert stall.seconds == 80
    assert describe(stall, 100, silence=10) == (
        "ranks 0, 2 waited 80 s in phase 'update' for rank 1\n"
        "  rank 1 did not arrive: in phase 'generate' for 95 s, at step:1"
    )


def test_patience_is_the_time_that_a_rank_has_waited() -> None:
    signs = [sign(0, still=20.0), sign(1, number=1)]
    assert find_stall(signs, now=100, patience=80) is not None
    assert find_stall(signs, now=100, patience=81) is None


def test_fewer_collectives_of_a_common_group_are_behind_too() -> None:
    """Rank 2 has a group that the others do not know, and is no part of theirs."""
    signs = [sign(0, still=0.0), sign(1, collectives={"dp": 3}), sign(2, collectives={"tp": 0})]
    stall = find_stall(signs, now=100, patience=50)
    assert stall is not None
    assert [sign.rank for sign in stall.absent] == [1]


def test_a_rank_that_waits_itself_is_not_to_blame() -> None:
    signs = [sign(0, still=0.0), sign(1, number=2, still=0.0), sign(2, number=1)]
    stall = find_stall(signs, now=100, patience=50)
    assert stall is not None
    assert [sign.rank for sign in stall.absent] == [2]


def test_ranks_that_wait_in_a_circle_are_all_named() -> None:
    """Two ranks that begin the collectives of two groups in different order."""
    first, second = {"dp": 5, "tp": 1}, {"dp": 4, "tp": 2}
    stall = find_stall([sign(0, still=0.0, collectives=first), sign(1, still=0.0, collectives=second)], 100, 50)
    assert stall is not None
    assert [sign.rank for sign in stall.absent] == [0, 1]


def test_many_ranks_are_named_in_a_few_lines() -> None:
    behind = [sign(rank, number=1, told=50.0, place="") for rank in range(1, 12)]
    stall = find_stall([sign(0, still=0.0), *behind], now=100, patience=50)
    assert stall is not None
    first, second, *rest = describe(stall, 100, silence=10).splitlines()
    assert first == "rank 0 waited 100 s in phase 'update' for ranks 1-11"
    assert second == (
        "  rank 1 did not arrive: in phase 'update' for 90 s; its process gave no sign for 50 s: it is stopped or gone"
    )
    assert len(rest) == 8
    assert rest[-1] == "  and 3 more"
