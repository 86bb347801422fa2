"""No process group is made without a timeout, for one without waits as long as torch likes, whatever the key says."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAKERS = {"init_process_group", "new_group", "new_subgroups_by_enumeration", "new_subgroups"}
BY_PLACE = {"TCPStore": 5, "ProcessGroupGloo": 4, "ProcessGroupNCCL": 4}
"""Classes → how many arguments, given in order, include the timeout or the options with it."""


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "attr", getattr(node.func, "id", "")), node


def has_timeout(name: str, call: ast.Call) -> bool:
    if name in BY_PLACE:
        return len(call.args) >= BY_PLACE[name]
    return any(keyword.arg == "timeout" for keyword in call.keywords)


def test_every_group_and_store_is_made_with_a_timeout() -> None:
    """Where the values come from is seen in a run: tests/test_end_to_end.py."""
    found = {
        f"{path.relative_to(ROOT)}:{call.lineno}": has_timeout(name, call)
        for package in ("rlflow", "megatron_bridge")
        for path in sorted((ROOT / package).rglob("*.py"))
        for name, call in calls(path)
        if name in MAKERS | BY_PLACE.keys()
    }
    assert len(found) >= 6
    assert [place for place, good in found.items() if not good] == []
