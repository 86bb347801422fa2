"""Measures every grid against one process and writes the tables of docs/parallelism.md. Takes minutes on two cores.

usage: python -m tools.parity_table
"""

from __future__ import annotations

import datetime
import platform
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.roles.parity import COLUMNS, MATRIX, Matrix
from tests.tiny import save_model
from tests.workers import World

TARGET = Path(__file__).parent.parent / "docs" / "parallelism.md"
BEGIN, END = "<!-- tables: python -m tools.parity_table -->\n", "<!-- end of tables -->\n"
TITLES = {"llama": "Dense: a Llama with tied embeddings", "qwen3_moe": "Experts: a Qwen3-MoE, four experts in a layer"}


def main() -> None:
    world = World()
    with tempfile.TemporaryDirectory() as scratch:
        tables = "\n".join(_tables(Matrix(world, _maker(Path(scratch)))))
    world.close(patience=20)
    before, rest = TARGET.read_text().split(BEGIN)
    TARGET.write_text(f"{before}{BEGIN}\n{tables}\n\n{END}{rest.split(END)[1]}")


def _maker(scratch: Path) -> Callable[..., Path]:
    """Makes tiny random models, each once, in folders below `scratch`."""

    @cache
    def make(family: str, tied: bool, **overrides: Any) -> Path:
        folder = Path(tempfile.mkdtemp(dir=scratch))
        save_model(folder, family, tied, **overrides)
        return folder

    return make


def _tables(matrix: Matrix) -> Iterator[str]:
    stack = ", ".join(f"{package} {version(package)}" for package in ("torch", "megatron-core"))
    today = datetime.date.today().isoformat()
    yield f"Measured on {today} with Python {platform.python_version()}, {stack}, gloo on CPUs."
    for family, title in TITLES.items():
        yield f"\n**{title}**\n\n| grid | processes | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}"
        for case in (case for model, case in MATRIX if model == family):
            errors = matrix.measure(family, case)
            yield f"| {case.name} | {case.ranks} | {' | '.join(_short(errors[column]) for column in COLUMNS)} |"


def _short(error: float) -> str:
    """1.2e-06 as 1.2e-6."""
    return f"{error:.1e}".replace("e-0", "e-") if error else "0"


if __name__ == "__main__":
    main()
