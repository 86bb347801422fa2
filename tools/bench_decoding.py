"""What the host takes for a decoded token, by vLLM's scheduler and in bulk: one JSON line.

    python -m tools.bench_decoding [--sequences 128] [--tokens 200]

vLLM's engine, scheduler and cache are real; a model that counts stands in for the GPU, so that what is left is Python.
Microseconds of the process's CPU time, medians of three calls after one.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.rollout.counting_engine import counting_engine
from tests.tiny import save_model

N = 8  # responses to a prompt


def per_token(llm: Any, sequences: int, tokens: int) -> float:
    """Microseconds for each token of so many sequences that end at their limit."""
    from vllm import SamplingParams

    params = SamplingParams(n=N, max_tokens=tokens, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False)
    seconds = []
    for _ in range(4):
        prompts = [{"prompt_token_ids": list(range(8, 20 + number % 16))} for number in range(sequences // N)]
        begin = time.process_time()
        llm.generate(prompts, [params] * len(prompts), use_tqdm=False)
        seconds.append(time.process_time() - begin)
    return 1e6 * statistics.median(seconds[1:]) / (sequences * tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=128, help="decoded at once; at most 128")
    parser.add_argument("--tokens", type=int, default=200, help="of each response; at most 220")
    arguments = parser.parse_args()
    from rlflow.rollout.decoding import install

    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), "llama", tied=True)
        with counting_engine(Path(folder), places=arguments.sequences, blocks=16 * arguments.sequences) as llm:
            by_vllm = per_token(llm, arguments.sequences, arguments.tokens)
            install(llm)
            in_bulk = per_token(llm, arguments.sequences, arguments.tokens)
    found = {"by_vllm_us": by_vllm, "in_bulk_us": in_bulk, "ratio": by_vllm / in_bulk}
    print(json.dumps(vars(arguments) | {name: round(value, 2) for name, value in found.items()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
