"""The page of keys in the documentation, and the size of the schema."""

from rlflow.config.names import sections
from tools import make_config_reference


def test_the_page_is_current() -> None:
    assert make_config_reference.TARGET.read_text(encoding="utf-8") == make_config_reference.reference()


def test_every_key_is_documented_and_there_are_few() -> None:
    """A key that roles share is declared, described and counted once."""
    keys = [item for name in sections() for item in make_config_reference.listed(name)]
    assert all(item.metadata["doc"].endswith(".") for item in keys)
    assert len(keys) <= 150


def test_a_shared_key_is_described_once() -> None:
    page = make_config_reference.reference()
    assert page.count("| `tensor_parallel_size` |") == 2  # actor, rollout
    assert page.count("| `lr` |") == 2  # optimizer, and the critic's, whose default is another
    assert page.count("those that are absent take the values that `actor` has") == 3
