"""Checkpoint folders of a run: which are complete, how one becomes visible, which old ones go.

A step is written into `step_000010.partial` and renamed when everything in it is durable; the manifest, written last,
lists every file with its size, so that a folder that lost a file is never taken. What is inside is left to `store`.
"""

import json
import logging
import os
import shutil
from pathlib import Path

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
PARTIAL = ".partial"


def folder_of(root: Path, step: int) -> Path:
    return root / f"step_{step:06d}"


def begin(root: Path, step: int) -> Path:
    """An empty folder to write step `step` into; what an interrupted save left there is removed. One rank calls it."""
    partial = folder_of(root, step).with_suffix(PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, step: int) -> Path:
    """Write the manifest and rename the folder, so that it is visible only when complete. One rank, after all wrote."""
    files = {path.relative_to(partial).as_posix(): path.stat().st_size for path in partial.rglob("*") if path.is_file()}
    manifest = partial / MANIFEST
    with manifest.open("w") as file:
        json.dump({"step": step, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    final = partial.with_suffix("")
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    return final


def fault(folder: Path) -> str | None:
    """Why a checkpoint folder cannot be used, or None."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"it has no {MANIFEST}"
    for name, size in json.loads(manifest.read_text())["files"].items():
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
    """The newest complete step; a newer folder that is broken is passed over with a warning that says why."""
    for step in reversed(steps(root)):
        reason = fault(folder_of(root, step))
        if reason is None:
            return step
        log.warning("checkpoint %s is passed over: %s", folder_of(root, step), reason)
    return None


def retain(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` steps (0: keep all). Called after the newest one is visible."""
    for step in steps(root)[:-keep] if keep else []:
        shutil.rmtree(folder_of(root, step))
