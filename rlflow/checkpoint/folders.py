"""Checkpoint folders of a run: which are complete, how one becomes visible, which old ones go.

A step is written into `step_000010.partial` and renamed when everything in it is durable; the manifest, written last,
lists every file with its size, so that a folder that lost a file is never taken. What is inside is left to `store`.
"""

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_bridge.folders import sync_to_disk
from rlflow.errors import UserError

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
PARTIAL, REPLACED = ".partial", ".replaced"


def folder_of(root: Path, step: int) -> Path:
    return root / f"step_{step:06d}"


def begin(root: Path, step: int) -> Path:
    """An empty folder to write step `step` into; what an interrupted save left there is removed. One rank calls it."""
    partial = folder_of(root, step).with_suffix(PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def remove_unfinished(root: Path) -> None:
    """Remove what interrupted saves left, which may be what fills the disk. One rank, before the job saves anything."""
    for partial in root.glob(f"step_*{PARTIAL}"):
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def removed_on_failure(partial: Path) -> Iterator[None]:
    """While a step is written: what ends this early, on any rank, removes the folder."""
    try:
        yield
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def publish(partial: Path, step: int) -> Path:
    """Write the manifest and rename the folder, so that it is visible only when complete. One rank, after all wrote.

    A folder that has the name already goes only when the new one is there.
    """
    written = [path for path in partial.rglob("*") if path.is_file()]
    manifest = partial / MANIFEST
    files = {path.relative_to(partial).as_posix(): path.stat().st_size for path in written}
    manifest.write_text(json.dumps({"step": step, "files": files}, indent=1))
    for path in (*written, manifest, partial):
        sync_to_disk(path)
    final = partial.with_suffix("")
    replaced = final.with_suffix(REPLACED)
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync_to_disk(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def fault(folder: Path) -> str | None:
    """Why a checkpoint folder cannot be used, or None."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"it has no {MANIFEST}"
    try:
        files = json.loads(manifest.read_text())["files"]
    except (ValueError, KeyError):
        return f"its {MANIFEST} is broken"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def steps(root: Path) -> list[int]:
    """Steps with a folder under its final name, oldest first, complete or not."""
    found = [path.name.removeprefix("step_") for path in root.glob("step_*") if path.is_dir()]
    return sorted(int(number) for number in found if number.isdigit())


def latest(root: Path) -> int | None:
    """The newest complete step, None where there are no checkpoints; newer broken ones are passed over with a warning.

    UserError where there are checkpoints of which none is complete: to start anew would write over what may be mended.
    """
    faults: dict[Path, str] = {}
    for step in reversed(steps(root)):
        folder = folder_of(root, step)
        reason = fault(folder)
        if reason is None:
            for broken, why in faults.items():
                log.warning("checkpoint %s is passed over: %s", broken, why)
            return step
        faults[folder] = reason
    if faults:
        newest, reason = next(iter(faults.items()))
        advice = "remove them, take another trainer.output_dir, or give another checkpoint's folder as trainer.resume"
        raise UserError("trainer.resume", f"{root} has checkpoints, none complete; {newest.name}: {reason}; {advice}")
    return None


def retain(root: Path, keep: int, newest: int) -> None:
    """Of the steps up to `newest`, which is visible, remove all but the last `keep` complete ones (0: keep all).

    Later steps are left alone: a run that went on from an earlier checkpoint must not take one of them for its newest.
    """
    past = [step for step in steps(root) if step <= newest] if keep else []
    kept = [step for step in past if fault(folder_of(root, step)) is None][-keep:]
    for step in past:
        if step not in kept:
            shutil.rmtree(folder_of(root, step))
