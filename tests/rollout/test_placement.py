"""Which rank trains and samples which slice of Qwen2.5-7B."""

import logging
from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.families import load_architecture
from megatron_bridge.placement import Placement
from rlflow.config import assemble
from rlflow.rollout import placement
from tests.config.examples import tree


def chosen(folder: Path, world_size: int, *overrides: str) -> Placement:
    config = assemble(tree(folder), list(overrides), world_size=world_size, purpose="train", source="test")
    layers = 28 // config.actor.pipeline_parallel_size
    arch, stages = load_architecture(config.model.path), [layers] * config.actor.pipeline_parallel_size
    return placement.choose(config, arch, stages, world_size, 8)


def test_natural_is_what_the_configuration_says(tmp_path: Path) -> None:
    found = chosen(tmp_path, 4, "actor.pipeline_parallel_size=2", "actor.order=dp-tp-cp-ep-pp")
    assert (found.train.order, found.train.ranks, found.rollout.ranks) == ("dp-tp-cp-ep-pp", (0, 1, 2, 3), (0, 1, 2, 3))


def test_contexts_and_virtual_stages_are_part_of_the_layout(tmp_path: Path) -> None:
    sizes = (
        "actor.context_parallel_size=2",
        "actor.pipeline_parallel_size=2",
        "actor.virtual_pipeline_parallel_size=7",
    )
    train = chosen(tmp_path, 8, *sizes).train
    assert (train.cp, train.pp, train.vpp, train.dp, train.stages) == (2, 2, 7, 2, (2,) * 14)


def test_an_order_moves_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """TP2 × DP2 to TP4: the halves of ranks 0 and 1 must be the first, those of 2 and 3 the second."""
    sizes = ("actor.tensor_parallel_size=2", "rollout.tensor_parallel_size=4")
    caplog.set_level(logging.INFO)
    assert sum(chosen(tmp_path, 4, *sizes).received_bytes) > 6e9
    found = chosen(tmp_path, 4, *sizes, "bridge.placement=aligned")
    assert found.train.order.split("-")[:2] == ["dp", "tp"]
    assert found.rollout.ranks == (0, 1, 2, 3)
    assert sum(found.received_bytes) == 0
    (record,) = caplog.records
    assert "placement: order dp-tp-cp-ep-pp; a sync moves 0.0 MB instead of 7," in record.message


def test_engines_are_numbered_anew_where_torch_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("actor.tensor_parallel_size=4", "rollout.tensor_parallel_size=2", "bridge.placement=aligned")
    monkeypatch.setattr("megatron_bridge.compat.has_unsorted_groups", lambda: True)
    assert chosen(tmp_path, 4, *words).rollout.ranks == (0, 2, 1, 3)
    monkeypatch.setattr("megatron_bridge.compat.has_unsorted_groups", lambda: False)
    kept = chosen(tmp_path, 4, *words)
    assert kept.rollout.ranks == (0, 1, 2, 3)
    assert sum(kept.received_bytes) > sum(kept.least_bytes)


def test_the_rank_that_shows_samples_stays_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def last_first(train: Any, rollout: Any, *, renumber: bool, **_: Any) -> Placement:
        ranks = rollout.ranks[::-1] if renumber else rollout.ranks
        return Placement(train, type(rollout)(rollout.arch, rollout.tp, ranks), (1,), (1,), (1,))

    monkeypatch.setattr(placement, "align", last_first)
    assert chosen(tmp_path, 2, "bridge.placement=aligned").rollout.ranks == (0, 1)
