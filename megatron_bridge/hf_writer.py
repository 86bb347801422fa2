"""Writing Hugging Face folders from a source that every process can read, in memory for a window of a tensor.

Unlike `export`, which receives what other ranks hold, each rank makes the files that it owns from begin to end.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.contents import Contents
from megatron_bridge.export import begin_hf, finish_hf
from megatron_bridge.files import stream_file
from megatron_bridge.fill import MAPPED_BYTES, Filler
from megatron_bridge.folders import Carried, NewFolder, together
from megatron_bridge.layouts import Layout


def write_hf(
    new: NewFolder,
    carried: Carried,
    contents: Contents,
    source_layout: Layout,
    source: Mapping[str, Tensor],
    *,
    rank: int,
    dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    mapped_bytes: int = MAPPED_BYTES,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write a folder with these contents; every rank of the group calls it, and a failure of one is raised on all.

    `source` are the tensors of a layout of which each rank holds everything, as it does of mapped files. `dtype` is
    what the config is to say, None for what it says. `progress` is told of bytes as they are written. Nothing is left
    of a folder that is not finished.
    """
    lead = rank == source_layout.ranks[0]
    together(lambda: begin_hf(new, carried, contents) if lead else None, group)
    with new.whole_or_nothing(lead):
        together(
            lambda: _write_files(new.partial, contents, source_layout, source, rank, mapped_bytes, progress), group
        )
        together(lambda: finish_hf(new, carried, contents, dtype) if lead else None, group)


def _write_files(
    folder: Path, contents: Contents, layout: Layout, source: Mapping[str, Tensor], rank: int, mapped_bytes: int,
    progress: Callable[[int], None],
) -> None:  # fmt: skip
    filler = Filler(layout, source, contents.layout, rank=rank, mapped_bytes=mapped_bytes)

    def values(name: str, dtype: torch.dtype) -> Iterator[Tensor]:
        for part in filler.values(name, dtype):
            yield part
            progress(part.nbytes)

    for file in contents.files:
        if file.owner == rank:
            stream_file(folder / file.name, contents.of(file), values)
