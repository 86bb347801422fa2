"""How fast and how far SmolLM2 learns: seeds of the recipes side by side on one GPU.

    python -m tools.gpu.learning [section.key=value …] [--model FOLDER] [--recipes quickstart …] [--seeds 0 1 2]

The recipes are those of `configs`; their data are written here, as they say themselves. Seconds are of training, with
its evaluations and without the start, and hold what running side by side costs. Six runs take about four minutes. The
tables are rows for docs/results.md.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rlflow.errors import UserError
from rlflow.tracking import read_records
from rlflow.tracking.records import Record
from tools import make_arithmetic
from tools.gpu.machine import require_gpu
from tools.gpu.report import emit
from tools.gpu.runs import ROOT, deadline, train
from tools.make_reasoning_gym import DRAWS, Row, make_task, split

ON_ONE_GPU = (
    "actor.pipeline_parallel_size=1",
    "actor.micro_batch_tokens=8192",
    "rollout.kv_cache_gib=2",
    # Responses are of a few tokens: capturing graphs would take longer than they save, and so would sleeping.
    "rollout.cuda_graphs=false",
    "rollout.sleep_level=0",
    "bridge.startup_proof=false",
    "trainer.export=false",
    "tracking.tensorboard=false",
)
"""What differs from the recipes, one of which is for two CPUs."""
FILES = {"train": "train", "evaluation": "held_out"}
"""Keys of the section `data`, and the names of their files."""


@dataclass(frozen=True)
class Task:
    """What a recipe learns: what makes its rows to train on and held out, and the accuracy that is waited for."""

    rows: Callable[[], tuple[list[Row], list[Row]]]
    target: float


def family_relationships() -> tuple[list[Row], list[Row]]:
    """As the head of `configs/reasoning_gym.yaml` says."""
    examples, train_rows, held_out = 2, 3000, 200
    size = DRAWS * (examples + train_rows + held_out)
    task = make_task("family_relationships", {"max_family_size": 5}, seed=5, size=size)
    return split(task, examples, train_rows, held_out)


def sums() -> tuple[list[Row], list[Row]]:
    """As `launch/quickstart.sh` does."""
    return make_arithmetic.split(make_arithmetic.TASKS["quickstart"], seed=0)


TASKS = {"quickstart": Task(sums, target=0.5), "reasoning_gym": Task(family_relationships, target=0.5)}


@dataclass(frozen=True)
class Curve:
    """The held-out accuracy of a run at the steps where it was evaluated, and the seconds of training until then."""

    steps: list[int]
    accuracy: list[float]
    seconds: list[float]
    seconds_per_step: float

    def seconds_to(self, target: float) -> float | None:
        """Until the first evaluation that reached the target; None where none did."""
        reached = (spent for spent, found in zip(self.seconds, self.accuracy, strict=True) if found >= target)
        return next(reached, None)


def curve(records: Sequence[Record]) -> Curve:
    """The curve of a run's records, in order; the evaluation before the first step is at 0 seconds."""
    times = [record["time/step"] for record in records if "time/step" in record]
    spent, found = 0.0, Curve([], [], [], statistics.median(times or [0.0]))
    for record in records:
        spent += record.get("time/step", 0.0)
        if "eval/accuracy" in record:
            found.steps.append(int(record["step"]))
            found.accuracy.append(record["eval/accuracy"])
            found.seconds.append(spent)
    return found


def row(name: str, found: Curve, target: float) -> str:
    """A run as a row of a table: accuracies, seconds to the target, seconds of a step."""
    reached = found.seconds_to(target)
    cells = [f"{value:.3f}".removeprefix("0") for value in found.accuracy]
    cells += ["–" if reached is None else f"{reached:.0f}", f"{found.seconds_per_step:.2f}"]
    return f"| {name} | {' | '.join(cells)} |"


def learn(recipe: str, seed: int, folder: Path, overrides: Sequence[str], until: float) -> tuple[Curve | None, bool]:
    """Run a recipe in `folder`/recipe-seed; what it learnt, and whether it came to its end before the deadline."""
    own = folder / f"{recipe}-{seed}"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    config = Path(shutil.copy(ROOT / "configs" / f"{recipe}.yaml", own / "config.yaml"))
    data = [f"data.{key}={folder / recipe / name}.jsonl" for key, name in FILES.items()]
    places = [*data, f"trainer.output_dir={own / 'run'}", f"trainer.seed={seed}"]
    ended_well = train(config, [*ON_ONE_GPU, *places, *overrides], until=until)
    try:
        return curve(read_records(own / "run")), ended_well
    except UserError as error:  # it ended before its first record; the other runs still count
        print(f"{own.name}: {error}", flush=True)
        return None, False


def learn_side_by_side(
    recipes: Sequence[str], seeds: Sequence[int], folder: Path, overrides: Sequence[str], until: float
) -> bool:
    """Run every seed of every recipe at the same time and tell of each recipe; whether all ended well."""
    for recipe in recipes:
        make_arithmetic.write_split(folder / recipe, *TASKS[recipe].rows())
    runs = [(recipe, seed) for recipe in recipes for seed in seeds]
    with ThreadPoolExecutor(len(runs)) as pool:
        started = {run: pool.submit(learn, *run, folder=folder, overrides=overrides, until=until) for run in runs}
    results = {run: future.result() for run, future in started.items()}
    for recipe in recipes:
        tell(recipe, {seed: found for seed in seeds if (found := results[recipe, seed][0]) is not None})
    return all(ended_well for _, ended_well in results.values())


def tell(recipe: str, found: dict[int, Curve]) -> None:
    """Print the table of a recipe and emit each seed's last accuracy and seconds to the target."""
    target = TASKS[recipe].target
    steps = max((one.steps for one in found.values()), key=len, default=[])
    print(f"| {recipe} | {' | '.join(f'step {step}' for step in steps)} | seconds to {target} | s/step |")
    print("|" + "---|" * (len(steps) + 3))
    for seed, one in found.items():
        print(row(f"seed {seed}", one, target), flush=True)
    for seed, one in found.items():
        details = {"steps": one.steps, "accuracy": one.accuracy, "seconds_to_target": one.seconds_to(target)}
        last = one.accuracy[-1] if one.accuracy else 0.0
        emit("learning", f"{recipe} held-out accuracy, seed {seed}", last, target=target, details=details)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models/smollm2-135m-instruct", help="SmolLM2's folder")
    parser.add_argument("--recipes", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "rlflow-learning")
    parser.add_argument("--limit-s", type=float, default=270.0)
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    arguments = parser.parse_args()
    require_gpu()
    until = deadline(arguments.limit_s)
    overrides = [f"model.path={arguments.model.resolve()}", *arguments.overrides]
    try:
        good = learn_side_by_side(arguments.recipes, arguments.seeds, arguments.folder, overrides, until)
    except UserError as error:  # of the data: reasoning-gym may be missing
        print(f"learning: {error}", file=sys.stderr)
        return 2
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
