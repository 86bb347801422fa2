"""How evenly a step's samples are shared out, and how long that takes: one JSON line for each mix of lengths.

    python -m tools.bench_balance [--samples 512] [--ranks 8] [--micro-batch-tokens 16384]

Prompts of 50 to 400 tokens; responses are log-normal with a median of 665 tokens, at most 8192. Each mix is shared out
once with a prompt for each response, and once with 8 responses to a prompt that is computed once. `bound` is what no
plan can undercut: the largest of the ranks' mean cost and the costliest sample, in rows of a model without attention.
"""

import argparse
import json
import random
import time

from rlflow.batch import Sizes, assign, balance_metrics, measure_load


def log_normal(seed: int, count: int, responses_per_prompt: int) -> Sizes:
    """`count` samples of random lengths, as described above."""
    rng = random.Random(seed)
    prompts = [rng.randint(50, 400) for _ in range(-(-count // responses_per_prompt))]
    groups = [number // responses_per_prompt for number in range(count)]
    responses = [max(1, min(int(rng.lognormvariate(6.5, 0.8)), 8192)) for _ in range(count)]
    return Sizes([prompts[group] for group in groups], responses, groups)


def measure(sizes: Sizes, ranks: int, budget: int, hidden: int, share: bool) -> dict[str, float]:
    """The metrics of a plan, its busiest rank beside the bound, and the seconds that one rank spends on planning."""
    start = time.perf_counter()
    parts = assign(sizes, ranks, hidden=hidden, share_prompts=share)
    assigned = time.perf_counter()
    loads = [
        measure_load(sizes.select(part), micro_batch_tokens=budget, hidden=hidden, share_prompts=share, multiple=8)
        for part in parts
    ]
    measured = time.perf_counter()
    everything = list(range(len(sizes)))
    largest = max(sizes.cost([sample], share, hidden) for sample in everything)
    return {
        name.removeprefix("balance/"): round(value, 5) for name, value in balance_metrics(loads, budget).items()
    } | {
        "busiest": round(max(sizes.cost(part, share, hidden) for part in parts)),
        "bound": round(max(sizes.cost(everything, share, hidden) / ranks, largest)),
        "assign_seconds": round(assigned - start, 4),
        "micro_batches_seconds": round((measured - assigned) / ranks, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    for share in (False, True):
        for seed in range(asked.seeds):
            sizes = log_normal(seed, asked.samples, 8 if share else 1)
            found = measure(sizes, asked.ranks, asked.micro_batch_tokens, asked.hidden, share)
            print(
                json.dumps(
                    {"seed": seed, "share_prompts": share, "samples": asked.samples, "ranks": asked.ranks, **found}
                )
            )


if __name__ == "__main__":
    main()
