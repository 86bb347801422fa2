"""The job ends before a collective's timeout and says which rank kept the others, and where; long work is no fault."""

import re
from pathlib import Path

import torch.distributed as dist

from tests.parallel import fault_ranks
from tests.parallel.fault_ranks import KILLED, run
from tests.workers import World


def test_a_rank_that_keeps_the_others_is_named_before_their_timeout(tmp_path: Path) -> None:
    """cases.md G04, twice as long: the timeout is 10 s, rank 1's rollout takes 16. gloo's own error does not come."""
    ended = run(2, fault_ranks.slow_generate, 10.0, 16.0, folder=tmp_path)
    assert ended.codes == [1, 1], ended.errors
    # Each may come from either rank, as both look at all.
    assert re.search(r"^warning: rank 0 waited \d s in phase 'exchange' for rank 1$", ended.errors, re.MULTILINE)
    assert "the job ends when it is 9 s\n" in ended.errors
    assert re.search(r"^rank 0 waited (9|10) s in phase 'exchange' for rank 1$", ended.errors, re.MULTILINE)
    assert ended.errors.count("rank 1 did not arrive: in phase 'generate' for ") == 2
    assert "at tests.parallel.fault_ranks.slow_generate:" in ended.errors
    assert "a larger trainer.timeout_seconds" in ended.errors
    assert "Traceback" not in ended.errors


def test_a_timeout_above_the_rollouts_time_is_enough(tmp_path: Path) -> None:  # cases.md G04
    ended = run(2, fault_ranks.slow_generate, 8.0, 2.0, folder=tmp_path)
    assert (ended.codes, ended.errors) == ([0, 0], "")


def test_a_rank_that_hangs_within_a_phase_is_named(tmp_path: Path) -> None:
    ended = run(2, fault_ranks.hang_in_phase, 4.0, folder=tmp_path)
    assert ended.codes == [1, 1]
    assert re.search(r"rank 1 waited \d s in phase 'update/critic' for rank 0", ended.errors)
    assert "rank 0 did not arrive: in phase 'update/critic'" in ended.errors
    assert "at tests.parallel.fault_ranks.hang_in_phase:" in ended.errors


def test_ranks_that_work_long_together_are_no_fault(tmp_path: Path) -> None:
    ended = run(2, fault_ranks.work_long_together, 3.0, folder=tmp_path)
    assert (ended.codes, ended.errors) == ([0, 0], "")


def test_a_stopped_process_is_named(tmp_path: Path) -> None:
    ended = run(2, fault_ranks.stop_rank_0, 3.0, folder=tmp_path, stopped=0)
    assert ended.codes == [KILLED, 1]
    assert "rank 0 did not arrive: in phase 'generate'" in ended.errors
    assert "it is stopped or gone" in ended.errors


def test_ranks_end_when_the_store_has_gone_with_rank_0(tmp_path: Path) -> None:
    """They are in no collective, so that nothing else would tell them."""
    ended = run(2, fault_ranks.lose, 0, folder=tmp_path, own_store=True)
    assert ended.codes == [KILLED, 1]
    assert "rank 1 ends in phase 'update': the job's store, at 127.0.0.1:" in ended.errors


def test_a_rank_alone_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    """Or it would train on beside the run that goes on in its place."""
    begun = tmp_path / "begun"
    ended = run(1, fault_ranks.compute, begun, folder=tmp_path, store_until=begun)
    assert ended.codes == [1], ended.errors
    assert "rank 0 ends in phase 'update': the job's store, at 127.0.0.1:" in ended.errors


def test_a_group_has_one_name_also_where_it_is_shown_as_the_whole_job(world: World) -> None:
    """Or ranks inside `sub_world` and those on their way would seem to have no group in common."""
    assert world(3, _names_of_groups) == [True, True, True]


def _names_of_groups() -> bool:
    from rlflow.parallel.sub_world import sub_world
    from rlflow.parallel.watchdog import _collectives

    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return True
    names: dict[tuple[int, str], str] = {}
    before = _collectives(names)
    with sub_world(group):
        inside = _collectives(names)
    return len(before) == 2 and before.keys() == inside.keys()
