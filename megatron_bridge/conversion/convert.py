"""Writing a checkpoint as another: Hugging Face's files or Megatron's, in bounded memory, by one process or many.

What is to be written is known before anything is: a dry run says it and touches nothing.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_bridge.checkpoints import cast_dtypes, dtypes_in, widened
from megatron_bridge.contents import DEFAULT_FILE_BYTES, Contents, plan_contents
from megatron_bridge.conversion.checkpoint import HUGGING_FACE, Checkpoint
from megatron_bridge.conversion.memory import DEFAULT_MEMORY, expected_peak, mapped_budget, peak_memory
from megatron_bridge.conversion.progress import Progress
from megatron_bridge.distcp_writer import ITERATION, Files, plan_files, write_torch_dist
from megatron_bridge.folders import CONFIG, NAMES, Carried, NewFolder, show_bytes, together
from megatron_bridge.hf_writer import write_hf
from megatron_bridge.layouts import HFLayout, MegatronLayout

SHOWN_NAMES = 3


@dataclass(frozen=True)
class Target:
    """What to write: where, which kind of folder, and how.

    `dtype` None keeps each tensor's. `names` and `file_bytes` shape Hugging Face's files, `like` Megatron's chunks.
    """

    folder: Path
    kind: str
    names: HFLayout
    like: MegatronLayout
    dtype: torch.dtype | None = None
    file_bytes: int = DEFAULT_FILE_BYTES
    overwrite: bool = False
    max_memory: int = DEFAULT_MEMORY
    quiet: bool = False


def convert(source: Checkpoint, target: Target, rank: int) -> str:
    """Write the target; every rank of the source's layout calls it. Returns a line that says what was done.

    UserError for a target that may not be written, a disk that is full, a memory limit that is too low.
    """
    begin = time.perf_counter()
    mapped, contents = together(lambda: (mapped_budget(target.max_memory), plan_target(source, target)), None)
    label = f"rank {rank} of {len(source.layout.ranks)}" if len(source.layout.ranks) > 1 else target.folder.name
    with Progress(bytes_of(contents, rank), label, quiet=target.quiet or rank != source.layout.ranks[0]) as progress:
        _write(source, target, contents, rank, mapped, progress)
    seconds = time.perf_counter() - begin
    return (
        f"{target.folder}: {show_bytes(contents.nbytes)} in {seconds:.1f} s "
        f"({show_bytes(int(contents.nbytes / seconds))}/s), peak memory {peak_memory() / 2**30:.2f} GiB"
        + "".join(f"\n{line}" for line in promotions(source, target, contents))
    )


def _write(
    source: Checkpoint, target: Target, contents: Contents | Files, rank: int, mapped: int, progress: Progress
) -> None:
    if isinstance(contents, Contents):
        new = NewFolder(target.folder, source.sources, target.overwrite)
        write_hf(
            new, Carried(source.model, source.model), contents, source.layout, source.tensors,
            rank=rank, dtype=target.dtype, mapped_bytes=mapped, progress=progress,
        )  # fmt: skip
    else:
        write_torch_dist(
            target.folder, source.layout, source.tensors,
            rank=rank, model=source.model, like=target.like, dtype=target.dtype, mapped_bytes=mapped,
            overwrite=target.overwrite, progress=progress, beside=_beside(target.names), reads=source.sources,
        )  # fmt: skip


def plan_target(source: Checkpoint, target: Target) -> Contents | Files:
    """The files to be written."""
    if target.kind == HUGGING_FACE:
        names, dtype = target.names, target.dtype
        dtypes = dtypes_in(names, source.layout, source.tensors) if dtype is None else cast_dtypes(names, dtype)
        return plan_contents(source.layout, names, dtypes, target.file_bytes)
    return plan_files(source.layout, source.tensors, target.like, target.dtype)


def bytes_of(contents: Contents | Files, rank: int) -> int:
    """Bytes of weights that a rank writes."""
    return sum(size for _, owner, size in files_of(contents) if owner == rank)


def files_of(contents: Contents | Files) -> list[tuple[str, int, int]]:
    """Each file of weights: its name, the rank that writes it, and its bytes."""
    if isinstance(contents, Contents):
        return [(file.name, file.owner, contents.bytes_of(file)) for file in contents.files]
    return [
        (f"{ITERATION}/{contents.names[rank]}", rank, entries[-1].begin + entries[-1].nbytes)
        for rank, entries in contents.entries.items()
    ]


def describe(source: Checkpoint, target: Target) -> str:
    """What `convert` would write, and what it would take; UserError where it would refuse."""
    mapped = mapped_budget(target.max_memory)
    new, carried = NewFolder(target.folder, source.sources, target.overwrite), Carried(source.model, source.model)
    new.check()
    carried.check()
    contents = plan_target(source, target)
    new.check_space(contents.nbytes)
    lines = [f"{target.folder} ({target.kind}) would hold"]
    lines += [f"  {name}  {show_bytes(size)}" for name, _, size in files_of(contents)]
    lines += [f"  {path.name}  copied" for path in (source.model / CONFIG, *carried.files())]
    lines.append(
        f"in all {show_bytes(contents.nbytes)} of weights, {show_bytes(new.free)} are free there; "
        f"peak memory about {expected_peak(mapped) / 2**30:.2f} GiB a process"
    )
    return "\n".join(lines + promotions(source, target, contents))


def promotions(source: Checkpoint, target: Target, contents: Contents | Files) -> list[str]:
    """A line about tensors that become wider unasked: what the target keeps in one tensor has one dtype there."""
    if target.dtype is not None:
        return []
    if isinstance(contents, Contents):
        dtypes = contents.dtypes
    else:
        entries = [entry.content for entries in contents.entries.values() for entry in entries]
        dtypes = {chunk.parameter: chunk.dtype for chunk in entries if not isinstance(chunk, str)}
    found = widened(replace(contents.layout, owners=None), dtypes, source.layout, source.tensors)
    if not found:
        return []
    ways = Counter(f"{_named(a)} to {_named(b)}" for a, b in found.values())
    said = ", ".join(f"{count} from {way}" for way, count in ways.items())
    some = ", ".join(list(found)[:SHOWN_NAMES]) + (", …" if len(found) > SHOWN_NAMES else "")
    return [f"promoted, as what lies in one tensor there has one dtype: {said} ({some})"]


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _beside(names: HFLayout) -> Mapping[str, str]:
    """What a Megatron folder remembers of unusual names, so that they come back."""
    usual = HFLayout(names.arch, names.ranks)
    said = {key: getattr(names, key) for key in ("root", "stacked", "tied_head")}
    return {NAMES: json.dumps(said) + "\n"} if replace(usual, **said) != usual else {}
