"""A layout's weights out into a new Hugging Face model folder.

The weights travel as any transfer does, each rank receiving the tensors of the files it writes straight into their
maps. Besides them an export carries over what belongs to the model, config, tokenizer and generation settings, byte for
byte. The folder appears under its name only when it is whole, and a failure of one rank is raised on all.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.checkpoints import cast_dtypes, dtypes_in, names_of, open_source
from megatron_bridge.contents import DEFAULT_FILE_BYTES, Contents, plan_contents
from megatron_bridge.execute import DEFAULT_BUCKET_BYTES, Traffic, connect
from megatron_bridge.families import Architecture
from megatron_bridge.files import MappedFile, close_files, tensor_files, write_index, writing
from megatron_bridge.folders import Carried, NewFolder, together
from megatron_bridge.layouts import Layout
from megatron_bridge.prediction import copy_predictions


def export_hf(
    folder: str | Path,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    *,
    rank: int,
    source: str | Path,
    dtype: torch.dtype | None = None,
    tokenizer: str | Path | None = None,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    file_bytes: int = DEFAULT_FILE_BYTES,
) -> Traffic:
    """Write a layout's weights as a model folder; every rank of the group calls it with its own tensors.

    `source` is the folder the model came from: its config and generation settings are carried over, and the tokenizer
    files of `tokenizer` (by default the same folder). `dtype` None keeps the dtype of each of the source's tensors.
    Written beside as `<folder>.partial`, which all ranks must see, and renamed at the end; an older export under the
    name is replaced. Nothing is left of a folder that is not finished. Raises UserError for a broken source or a target
    that holds anything but a model.
    """
    carried = Carried(Path(source), Path(tokenizer or source))
    new = NewFolder(Path(folder), (carried.source, carried.tokenizer), overwrite=True)
    lead = rank == layout.ranks[0]
    contents = together(lambda: _contents(layout, Path(source), dtype, file_bytes), group)
    together(lambda: begin_hf(new, carried, contents) if lead else None, group)
    with new.whole_or_nothing(lead):
        mapped = together(lambda: _map_files(contents, new.partial, rank), group)
        traffic = connect(
            layout,
            tensors,
            contents.layout,
            {name: tensor for file in mapped for name, tensor in file.tensors.items()},
            rank=rank,
            dtype=contents.sent,
            group=group,
            bucket_bytes=bucket_bytes,
        ).run()
        together(lambda: close_files(mapped), group)
        together(lambda: finish_hf(new, carried, contents, dtype) if lead else None, group)
    return traffic


def exported_bytes(source: str | Path, arch: Architecture) -> int:
    """Bytes of the weights that `export_hf` writes of a model that came from `source`, in the dtypes that it has there.

    Raises UserError for a broken source.
    """
    names = names_of(source, arch)
    dtypes = dtypes_in(names, *open_source(source, arch))
    return sum(prod(param.shape) * dtypes[name].itemsize for name, param in names.parameters(names.ranks[0]).items())


def _contents(layout: Layout, source: Path, dtype: torch.dtype | None, file_bytes: int) -> Contents:
    names = names_of(source, layout.arch)
    dtypes = dtypes_in(names, *open_source(source, layout.arch)) if dtype is None else cast_dtypes(names, dtype)
    return plan_contents(layout, names, dtypes, file_bytes)


def _map_files(contents: Contents, partial: Path, rank: int) -> list[MappedFile]:
    return [MappedFile(partial / file.name, contents.of(file)) for file in contents.files if file.owner == rank]


def begin_hf(new: NewFolder, carried: Carried, contents: Contents) -> None:
    """Make ready for the files of a folder; UserError if they cannot be written or what is carried over is broken."""
    new.check()
    carried.check()
    new.begin(contents.nbytes)


def finish_hf(new: NewFolder, carried: Carried, contents: Contents, dtype: torch.dtype | None) -> None:
    """Write the index, what is carried over, and give the folder its name."""
    with writing(new.partial):
        wanted = contents.shapes.keys() | copy_predictions(carried.source, new.partial, contents.layout)
        if len(list(new.partial.glob("*.safetensors"))) > 1:
            write_index(new.partial)
        written = set(tensor_files(new.partial))
        if written != wanted:
            raise RuntimeError(f"{new.partial} lacks or adds tensors: {sorted(written ^ wanted)[:8]}")
        carried.copy(new.partial, dtype)
        new.publish()
