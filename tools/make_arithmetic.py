"""Write the data of the quickstart: arithmetic problems with one right answer, as train.jsonl and held_out.jsonl.

`quickstart` is the sum of two two-digit numbers, asked after one worked example: the example makes SmolLM2-135M answer
with a number from the first step, so what is learned afterwards is the sum. `tiny` holds prompts for a random model,
whose reward is the share of a digit in its response. The same seed gives the same files, and no held-out problem is in
the training file, with its numbers swapped neither.

    python tools/make_arithmetic.py --task quickstart --out data/quickstart
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

EXAMPLE = (57, 86)


class Task(NamedTuple):
    """Numbers lowest..highest in sums, `held_out` of the pairs kept from training, and how a pair becomes a row."""

    lowest: int
    highest: int
    train: int | None
    held_out: int
    row: Callable[[int, int], dict[str, Any]]


def sum_row(a: int, b: int) -> dict[str, Any]:
    """A conversation that asks for a + b as it asked for the example, and the answer."""
    first, second = EXAMPLE
    messages = [
        {"role": "user", "content": f"{first} + {second}"},
        {"role": "assistant", "content": str(first + second)},
        {"role": "user", "content": f"{a} + {b}"},
    ]
    return {"prompt": messages, "answer": str(a + b)}


def sevens_row(a: int, b: int) -> dict[str, Any]:
    """Plain text with varied numbers; the answer is the character to write."""
    return {"prompt": f"Compute: {a} + {b} =", "answer": "7"}


TASKS = {
    "quickstart": Task(lowest=10, highest=99, train=None, held_out=200, row=sum_row),
    "tiny": Task(lowest=0, highest=99, train=2000, held_out=32, row=sevens_row),
}


def split(task: Task, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows for training and held-out rows; the sums a + b and b + a are always on the same side."""
    numbers = range(task.lowest, task.highest + 1)
    pairs = [(a, b) for a in numbers for b in numbers if a <= b and (a, b) != EXAMPLE]
    draw = random.Random(seed)
    draw.shuffle(pairs)
    held_out = [draw.choice([(a, b), (b, a)]) for a, b in pairs[: task.held_out]]
    train = sorted({order for a, b in pairs[task.held_out :] for order in ((a, b), (b, a))})
    draw.shuffle(train)
    return [task.row(a, b) for a, b in train[: task.train]], [task.row(a, b) for a, b in held_out]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_split(folder: Path, train: list[dict[str, Any]], held_out: list[dict[str, Any]]) -> None:
    """Write train.jsonl and held_out.jsonl into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "held_out.jsonl", held_out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--task", choices=sorted(TASKS), default="quickstart")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write into")
    parser.add_argument("--seed", type=int, default=0, help="chooses and orders the problems")
    arguments = parser.parse_args()
    train, held_out = split(TASKS[arguments.task], arguments.seed)
    write_split(arguments.out, train, held_out)
    print(f"{arguments.out}: {len(train)} problems to train on, {len(held_out)} held out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
