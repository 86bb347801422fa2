"""What a model folder holds besides its weights, and how a new folder comes into being.

A folder is written beside as `<name>.partial` and renamed when it is whole, so that no name ever stands for a part of a
model. Config, tokenizer and generation settings are carried over byte for byte. Weights are left to `files` and
`distcp_writer`.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_bridge.errors import UserError
from megatron_bridge.families import read_json

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer*", "*.tiktoken", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "*.jinja", "spiece.model",
)  # fmt: skip
NAMES = "hf_names.json"  # in a Megatron folder: how Hugging Face's files named its tensors
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "iter_0000000", "latest_checkpointed_iteration.txt", NAMES)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Carried:
    """The files that a new folder takes over from the model's folder and the tokenizer's."""

    source: Path
    tokenizer: Path

    def files(self) -> list[Path]:
        """Generation settings and tokenizer files, as far as they exist."""
        beside = [self.source / GENERATION] if (self.source / GENERATION).exists() else []
        found = {path for pattern in TOKENIZER_FILES for path in self.tokenizer.glob(pattern)}
        return beside + sorted(path for path in found if path.is_file())

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


@dataclass(frozen=True)
class NewFolder:
    """A folder to be written, which may replace an older model but never anything else, nor one of `sources`.

    One rank calls `begin`, `publish` and `discard`; any writes into `partial` between them.
    """

    target: Path
    sources: Sequence[Path]
    overwrite: bool = False

    @property
    def partial(self) -> Path:
        """Where the files go until the folder is whole."""
        return Path(f"{self.target}.partial")

    @property
    def replaced(self) -> Path:
        """Where an older folder of the name waits until the new one has it."""
        return Path(f"{self.target}.replaced")

    def check(self) -> None:
        """UserError if the target may not be written; touches nothing."""
        for left in (self.partial, self.replaced):
            if left.exists():
                _check_removable(left)
        if self.target.is_symlink():
            raise UserError(self.target, "is a link: give the folder itself")
        if not self.target.exists():
            return
        if not self.target.is_dir():
            raise UserError(self.target, "is a file; a new folder is to be written there")
        for source in self.sources:
            if self.target.resolve() in (source.resolve(), *source.resolve().parents):
                raise UserError(self.target, "would be replaced, but it is read from: give another target")
        if not self.overwrite:
            raise UserError(self.target, "exists already: give another target, or --overwrite to replace it")
        _check_removable(self.target)

    def begin(self, needed: int) -> None:
        """Make the empty partial folder, without what an interrupted run left there.

        UserError if the disk has less than `needed` bytes free, or nothing can be written there.
        """
        self.check()
        try:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
        except OSError as error:
            raise UserError(self.target.parent, f"cannot be written to: {error.strerror}") from error
        try:
            self.check_space(needed)
        except UserError:
            self.discard()
            raise

    def check_space(self, needed: int) -> None:
        """UserError if the disk of the folder has less than `needed` bytes free."""
        if needed > (free := self.free):
            raise UserError(self.target, f"needs {needed / 1e9:,.2f} GB, but {free / 1e9:,.2f} GB are free there")

    @property
    def free(self) -> int:
        """Bytes free on the disk of the folder."""
        places = (self.partial.absolute(), *self.partial.absolute().parents)
        return shutil.disk_usage(next(place for place in places if place.exists())).free

    def publish(self) -> None:
        """Give the folder its name; an older one that has it goes only then."""
        make_durable(self.partial)
        shutil.rmtree(self.replaced, ignore_errors=True)
        if self.target.exists():
            self.target.rename(self.replaced)
        self.partial.rename(self.target)
        _sync(self.target.absolute().parent)
        shutil.rmtree(self.replaced, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.partial, ignore_errors=True)

    @contextlib.contextmanager
    def whole_or_nothing(self, lead: bool) -> Iterator[None]:
        """While the folder is written, from its begin on: what ends this early removes it, on the rank that leads."""
        try:
            yield
        except BaseException:
            if lead:
                self.discard()
            raise


def _check_removable(folder: Path) -> None:
    """UserError for a folder that holds anything but a model, or what was written of one."""
    patterns = (*TOKENIZER_FILES, CONFIG, GENERATION, *WEIGHTS)
    ours = {path for pattern in patterns for path in folder.glob(pattern)}
    if foreign := sorted(path.name for path in folder.iterdir() if path not in ours):
        raise UserError(folder, f"holds files that are no part of a model: {', '.join(foreign[:8])}")


def make_durable(folder: Path) -> None:
    """Have a folder's names, and the content of the files in it, on the disk."""
    for path in (path for path in folder.iterdir() if path.is_file()):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
