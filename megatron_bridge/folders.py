"""What a model folder holds besides its weights, and how a new folder comes into being.

A folder is written beside as `<name>.partial` and renamed when it is whole, so that no name ever stands for a part of a
model; what is unfinished has a marker, and nothing without one is removed. Config, tokenizer and generation settings
are carried over byte for byte. Weights are left to `files` and `distcp_writer`.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_bridge.errors import UserError
from megatron_bridge.families import read_json
from megatron_bridge.lock import release_lock, take_lock

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer*", "*.tiktoken", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "*.jinja", "spiece.model",
)  # fmt: skip
MARKER = ".unfinished_by_megatron_bridge"  # in what a conversion has not finished, and may remove
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


@dataclass
class NewFolder:
    """A folder to be written, which may replace an older model but never anything else, nor one of `sources`.

    One rank calls `begin`, `publish` and `discard`; any writes into `partial` between them. From its begin to its end
    no other process can begin the same folder.
    """

    target: Path
    sources: Sequence[Path]
    overwrite: bool = False
    _lock: int | None = field(default=None, init=False, repr=False)

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
        if self.target.name in ("", ".."):
            raise UserError(self.target, "gives the new folder no name: name the folder that is to be made")
        for left in (self.partial, self.replaced):
            self._check_not_read(left, "would be removed")
            _check_leftover(left)
        if self.target.is_symlink():
            raise UserError(self.target, "is a link: give the folder itself")
        if not self.target.exists():
            return
        if not self.target.is_dir():
            raise UserError(self.target, "is a file; a new folder is to be written there")
        self._check_not_read(self.target, "would be replaced")
        if not self.overwrite:
            raise UserError(self.target, "exists already: give another target, or --overwrite to replace it")
        _check_removable(self.target)

    def _check_not_read(self, folder: Path, fate: str) -> None:
        for source in self.sources:
            if folder.resolve() in (source.resolve(), *source.resolve().parents):
                raise UserError(folder, f"{fate}, but it is read from: give another target")

    def begin(self, needed: int) -> None:
        """Make the empty partial folder, without what an interrupted run left there.

        UserError if another process writes the folder, the disk has less than `needed` bytes free, or nothing can be
        written there.
        """
        self.check()
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self.target)
        except OSError as error:
            raise UserError(self.target.parent, f"cannot be written to: {error.strerror}") from error
        try:
            self.check()  # again: who had the lock may just have finished
            _remove(self.partial)
            self._make_partial()
        except BaseException:
            self._release()
            raise
        try:
            self.check_space(needed)
        except UserError:
            self.discard()
            raise

    def _make_partial(self) -> None:
        try:
            self.partial.mkdir()
            (self.partial / MARKER).touch()
        except OSError as error:
            raise UserError(self.target.parent, f"cannot be written to: {error.strerror}") from error

    def check_space(self, needed: int) -> None:
        """UserError if the disk of the folder has less than `needed` bytes free."""
        if needed > (free := self.free):
            raise UserError(self.target, f"needs {show_bytes(needed)}, but {show_bytes(free)} are free there")

    @property
    def free(self) -> int:
        """Bytes free on the disk of the folder."""
        return free_bytes(self.partial)

    def publish(self) -> None:
        """Give the folder its name; an older one that has it goes only then."""
        make_durable(self.partial)
        _check_leftover(self.replaced)
        _remove(self.replaced)
        if self.target.exists():
            _check_removable(self.target)
            (self.target / MARKER).touch()  # before it moves: where this fails it stays what it was
            self.target.rename(self.replaced)
        (self.partial / MARKER).unlink()
        self.partial.rename(self.target)
        sync_to_disk(self.target.absolute().parent)
        _remove(self.replaced)
        self._release()

    def discard(self) -> None:
        """Remove what was written, unless the folder has been published."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                _remove(self.partial)
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            release_lock(self.target, self._lock)
            self._lock = None

    @contextlib.contextmanager
    def whole_or_nothing(self, lead: bool) -> Iterator[None]:
        """While the folder is written, from its begin on: what ends this early removes it, on the rank that leads."""
        try:
            yield
        except BaseException:
            if lead:
                self.discard()
            raise


def free_bytes(folder: Path) -> int:
    """Free on the disk of a folder, which need not exist so far."""
    places = (folder.absolute(), *folder.absolute().parents)
    return shutil.disk_usage(next(place for place in places if place.exists())).free


def show_bytes(size: int) -> str:
    """A size as people write it, in powers of 1,000."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


def _check_leftover(folder: Path) -> None:
    """UserError for what is in the way and was not left by a conversion that was interrupted."""
    if not os.path.lexists(folder):
        return
    what = "a link" if folder.is_symlink() else "a folder" if folder.is_dir() else "a file"
    if what != "a folder" or (not (folder / MARKER).is_file() and any(folder.iterdir())):
        raise UserError(
            folder, f"is {what} in the way that no conversion left: move or remove it, or give another target"
        )
    _check_removable(folder)


def _check_removable(folder: Path) -> None:
    """UserError for a folder that holds anything but a model, or what was written of one."""
    patterns = (*TOKENIZER_FILES, CONFIG, GENERATION, *WEIGHTS, MARKER)
    ours = {path for pattern in patterns for path in folder.glob(pattern)}
    if foreign := sorted(path.name for path in folder.iterdir() if path not in ours):
        raise UserError(folder, f"holds files that are no part of a model: {', '.join(foreign[:8])}")


def _remove(folder: Path) -> None:
    """Remove a leftover, if there is one; its marker goes last, so that what is left of it can still be told."""
    if not folder.exists():
        return
    for path in folder.iterdir():
        if path.name != MARKER:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (folder / MARKER).unlink(missing_ok=True)
    folder.rmdir()


def make_durable(folder: Path) -> None:
    """Have a folder's names, and the content of the files in it, on the disk."""
    for path in (path for path in folder.iterdir() if path.is_file()):
        sync_to_disk(path)
    sync_to_disk(folder)


def sync_to_disk(path: Path) -> None:
    """Have a file's content, or a folder's names, on the disk."""
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
