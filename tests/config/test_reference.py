"""The page of keys in the documentation, and the size of the schema."""

from dataclasses import fields

from rlflow.config.names import sections
from tools import make_config_reference


def test_the_page_is_current() -> None:
    assert make_config_reference.TARGET.read_text(encoding="utf-8") == make_config_reference.reference()


def test_every_key_is_documented_and_there_are_few() -> None:
    keys = [item for section in sections().values() for item in fields(section)]
    assert all(item.metadata["doc"].endswith(".") for item in keys)
    assert len(keys) <= 110
