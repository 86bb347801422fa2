"""Seeds differ by purpose and never between runs."""

from rlflow.parallel import derive_seed


def test_is_the_same_in_every_process_and_version() -> None:  # another number would end the resuming of old runs
    assert derive_seed(0, "rollout", 3, "train/17", 2) == 627537575


def test_differs_by_run_and_by_every_part_of_the_purpose() -> None:
    purposes = [(0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2), (0, "a", "1"), (0, "a1"), (0, "a", 1, 0)]
    seeds = {derive_seed(run, *purpose) for run, *purpose in purposes}
    assert len(seeds) == len(purposes)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_four_samples_of_one_prompt_get_four_seeds() -> None:  # cases.md C03
    assert len({derive_seed(7, "rollout", 0, "train/0", index) for index in range(4)}) == 4
