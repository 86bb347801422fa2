"""Write problems of one reasoning-gym task as train.jsonl and held_out.jsonl, for the reward that asks its verifier.

Every question stands once, on one side. The prompt is the question, after worked examples that are in neither file and
show how short an answer is. Both files come from one data set: reasoning-gym makes problem i from seed + i, so that two
whose seeds lie close hold the same problems. An answer that is not fully right once it was read back from JSON is an
error, by which the few tasks that cannot be written are refused.

    python -m tools.make_reasoning_gym --task chain_sum --out data/chain_sum min_terms=3 max_terms=3 max_digits=1
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlflow.config.faults import nearest
from rlflow.errors import UserError
from tools.make_arithmetic import write_split

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

SEED_DISTANCE = 1_000_000
"""Between the data sets of two values of --seed: more problems than are drawn from one."""
DRAWS = 4
"""Problems drawn at most for each that is wanted; what repeats itself more often has too few."""
Row = dict[str, Any]


def make_task(name: str, settings: dict[str, Any], seed: int, size: int) -> ProceduralDataset:
    """The task with its settings.

    Raises UserError for a name or a setting that reasoning-gym does not take, and where that is not installed.
    """
    try:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError("--task", "reasoning-gym is not installed; it is rlflow's extra [reasoning-gym]") from error
    if name not in DATASETS:
        near = nearest(name, DATASETS)
        known = f"nearest: {near}" if near else f"it has {', '.join(sorted(DATASETS))}"
        raise UserError("--task", f"reasoning-gym has no task {name}; {known}")
    try:
        return create_dataset(name, seed=seed * SEED_DISTANCE, size=size, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(name, f"reasoning-gym refuses the settings {settings}: {error}") from error


def distinct_problems(task: ProceduralDataset, count: int) -> list[Row]:
    """`count` rows without the prompt, no question twice; raises UserError where the task has fewer."""
    found: dict[str, Row] = {}
    for number in range(len(task)):
        problem = task[number]
        question = problem["question"].strip()
        if question not in found:
            found[question] = read_back({"question": question, **{key: problem[key] for key in ("answer", "metadata")}})
        if len(found) == count:
            return list(found.values())
    drawn = f"only {len(found)} of {len(task)} problems drawn are different"
    raise UserError("--train", f"{count} problems are wanted and {drawn}: ask for fewer or allow for more variety")


def read_back(row: Row) -> Row:
    """The row as a reader of its file gets it; raises UserError where its answer is no longer fully right then."""
    from rlflow.rewards.reasoning_gym import verified

    written = json.loads(json.dumps(row, default=str))  # some metadata hold fractions
    try:
        score = verified(row["answer"], written["answer"], row=written)["score"]
    except (AttributeError, TypeError) as error:  # of tasks without one right answer
        raise UserError("--task", f"problem {row['question']!r} has no answer that can be judged: {error}") from error
    if score < 1:
        raise UserError("--task", f"the answer of problem {row['question']!r}, read back from JSON, scores {score}")
    return written


def with_prompt(row: Row, examples: list[Row]) -> Row:
    """The row with a conversation that asks for it after the worked examples."""
    messages = []
    for example in examples:
        messages.append({"role": "user", "content": example["question"]})
        messages.append({"role": "assistant", "content": example["answer"]})
    return {"prompt": [*messages, {"role": "user", "content": row["question"]}], **row}


def split(task: ProceduralDataset, examples: int, train: int, held_out: int) -> tuple[list[Row], list[Row]]:
    """Rows to train on and held-out rows, all with the same examples, which are in neither."""
    problems = distinct_problems(task, examples + held_out + train)
    asked = [with_prompt(row, problems[:examples]) for row in problems[examples:]]
    return asked[held_out:], asked[:held_out]


def setting(text: str) -> tuple[str, Any]:
    """A `key=value` of the command line, the value read as YAML."""
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} must be written setting=value")
    return name, yaml.safe_load(value)


def whole_number(text: str, least: int = 0) -> int:
    """A number of the command line that is not below `least`."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, not {text}")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--task", required=True, help="reasoning-gym's name for it")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write into")
    parser.add_argument("--train", type=partial(whole_number, least=1), default=3000, help="problems to train on")
    parser.add_argument("--held-out", type=whole_number, default=200)
    parser.add_argument("--examples", type=whole_number, default=1, help="worked examples before each question")
    parser.add_argument("--seed", type=whole_number, default=0, help="chooses the problems")
    parser.add_argument("settings", nargs="*", type=setting, help="the task's own settings, as name=value")
    arguments = parser.parse_args()
    wanted = arguments.examples + arguments.held_out + arguments.train
    try:
        task = make_task(arguments.task, dict(arguments.settings), arguments.seed, DRAWS * wanted)
        train, held_out = split(task, arguments.examples, arguments.train, arguments.held_out)
    except UserError as error:
        print(f"make_reasoning_gym: {error}", file=sys.stderr)
        return 2
    write_split(arguments.out, train, held_out)
    print(f"{arguments.out}: {len(train)} problems of {arguments.task} to train on, {len(held_out)} held out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
