"""Compare two model folders tensor by tensor, Hugging Face's or Megatron's on either side.

    rlflow-convert verify Qwen3-8B Qwen3-8B-megatron

Megatron's tensors are read as Hugging Face's files would hold them. The exit code is 0 if all are equal bit by bit, so
that 0.0 and -0.0 differ; or, with --atol, if their values are up to that difference and whatever their dtypes, NaNs
being equal to each other and to nothing else. Else it is 1. Layers that predict further tokens, which
Megatron's folders are read without, are counted apart there. With torchrun each process compares a share.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, prod
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.checkpoints import dtypes_in, is_ignored, names_of
from megatron_bridge.command_line import path, say
from megatron_bridge.conversion.checkpoint import HUGGING_FACE, find_model, kind_of, open_checkpoint
from megatron_bridge.conversion.memory import DEFAULT_MEMORY, mapped_budget
from megatron_bridge.conversion.options import processes, size
from megatron_bridge.conversion.progress import Progress
from megatron_bridge.families import load_architecture
from megatron_bridge.files import MappedTensors, Shapes, open_hf
from megatron_bridge.fill import Filler
from megatron_bridge.folders import together
from megatron_bridge.layouts import HFLayout
from megatron_bridge.prediction import prediction_names

PART = 2**18  # elements that are compared at a time
SHOWN = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `verify`."""
    parser.add_argument("first", type=path, metavar="A", help="a model folder")
    parser.add_argument("second", type=path, metavar="B", help="another")
    parser.add_argument(
        "--atol", type=_tolerance, metavar="X", help="compare values: differences up to it count as none"
    )
    parser.add_argument(
        "--hf", type=path, metavar="DIR", help="a folder with config.json, for Megatron checkpoints without one"
    )
    parser.add_argument(
        "--max-memory", type=size, default=DEFAULT_MEMORY, metavar="SIZE", help="what a process may take; default 2G"
    )
    parser.add_argument("--all", action="store_true", help="list equal tensors too")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = inf
    if not isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 0, not {text}")
    return value


def run(args: argparse.Namespace) -> int:
    """Compare, print what differs and a summary; 1 if anything does."""
    with processes() as (rank, ranks):
        a, b = together(lambda: open_sides(args), None)
        shared = [name for name in a.tensors if name in b.tensors]
        mine = shared[rank :: len(ranks)]
        total = sum(prod(a.tensors[name][0]) * a.tensors[name][1].itemsize for name in mine)
        with Progress(total, "verify", quiet=args.quiet or rank > 0) as progress:
            rows = together(lambda: [compare(name, a, b, progress) for name in mine], None)
        rows = _gathered(rows, len(ranks))
        apart = left_out(a, b)
        for fault, one, other in (("missing", a, b), ("extra", b, a)):
            alone = (name for name in one.tensors if name not in other.tensors and name not in apart)
            rows += [Row(name, f"{fault} in {args.second}") for name in alone]
        bad = [row for row in rows if not row.passes(args.atol)]
        if rank == 0:
            say(report(rows, bad, args.all, len(apart)))
    return 1 if bad else 0


# ---------------------------------------------------------------- sides
@dataclass(frozen=True)
class Side:
    """A folder's tensors under the names that both sides are compared by: shape and dtype, and how a part is read.

    `predictions` are those of layers that predict further tokens; None: of Megatron's folders none are read.
    """

    tensors: Shapes
    read: Callable[[str, int, Tensor], None]
    predictions: frozenset[str] | None = frozenset()

    def joined(self, other: "Side") -> "Side":
        """This side and what another one has besides."""

        def read(name: str, begin: int, out: Tensor) -> None:
            (self if name in self.tensors else other).read(name, begin, out)

        return Side({**other.tensors, **self.tensors}, read, other.predictions)


def open_sides(args: argparse.Namespace) -> tuple[Side, Side]:
    """Both folders, compared by the names in the first of them that is Hugging Face's, else by canonical ones."""
    folders = Path(args.first), Path(args.second)
    hf = [folder for folder in folders if kind_of(folder) == HUGGING_FACE]
    names = names_of(hf[0], load_architecture(hf[0])) if hf else None
    mapped = mapped_budget(args.max_memory) // 2
    first, second = (_open_side(folder, names, [args.hf, *hf], mapped) for folder in folders)
    return first, second


def left_out(a: Side, b: Side) -> frozenset[str]:
    """What one side has of layers that predict further tokens where the other is read without such layers."""
    held = [side.predictions for side in (a, b) if side.predictions is not None]
    return held[0] if len(held) == 1 else frozenset()


def _open_side(folder: Path, names: HFLayout | None, configs: Sequence[str | Path | None], mapped: int) -> Side:
    """A side; of `configs` the first one given is for a Megatron checkpoint that has none."""
    if kind_of(folder) == HUGGING_FACE:
        own, held = names_of(folder, load_architecture(folder)), open_hf(folder)
        predictions = prediction_names(own, held) & held.keys()
        if names is None or (own.root, own.stacked) == (names.root, names.stacked):
            wanted = own.parameters(0)
            files = held.only(name for name in held if name in wanted or not is_ignored(name, own))
            return _files_side(files, mapped, predictions)
        return _renamed_side(folder, names, None, mapped).joined(
            _files_side(held.only(predictions), mapped, predictions)
        )
    config = next((config for config in configs if config and find_model(folder) is None), None)
    return replace(_renamed_side(folder, names, config, mapped), predictions=None)


def _renamed_side(folder: Path, names: HFLayout | None, config: str | Path | None, mapped: int) -> Side:
    """A side whose model is read as files of these names, or of canonical ones, would hold it."""
    source = open_checkpoint(folder, config=config)
    layout = replace(names, arch=source.arch) if names else HFLayout(source.arch, (0,))
    filler = Filler(source.layout, source.tensors, layout, rank=0, mapped_bytes=mapped)
    dtypes = dtypes_in(layout, source.layout, source.tensors)
    return Side({name: (param.shape, dtypes[name]) for name, param in layout.parameters(0).items()}, filler.fill)


def _files_side(tensors: MappedTensors, mapped: int, predictions: frozenset[str]) -> Side:
    """A side that is read as it is, whatever it lacks or has besides."""
    read = 0

    def fill(name: str, begin: int, out: Tensor) -> None:
        nonlocal read
        out.copy_(tensors[name].view(-1)[begin : begin + len(out)])
        read += out.nbytes
        if read > mapped:
            tensors.release()
            read = 0

    return Side({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}, fill, predictions)


# ---------------------------------------------------------------- comparison
class Row(NamedTuple):
    """What is said of one tensor: a fault that no tolerance mends, another dtype, and the largest difference.

    `elements` counts those of other bits, or of another value where the dtypes differ.
    """

    name: str
    fault: str = ""
    dtypes: str = ""
    elements: int = 0
    difference: float = 0.0

    def passes(self, atol: float | None) -> bool:
        """Whether the two sides count as equal: in every bit, or with a tolerance in their values."""
        if self.fault:
            return False
        return not self.dtypes and not self.elements if atol is None else self.difference <= atol


def compare(name: str, a: Side, b: Side, progress: Callable[[int], None]) -> Row:
    """Two tensors of one name. A NaN is no distance from a NaN, and infinitely far from anything else."""
    (shape, dtype), (other_shape, other) = a.tensors[name], b.tensors[name]
    if shape != other_shape:
        return Row(name, f"shapes {list(shape)} and {list(other_shape)}")
    differing, largest, elements = 0, 0.0, prod(shape)
    for begin in range(0, elements, PART):
        count = min(PART, elements - begin)
        first, second = torch.empty(count, dtype=dtype), torch.empty(count, dtype=other)
        a.read(name, begin, first)
        b.read(name, begin, second)
        progress(first.nbytes)
        if dtype == other and torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
            continue
        differences = _differences(first.double(), second.double())
        differing += int(torch.count_nonzero(_other_bits(first, second) if dtype == other else differences))
        largest = max(largest, float(differences.max()))
    return Row(name, "", "" if dtype == other else f"{_named(dtype)} and {_named(other)}", differing, largest)


def _differences(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs().nan_to_num(nan=inf, posinf=inf))


def _other_bits(a: Tensor, b: Tensor) -> Tensor:
    """Which elements of two flat tensors of one dtype are not the same bits."""
    return (a.view(torch.uint8) != b.view(torch.uint8)).view(len(a), -1).any(dim=1)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gathered(rows: list[Row], processes: int) -> list[Row]:
    """The rows of all processes."""
    if processes == 1:
        return rows
    found: list[list[Row]] = [[] for _ in range(processes)]
    dist.all_gather_object(found, rows)
    return [row for part in found for row in part]


def report(rows: Sequence[Row], bad: Sequence[Row], every: bool, left_out: int) -> str:
    """A line for each row that differs, or every one, and a summary."""
    shown = list(rows if every else bad[:SHOWN])
    width = max((len(row.name) for row in shown), default=0)
    lines = [f"{row.name:<{width}}  {_said(row)}" for row in shown]
    if not every and len(bad) > SHOWN:
        lines.append(f"… and {len(bad) - SHOWN} more; --all lists them")
    largest = max((row.difference for row in rows), default=0.0)
    faults = sum(bool(row.fault) for row in rows)
    lines.append(
        f"{len(rows)} tensors: {len(rows) - len(bad)} equal, {len(bad)} not "
        f"({faults} missing, extra or of another shape), largest difference {largest:.3g}"
    )
    if left_out:
        said = "tensors of layers that predict further tokens, of which nothing is read from a Megatron folder"
        lines.append(f"left out: {left_out} {said}")
    return "\n".join(lines)


def _said(row: Row) -> str:
    if row.fault:
        return row.fault
    said = [row.dtypes] if row.dtypes else []
    if row.elements:
        said.append(f"{row.elements:,} elements differ, at most by {row.difference:.3g}")
    return ", ".join(said) or "equal"
