"""Requests that decode in bulk, as arrays: who goes on, who ends and why, what each was given."""

import numpy as np

from rlflow.rollout.rows import DecodeRows, Start


def give(rows: DecodeRows, which: np.ndarray, tokens: list[int]) -> list[int]:
    """What a launched step gave, each token with a tenth of it as its negative log-prob."""
    ended: list[int] = rows.take(which, np.array(tokens), -np.array(tokens, dtype=np.float32) / 10).tolist()
    return ended


def test_a_row_ends_at_its_stop_id_or_its_length() -> None:
    rows = DecodeRows([Start(5, 1, 3, 0), Start(9, 1, 4, 0)], [7], 100)
    first = rows.open()
    rows.launch(first)
    assert give(rows, first, [4, 7]) == [1]
    assert rows.stopped(1)
    second = rows.open()
    assert second.tolist() == [0]
    rows.launch(second)
    assert give(rows, second, [6]) == [0]  # its third of three tokens: one was sampled before
    assert not rows.stopped(0)
    assert rows.tokens(0) == [4, 6]
    assert np.allclose(rows.log_probs(0), [-0.4, -0.6])
    assert rows.tokens(1) == [7]
    assert not len(rows.going())


def test_what_was_launched_before_an_end_was_known_is_dropped() -> None:
    rows = DecodeRows([Start(5, 1, 10, 0), Start(5, 1, 10, 0)], [7], 100)
    steps = []
    for _ in range(2):
        steps.append(rows.open())
        rows.launch(steps[-1])
    assert give(rows, steps[0], [7, 3]) == [0]
    assert give(rows, steps[1], [5, 7]) == [1]
    assert rows.tokens(0) == [7]
    assert rows.tokens(1) == [3, 7]


def test_no_row_is_launched_beyond_its_length() -> None:
    rows = DecodeRows([Start(5, 2, 4, 0), Start(5, 1, 9, 0)], [], 100)
    opened = []
    for _ in range(3):
        opened.append(rows.open().tolist())
        rows.launch(rows.open())
    assert opened == [[0, 1], [0, 1], [1]]


def test_computed_counts_what_is_under_way() -> None:
    rows = DecodeRows([Start(5, 1, 9, 0)], [], 100)
    assert rows.computed(rows.open()).tolist() == [5]  # the prompt; the first sampled token is computed next
    rows.launch(rows.open())
    assert rows.computed(rows.open()).tolist() == [6]


def test_a_stop_id_counts_from_the_least_length_on() -> None:
    rows = DecodeRows([Start(5, 1, 9, 3)], [7], 100)
    for expected in ([], [0]):  # the second and the third token of the response
        which = rows.open()
        rows.launch(which)
        assert give(rows, which, [7]) == expected


def test_a_stay_is_bounded() -> None:
    rows = DecodeRows([Start(5, 1, 1000, 0)], [7], 2)
    for _ in range(2):
        which = rows.open()
        rows.launch(which)
        give(rows, which, [1])
    assert not len(rows.open())
    assert rows.going().tolist() == [0]
