"""A layout's weights out into a new Hugging Face model folder.

The weights travel as any transfer does, each rank receiving the tensors of the files it writes straight into their
maps. Besides them an export carries over what belongs to the model, config, tokenizer and generation settings, byte for
byte. The folder appears under its name only when it is whole, and a failure of one rank is raised on all.
"""

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.checkpoints import name_faults, source_dtypes
from megatron_bridge.errors import UserError
from megatron_bridge.execute import DEFAULT_BUCKET_BYTES, Traffic, connect
from megatron_bridge.families import read_json
from megatron_bridge.files import SINGLE, MappedFile, close_files, tensor_files, write_index
from megatron_bridge.layouts import HFLayout, Layout, Unit
from megatron_bridge.layouts.layout import HEAD, raise_faults

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer*", "*.tiktoken", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "*.jinja", "spiece.model",
)  # fmt: skip
REPLACEABLE = (*TOKENIZER_FILES, CONFIG, GENERATION, "*.safetensors", "*.safetensors.index.json")
DEFAULT_FILE_BYTES = 4 * 2**30
Result = TypeVar("Result")


class File(NamedTuple):
    """A file of an export: its name, the rank that writes it, and the units in it."""

    name: str
    owner: int
    units: tuple[Unit, ...]


@dataclass(frozen=True)
class Contents:
    """What an export holds: the dtype of each tensor, the files, and the layout they amount to."""

    dtypes: Mapping[str, torch.dtype]
    files: tuple[File, ...]
    layout: HFLayout

    def shapes(self, file: File) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor of a file."""
        return {
            unit.prefix + param.name: (param.shape, self.dtypes[unit.prefix + param.name])
            for unit in file.units
            for param in self.layout.params(unit.kind, 0)
        }


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
    name is replaced. Raises UserError for a broken source or a target that holds anything but a model.
    """
    target, partial = Path(folder), Path(f"{folder}.partial")
    carried = Carried(Path(source), Path(tokenizer or source))
    lead = rank == layout.ranks[0]
    contents = together(lambda: plan_contents(layout, Path(source), dtype, file_bytes), group)
    together(lambda: _prepare(target, partial, carried) if lead else None, group)
    mapped = together(lambda: _map_files(contents, partial, rank), group)
    traffic = connect(
        layout,
        tensors,
        contents.layout,
        {name: tensor for file in mapped for name, tensor in file.tensors.items()},
        rank=rank,
        dtype=reduce(torch.promote_types, contents.dtypes.values()),
        group=group,
        bucket_bytes=bucket_bytes,
    ).run()
    together(lambda: close_files(mapped), group)
    together(lambda: _finish(target, partial, carried, contents, dtype) if lead else None, group)
    return traffic


def together(action: Callable[[], Result], group: dist.ProcessGroup | None) -> Result:
    """The result of an action that every rank runs; a failure on any rank raises on all, so that none waits for it."""
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    failures: list[Exception | None] = [failure]
    if dist.is_initialized():
        told: Exception | None = failure
        if failure is not None and not isinstance(failure, UserError):
            told = RuntimeError(f"rank {dist.get_rank(group)} failed: {failure!r}")
        failures = [None] * dist.get_world_size(group)
        dist.all_gather_object(failures, told, group=group)
    for raised in (failure, *failures):
        if raised is not None:
            raise raised
    return result


def plan_contents(layout: Layout, source: Path, dtype: torch.dtype | None, file_bytes: int) -> Contents:
    """The files of an export: at most `file_bytes` each unless one unit is larger, each written by a rank near it."""
    held = source_dtypes(source, layout.arch)
    raise_faults(str(source), name_faults(held, layout.arch))
    whole = HFLayout(layout.arch, (0,), tied_head=f"{HEAD}weight" in held)
    dtypes = {name: dtype or held[name] for name in whole.parameters(0)}
    groups = list(_fill_files(whole, dtypes, file_bytes))
    owners = _owners(layout, groups)
    names = [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    if len(groups) == 1:
        names = [SINGLE]
    files = tuple(File(*file) for file in zip(names, owners, groups, strict=True))
    of_unit = tuple(file.owner for file in files for _ in file.units)
    return Contents(dtypes, files, replace(whole, ranks=tuple(sorted(set(owners))), owners=of_unit))


def _fill_files(whole: HFLayout, dtypes: Mapping[str, torch.dtype], file_bytes: int) -> Iterator[tuple[Unit, ...]]:
    units: list[Unit] = []
    filled = 0
    for unit in whole.all_units:
        params = whole.params(unit.kind, 0)
        size = sum(prod(param.shape) * dtypes[unit.prefix + param.name].itemsize for param in params)
        if units and filled + size > file_bytes:
            yield tuple(units)
            units, filled = [], 0
        units.append(unit)
        filled += size
    yield tuple(units)


def _owners(layout: Layout, groups: Sequence[tuple[Unit, ...]]) -> list[int]:
    """A writer for each file: of the ranks that hold its first unit, the one with the fewest files."""
    holders: dict[str, list[int]] = defaultdict(list)
    for rank in layout.ranks:
        for unit in layout.units(rank):
            holders[unit.canonical].append(rank)
    files: Counter[int] = Counter()
    owners = []
    for units in groups:
        owner = min(holders[units[0].canonical], key=lambda rank: (files[rank], rank))
        files[owner] += 1
        owners.append(owner)
    return owners


@dataclass(frozen=True)
class Carried:
    """The files that an export takes over from the model's folder and the tokenizer's."""

    source: Path
    tokenizer: Path

    def files(self) -> list[Path]:
        """Generation settings and tokenizer files, as far as they exist."""
        beside = [self.source / GENERATION] if (self.source / GENERATION).exists() else []
        return beside + sorted({path for pattern in TOKENIZER_FILES for path in self.tokenizer.glob(pattern)})

    def check(self) -> None:
        """UserError for a file of broken JSON: it would be copied as it is."""
        for path in (self.source / CONFIG, *self.files()):
            if path.suffix == ".json":
                read_json(path)

    def copy(self, folder: Path, dtype: torch.dtype | None) -> None:
        """Copy everything byte for byte; only a config that names another dtype than `dtype` is written anew."""
        for path in self.files():
            shutil.copyfile(path, folder / path.name)
        config = read_json(self.source / CONFIG)
        named = {key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in config}
        if dtype is None or named.items() <= config.items():
            shutil.copyfile(self.source / CONFIG, folder / CONFIG)
        else:
            (folder / CONFIG).write_text(json.dumps(config | named, indent=2) + "\n", encoding="utf-8")


def _prepare(target: Path, partial: Path, carried: Carried) -> None:
    if target.exists():
        if target.resolve() in (carried.source.resolve(), carried.tokenizer.resolve()):
            raise UserError(target, "an export would replace the folder that it reads from")
        ours = {path for pattern in REPLACEABLE for path in target.glob(pattern)}
        if foreign := sorted(path.name for path in target.iterdir() if path not in ours):
            raise UserError(target, f"holds files that are no part of a model: {', '.join(foreign[:8])}")
    carried.check()
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _map_files(contents: Contents, partial: Path, rank: int) -> list[MappedFile]:
    return [MappedFile(partial / file.name, contents.shapes(file)) for file in contents.files if file.owner == rank]


def _finish(target: Path, partial: Path, carried: Carried, contents: Contents, dtype: torch.dtype | None) -> None:
    if len(contents.files) > 1:
        write_index(partial)
    written = set(tensor_files(partial))
    if written != set(contents.dtypes):
        raise RuntimeError(f"{partial} lacks or adds tensors: {sorted(written ^ set(contents.dtypes))[:8]}")
    carried.copy(partial, dtype)
    replaced = Path(f"{target}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
