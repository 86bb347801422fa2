"""Fits the calibration of `rlflow.inspect` to measured peaks, and says how far predictions are from them.

A measurement is what was run and the GiB of each of its phases, as `tools.gpu.memory` takes and writes it. No GPU is
needed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from megatron_bridge.families import Architecture, load_architecture
from megatron_bridge.score import with_score_head
from rlflow.config.load import interpret
from rlflow.config.roles import role_sections
from rlflow.config.schema import Config
from rlflow.inspect.calibration import GIB, Calibration
from rlflow.inspect.memory import Peak, predict
from tools.gpu.shapes import SHAPES

ROUNDS = 4
"""Of fitting: what a phase's peak consists of depends on the coefficients."""

TRUST = 1e-4
"""In the analysis: what it costs to double a coefficient, beside the squares of relative errors."""


@dataclass(frozen=True)
class Measured:
    """Peaks of one configuration; all of its roles have models of one shape."""

    what: str
    shape: str  # of `tools.gpu.shapes`
    config: dict[str, dict[str, Any]]  # the keys that are not at their defaults
    with_rollout: bool
    gib: dict[str, float]  # by phase

    def run(self) -> Config:
        """The configuration."""
        config, faults = interpret({"model": {"path": self.shape}, **self.config})
        if faults:
            raise ValueError(f"{self.what}: {'; '.join(str(fault) for fault in faults)}")
        return config

    def peaks(self, calibration: Calibration) -> dict[str, Peak]:
        """What is predicted of each phase that was measured, as far as it is."""
        config = self.run()
        policy = architecture(self.shape)
        models = {name: with_score_head(policy) if name == "critic" else policy for name in role_sections(config)}
        found = predict(config, models, 1, calibration, with_rollout=self.with_rollout)
        return {phase: found[phase] for phase in self.gib if phase in found}

    def errors(self, calibration: Calibration) -> dict[str, float]:
        """By how much of what was measured the prediction of each phase is above it."""
        peaks = self.peaks(calibration)
        return {phase: peak.total(calibration) / GIB / self.gib[phase] - 1 for phase, peak in peaks.items()}

    def largest_error(self, calibration: Calibration) -> float:
        """Of its phases, without a sign."""
        return max(map(abs, self.errors(calibration).values()), default=0.0)


def architecture(shape: str) -> Architecture:
    """Of a random model of `tools.gpu.shapes`, without its folder."""
    return load_architecture({"model_type": "qwen2", "max_position_embeddings": 32_768, **asdict(SHAPES[shape])})


def fit(measured: Sequence[Measured]) -> Calibration:
    """The coefficients with the least squares of relative errors; those that nothing tells of stay the analysis's."""
    calibration = Calibration()
    for _ in range(ROUNDS):
        calibration = _solved(measured, calibration)
    return calibration


def _solved(measured: Sequence[Measured], calibration: Calibration) -> Calibration:
    """One linear problem: what each peak consists of is taken to be as it is with the given coefficients."""
    names = [item.name for item in fields(Calibration)]
    defaults = np.array([getattr(Calibration(), name) for name in names])
    rows, wanted = [], []
    for one in measured:
        for phase, peak in one.peaks(calibration).items():
            shares = dict.fromkeys(("", *names), 0.0)
            for part in peak.parts:
                shares[part.coefficient] += part.nbytes / (one.gib[phase] * GIB)
            wanted.append(1 - shares.pop(""))
            rows.append(list(shares.values()))
    trust = TRUST**0.5
    matrix = np.vstack([np.array(rows).reshape(-1, len(names)), np.diag(trust / defaults)])
    found, *_ = np.linalg.lstsq(matrix, np.concatenate([wanted, np.full(len(names), trust)]), rcond=None)
    return Calibration(*(round(max(float(value), 0.0), 4) for value in found))


def errors_left_out(measured: Sequence[Measured]) -> list[float]:
    """The largest error of each configuration when the coefficients are fitted to all others."""
    return [one.largest_error(fit([other for other in measured if other is not one])) for one in measured]
