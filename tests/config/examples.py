"""A small good configuration that tests change one key of."""

import json
from pathlib import Path
from typing import Any

from rlflow.config import assemble
from rlflow.config.check import Purpose
from rlflow.config.document import write
from rlflow.errors import UserError

ROOT = Path(__file__).parents[2]
QWEN = ROOT / "tests/config/qwen2.5-7b"
"""config.json of Qwen2.5-7B: 28 heads, 4 key-value heads, 28 layers, 32768 positions, vocabulary 152064."""


def write_data(path: Path, rows: int = 64, **columns: Any) -> Path:
    """Rows with a prompt, its answer, and further columns that are the same in all of them."""
    found = ({"prompt": f"{i} + 1 =", "answer": i + 1, **columns} for i in range(rows))
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def tree(folder: Path) -> dict[str, Any]:
    """Sections as in a file, every path below `folder` and present."""
    return {
        "model": {"path": str(QWEN)},
        "rollout": {"n": 8},
        "data": {
            "train": str(write_data(folder / "train.jsonl")),
            "evaluation": str(write_data(folder / "test.jsonl")),
        },
        "rewards": [{"function": "rlflow.rewards:integer_answer"}],
        "trainer": {"steps": 10, "prompts_per_step": 8, "output_dir": str(folder / "run")},
    }


def write_config(folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(write(tree(folder)))
    return path


def faults(
    folder: Path, *overrides: str, world_size: int | None = None, purpose: Purpose = "train", **sections: Any
) -> list[str]:
    """The faults of the example with `overrides`, and with the keys of `sections` set as in a file."""
    config = tree(folder)
    for name, keys in sections.items():
        config[name] = {**config[name], **keys} if isinstance(keys, dict) else keys
    try:
        assemble(config, overrides, world_size=world_size, purpose=purpose)
    except UserError as error:
        return [line.strip() for line in error.message.splitlines()[1:]]
    return []
