"""What the memory of a run depends on that cannot be counted: coefficients that were fitted to measured peaks.

They lie in `calibration.json` beside this file, with the measurements that they come from; `tools.gpu.memory` makes
both. Without measurements they are those of the analysis, stated here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlflow.errors import UserError

FILE = Path(__file__).with_name("calibration.json")
GIB = 2**30


@dataclass(frozen=True)
class Calibration:
    """Factors of what `memory` counts, 1 where a count is exact, and sizes in GiB of what it cannot count."""

    libraries: float = 0.6  # GiB: CUDA's context, cuBLAS's workspace, kernels
    kept: float = 1.0  # activations for the backward pass
    passing: float = 1.0  # activations of a layer in a forward that keeps nothing
    gradients: float = 1.0  # activations' gradients in a layer's backward pass
    logits: float = 1.0
    rollout: float = 1.0  # GiB: what vLLM holds besides weights and cache, its CUDA graphs among them, also asleep
    sampling: float = 1.0  # logits, on which vLLM's sampler works in place
    prefill: float = 1.0  # activations of a layer in vLLM's forward over prompts


def load_calibration(path: Path = FILE) -> Calibration:
    """The coefficients of a file; those that it does not name are the analysis's. UserError for what is none."""
    found = read(path)["coefficients"]
    if unknown := set(found) - {item.name for item in fields(Calibration)}:
        known = ", ".join(item.name for item in fields(Calibration))
        raise UserError(path, f"coefficients {', '.join(sorted(unknown))} are unknown; there are {known}")
    return Calibration(**found)


def read(path: Path = FILE) -> dict[str, Any]:
    """`coefficients`, the `measurements` that they were fitted to, and where these were made."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(path, f"cannot be read: {error}") from error
    if not isinstance(content, dict) or not {"coefficients", "measurements"} <= content.keys():
        raise UserError(path, "must hold coefficients and measurements")
    return content
