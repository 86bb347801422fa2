"""A whole step of GRPO in `rlflow train` on one GPU, its phases beside a roofline.

    python -m tools.gpu.whole_step [--shapes 0.5b 1.5b] [--steps 3] [section.key=value …]

128 prompts of 256 tokens, 8 responses to each of exactly 1,024, one optimizer step, random weights. The first step of a
run warms up and does not count. 1.5b takes about 3 minutes, 0.5b half of that; overrides go to `rlflow train`.

The roofline is that of GRPO without a pass for old log-probs, all arithmetic at .45 of the GPU's peak and all traffic
at .8 of its bandwidth, one after the other: prompts computed once for generation; decoding's products and attention,
and its reading of the weights in each step and of every sequence's keys and values; training on all tokens, each
response with its prompt.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlflow.tracking.records import Record
from tools.gpu.machine import require_gpu
from tools.gpu.report import emit
from tools.gpu.runs import (
    MODELS,
    deadline,
    folder_of_runs,
    medians,
    parser_of_runs,
    prompts,
    steps_of,
    succeeds,
    train,
    write_config,
)
from tools.gpu.shapes import PEAK_FLOPS, SHAPES, Shape, save

PEAK_BANDWIDTH = 4.8e12
"""Bytes a second of an H200's memory, by its datasheet."""
REACHED_FLOPS, REACHED_BANDWIDTH = 0.45 * PEAK_FLOPS, 0.8 * PEAK_BANDWIDTH
TARGET = 1.5
"""Times the roofline that a step may take."""
STEPS = {"0.5b": 3, "1.5b": 2}
"""Of a run, with the one that warms up."""
ACTOR = {"micro_batch_tokens": 2 * (256 + 8 * 1024), "logprob_chunk_tokens": 2 * 8 * 1024, "cuda_graphs": True}
"""Two prompts with all their responses fill a micro-batch, and all its logits exist at once."""


@dataclass(frozen=True)
class Work:
    """What a step samples and learns from."""

    prompts: int = 128
    n: int = 8
    prompt: int = 256  # tokens
    response: int = 1024  # tokens

    @property
    def samples(self) -> int:
        return self.prompts * self.n

    @property
    def sampled(self) -> int:
        """Tokens sampled in a step."""
        return self.samples * self.response

    @property
    def tokens(self) -> int:
        """Tokens trained on, prompts once for each response."""
        return self.samples * (self.prompt + self.response)


WORK = Work()


def roofline(shape: Shape, work: Work) -> dict[str, float]:
    """Seconds of each part of a step of `work`, by the phase that it belongs to."""
    mean_context = work.prompt + work.response / 2  # of a sampled token
    # A token of such a context among the keys of a sequence twice as long, of which the mean token sees half.
    decoded_flops = shape.forward_flops(round(2 * mean_context), work.sampled)
    decoded_bytes = shape.decoding_bytes(work.samples, work.prompt, work.response)
    return {
        "generate/prompts": shape.forward_flops(work.prompt, work.prompts * work.prompt) / REACHED_FLOPS,
        "generate/products": decoded_flops / REACHED_FLOPS,
        "generate/memory": decoded_bytes / REACHED_BANDWIDTH,
        "update/products": 3 * shape.forward_flops(work.prompt + work.response, work.tokens) / REACHED_FLOPS,
    }


def of_phase(parts: dict[str, float], phase: str) -> float:
    """Seconds of a phase, or of a whole step for "step"."""
    return sum(seconds for name, seconds in parts.items() if phase in ("step", name.split("/")[0]))


def sections(work: Work, steps: int) -> dict[str, dict[str, Any]]:
    """What the configuration of a run says of the work, and how the GPU is used for it."""
    return {
        "actor": ACTOR,
        "rollout": {
            "n": work.n, "max_prompt_length": work.prompt, "max_response_length": work.response, "ignore_eos": True,
            "max_num_seqs": work.samples, "kv_cache_gib": 48.0,  # no more is taken than so many sequences fill
        },
        "bridge": {"startup_proof": False},  # `tools.gpu.works` has it
        "trainer": {"steps": steps, "prompts_per_step": work.prompts},
    }  # fmt: skip


def report(name: str, steps: Sequence[Record], work: Work) -> None:
    """Print the phases of a run as a table, and what it measured."""
    shape, seen = SHAPES[name], medians(steps)
    bounds = roofline(shape, work)
    phases = {key.removeprefix("time/"): value for key, value in seen.items() if key.startswith("time/")}
    Console(width=100, highlight=False).print(table(name, phases, bounds, seen))
    for phase, target in (("step", TARGET), ("generate", None), ("update", None)):
        bound = of_phase(bounds, phase)
        emit(
            "whole_step", f"{name} {phase}", phases[phase], "s", bound=round(bound, 2), against="s roofline",
            target=None if target is None else round(target * bound, 2), more_is_better=False,
            details=details(phase, phases, seen, shape, work) | {"times": round(phases[phase] / bound, 3)},
        )  # fmt: skip
    rest = phases["step"] - phases["generate"] - phases["update"]
    emit("whole_step", f"{name} rest of the step", rest, "s", target=round(0.05 * phases["step"], 3),
         more_is_better=False, details={key: round(phases[key], 4) for key in ("sync", "exchange", "score", "other")
                                        if key in phases})  # fmt: skip


def details(phase: str, phases: dict[str, float], seen: Record, shape: Shape, work: Work) -> dict[str, Any]:
    """What else is told of a phase."""
    if phase == "generate":
        return {"tokens/s": round(work.sampled / phases["generate"])}
    if phase == "update":
        flops = 3 * shape.forward_flops(work.prompt + work.response, work.tokens)
        # Prompts are computed once for their responses: this counts work that was saved, as the roofline does.
        return {"MFU as if no prompt were shared": round(flops / phases["update"] / PEAK_FLOPS, 3)}
    peaks = {key: value for key, value in seen.items() if key.startswith("memory/")}
    told = {"tokens/s": round(work.sampled / phases["step"]), "peak_gib": round(max(peaks.values(), default=0.0), 1)}
    names = ("mismatch/log_prob_mean", "mismatch/kl", "actor/grad_norm", "train/reward")
    return told | {key: float(f"{seen[key]:.4g}") for key in names if key in seen}


def table(name: str, phases: dict[str, float], bounds: dict[str, float], seen: Record) -> Table:
    """Phases in the order of their time, their parts too."""
    shown = Table("phase", title=f"{name}: seconds of a step", title_justify="left")
    for column in ("seconds", "share", "roofline", "times", "peak GiB"):
        shown.add_column(column, justify="right")
    for phase, seconds in sorted(phases.items(), key=lambda entry: -entry[1]):
        bound, peak = of_phase(bounds, phase), seen.get(f"memory/{phase}_gib")
        shown.add_row(
            phase, f"{seconds:.3f}", f"{seconds / phases['step']:.1%}", f"{bound:.2f}" if bound else "",
            f"{seconds / bound:.2f}" if bound else "", "" if peak is None else f"{peak:.1f}",
        )  # fmt: skip
    return shown


def measure(
    name: str, model: Path, folder: Path, overrides: Sequence[str], *, steps: int, until: float, work: Work = WORK
) -> bool:
    """Run a shape and report it, also where the run was cut off behind its second step; whether it ended well."""
    texts = prompts(work.prompts * steps, work.prompt)
    config = write_config(folder / name, save(model, name), texts, sections(work, steps))
    good = train(config, overrides, until=until)
    done = steps_of(config)
    if len(done) > 1 or (good and done):
        print(f"{name}: seconds of each step {[round(step['time/step'], 2) for step in done]}")
        report(name, done, work)
    return good


def main() -> int:
    parser = parser_of_runs(__doc__, 600.0)
    parser.add_argument("--shapes", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--steps", type=int, help=f"of each run, the warm-up included; default: {STEPS}")
    parser.add_argument("--models", type=Path, default=MODELS)
    arguments = parser.parse_intermixed_args()
    require_gpu()
    until, failed = deadline(arguments.limit_s), False
    with folder_of_runs(arguments.folder) as folder:
        for name in arguments.shapes:
            steps, model = arguments.steps or STEPS[name], arguments.models / name
            call = partial(measure, name, model, folder, arguments.overrides, steps=steps, until=until)
            failed |= not succeeds(call)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
