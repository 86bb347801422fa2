"""Ranks as they may be written, and the lists that they stand for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlflow.config import Actor, Config, Model, dump, load
from rlflow.config.document import parse
from rlflow.config.faults import as_written
from rlflow.config.load import interpret
from rlflow.config.ranks import expand, in_short, rank_list
from tests.config.examples import write_config


def ranks(written: Any, per_node: int | None = None, *overrides: str) -> tuple[Any, list[str]]:
    config, faults = interpret({"model": {"path": "m"}, "actor": {"ranks": written}}, overrides, per_node)
    return config.actor.ranks, [str(fault) for fault in faults]


@pytest.mark.parametrize(
    ("written", "listed"),
    [
        ("all", "all"),
        ([0, 2], (0, 2)),
        ("[0, 2]", (0, 2)),
        (3, (3,)),
        ("0-3", (0, 1, 2, 3)),
        ("3", (3,)),
        ("0-1, 6-7", (0, 1, 6, 7)),
        ("node 1", (4, 5, 6, 7)),
        ("nodes 0-1", tuple(range(8))),
        ("nodes 0,2", (0, 1, 2, 3, 8, 9, 10, 11)),
    ],
)
def test_ranks_become_lists(written: Any, listed: Any) -> None:
    assert ranks(written, 4) == (listed, [])
    assert ranks("all", 4, f"actor.ranks={written}") == (listed, [])
    assert ranks("all", 4, f"actor={{ranks: '{written}'}}") == (listed, [])


def test_a_list_may_have_ranges() -> None:
    assert ranks([0, "2-3"]) == ((0, 2, 3), [])
    assert ranks("all", None, "actor.ranks=[0, 2-3]") == ((0, 2, 3), [])


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        ("0..3", "must be all, a list such as [0, 1], a range such as 0-3, or nodes such as node 0 and nodes 0-1; "
                 "nearest: all"),
        ("3-0", "a range goes from the smaller number to the larger; nearest: 0-3"),
        ("0-9999999", "no job has more than 1048576 ranks"),
        (None, "must be all, a list such as [0, 1], a range such as 0-3, or nodes such as node 0 and nodes 0-1; "
               "nearest: all"),
        ([0, "x"], "must be all, a list such as [0, 1], a range such as 0-3, or nodes such as node 0 and nodes 0-1; "
                   "nearest: all"),
        ("node 0", "how many ranks a node has is unknown here: write the ranks, or say it by --ranks-per-node"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_ranks(written: Any, rule: str) -> None:
    assert ranks(written) == ("all", [f"actor.ranks = {as_written(written)}: {rule}"])


def test_followers_take_the_list_and_not_the_fault() -> None:
    config, faults = interpret({"model": {"path": "m"}, "actor": {"ranks": "node 0"}}, [], 2)
    assert (config.critic.ranks, faults) == ((0, 1), [])
    _, faults = interpret({"model": {"path": "m"}, "actor": {"ranks": "x"}})
    assert [fault.key for fault in faults] == ["actor.ranks"]


def test_torchrun_says_how_many_ranks_a_node_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = load(write_config(tmp_path), ["rollout.ranks=node 1"], world_size=4)
    assert config.rollout.ranks == (2, 3)
    config = load(write_config(tmp_path), ["rollout.ranks=node 1"], world_size=4, ranks_per_node=1)
    assert config.rollout.ranks == (1,)


@pytest.mark.parametrize(
    ("listed", "short"), [([3], "3"), ([0, 1], "0-1"), ([0, 1, 2, 5, 7, 8], "0-2,5,7-8"), (range(16), "0-15")]
)
def test_lists_in_short(listed: Sequence[int], short: str) -> None:
    assert in_short(listed) == short
    assert expand(short, None) == list(listed)


@pytest.mark.parametrize(
    ("listed", "saved"),
    [((0, 1, 2, 3), "0-3"), ((2,), "2"), ("all", "all"), ((1, 0), [1, 0]), ((), []), ((-1, 0), [-1, 0])],
)
def test_saved_ranks_load_as_the_same(listed: Any, saved: Any) -> None:
    config = Config(Model("m"), actor=Actor(ranks=listed))
    assert parse(dump(config))["actor"]["ranks"] == saved
    assert interpret(parse(dump(config)))[0].actor == config.actor


def test_all_of_an_unknown_number() -> None:
    assert (rank_list("all", 3), rank_list("all", None), rank_list((1,), None)) == ((0, 1, 2), None, (1,))
