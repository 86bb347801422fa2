"""The order of prompts: each once an epoch, the same on every rank, continued from a state."""

from pathlib import Path

import pytest

from rlflow.batch.sample import Prompt
from rlflow.config import Data
from rlflow.data.loader import Loader
from rlflow.data.prompts import load_prompts
from rlflow.errors import UserError
from tests.config.examples import write_data
from tests.data.tokenizers import make_tokenizer

PROMPTS = [Prompt(f"train/{i}", [i], {}, i) for i in range(16)]


def rows(loader: Loader, steps: int) -> list[int]:
    return [prompt.answer for _ in range(steps) for prompt in loader.next()]


def test_without_shuffling_the_order_is_the_file_s() -> None:
    assert rows(Loader(PROMPTS, 4, seed=0, shuffle=False), 5) == [*range(16), 0, 1, 2, 3]


def test_each_epoch_has_an_order_of_its_own_that_the_seed_decides() -> None:
    first, again, other = Loader(PROMPTS, 4, 0), Loader(PROMPTS, 4, 0), Loader(PROMPTS, 4, 1)
    epochs = [rows(first, 4), rows(first, 4)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(16))] * 2
    assert epochs[0] != epochs[1] != list(range(16))
    assert rows(again, 8) == epochs[0] + epochs[1]
    assert rows(other, 4) != epochs[0]


def test_a_rest_that_fills_no_batch_waits_for_another_epoch() -> None:
    loader = Loader(PROMPTS[:10], 4, 0)
    assert loader.steps_per_epoch == 2
    drawn = [rows(loader, 2) for _ in range(30)]
    assert all(len(set(epoch)) == 8 for epoch in drawn)
    assert {row for epoch in drawn for row in epoch} == set(range(10))


@pytest.mark.parametrize("steps", [0, 2, 4, 5, 9])
def test_a_state_continues_with_the_next_batch(steps: int) -> None:
    unbroken, stopped, resumed = (Loader(PROMPTS, 4, 3) for _ in range(3))
    rows(unbroken, steps)
    rows(stopped, steps)
    resumed.load_state(stopped.state(), Path())
    assert rows(resumed, 7) == rows(unbroken, 7)


def test_resuming_with_another_batch_size_goes_on_after_the_rows_seen() -> None:
    """cases.md D10: 16 rows, 8 of them seen; the next are 8.. exactly once, on any number of ranks."""
    stopped, resumed = Loader(PROMPTS, 4, 0, shuffle=False), Loader(PROMPTS, 2, 0, shuffle=False)
    rows(stopped, 2)
    resumed.load_state(stopped.state(), Path())
    assert rows(resumed, 4) == list(range(8, 16))


def test_a_state_of_other_data_is_refused() -> None:
    state = Loader(PROMPTS, 4, 0).state()
    for other, words in (
        (Loader(PROMPTS[:12], 4, 0), "16 prompts in data.train, this run has 12"),
        (Loader(PROMPTS, 4, 1), "trainer.seed 0, this run has 1"),
        (Loader(PROMPTS, 4, 0, shuffle=False), "data.shuffle True, this run has False"),
    ):
        with pytest.raises(UserError) as raised:
            other.load_state(state, Path("runs/step_000004"))
        assert str(raised.value) == f"trainer.resume: runs/step_000004 was written with {words}"


def test_fewer_prompts_than_a_batch_are_refused_with_the_counts(tmp_path: Path) -> None:
    """cases.md D07: 3 usable rows, batch 8, and the count before filtering."""
    path = str(write_data(tmp_path / "d.jsonl", rows=10))
    settings = Data(train=path, chat_template=False, overlong="filter")
    prompts = load_prompts(path, make_tokenizer(), settings, max_length=1, name="train")
    for usable, read in ((PROMPTS[:3], 3), (prompts, 10)):
        with pytest.raises(UserError) as raised:
            Loader(usable, 8, 0)
        message = f"data.train: has {len(usable)} usable prompts of {read} rows read, fewer than "
        assert str(raised.value) == message + "trainer.prompts_per_step = 8"
