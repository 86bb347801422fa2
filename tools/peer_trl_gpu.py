"""A step of GRPO in TRL with vLLM in its process, on the work of `tools.gpu.whole_step`, on one GPU.

    python -m tools.peer_trl_gpu [--shape 0.5b] [--beside FOLDER]

Needs trl, datasets and vllm. FOLDER is what `tools.gpu.whole_step --folder FOLDER` left: the ratio of the two steps is
told. Same model, prompts, lengths, reward and optimizer; one optimizer step a rollout, so that neither computes old
log-probs. TRL is set to be fast: weights and AdamW in bfloat16 alone, no activations computed twice, its fused head,
vLLM awake all the time and compiled as it comes, no importance weights, no text decoded by vLLM. A first step of short
responses warms up, a second one is measured; in all about 2 minutes. Where vLLM does not start so, it is tried again
with its layers not compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.gpu.machine import require_gpu
from tools.gpu.processes import run_within
from tools.gpu.report import emit
from tools.gpu.runs import CHARACTER, MODELS, medians, prompts, steps_of
from tools.gpu.shapes import save
from tools.gpu.timing import now
from tools.gpu.whole_step import WORK, Work

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # TRL reaches into the engine
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it may not be there
    "VLLM_LOGGING_LEVEL": "WARNING",
}
ENGINES: dict[str, dict[str, Any]] = {
    "compiled": {},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
}
"""Arguments of vLLM besides TRL's own, in the order in which they are tried."""
SEQUENCES = {"0.5b": 16, "1.5b": 8}
"""Of a micro-batch: what the memory holds beside vLLM."""
MEMORY = {"0.5b": 0.25, "1.5b": 0.38}
"""Share of the GPU that vLLM gets: its cache holds all sequences of the work at once."""
WARM_UP_RESPONSE = 32  # tokens
TARGET = 2.0
"""How many times as long as rlflow's step TRL's is to take."""


def character_share(completions: list[str], **rest: Any) -> list[float]:
    """The reward of rlflow's run: what part of the text is the character."""
    return [text.count(CHARACTER) / max(1, len(text)) for text in completions]


class Stopwatch:
    """Seconds of the calls of functions by name, until the GPU is done."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Count the time of a method from now on, what it calls included."""
        setattr(owner, method, partial(self._timed, getattr(owner, method), name))

    def _timed(self, call: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        begin = now()
        try:
            return call(*args, **kwargs)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + now() - begin


def settings(work: Work, shape: str, folder: Path) -> dict[str, Any]:
    """What `GRPOConfig` is given."""
    on_gpu, micro = torch.cuda.is_available(), min(SEQUENCES[shape], work.samples)
    return {
        "output_dir": str(folder), "max_steps": 2, "save_strategy": "no", "report_to": [], "logging_steps": 1,
        "disable_tqdm": True, "use_cpu": not on_gpu, "bf16": on_gpu, "model_init_kwargs": {"dtype": "bfloat16"},
        "per_device_train_batch_size": micro, "gradient_accumulation_steps": work.samples // micro,
        "num_generations": work.n, "max_completion_length": work.response, "temperature": 1.0, "top_p": 1.0,
        "top_k": 0, "generation_kwargs": {"ignore_eos": True, "detokenize": False}, "shuffle_dataset": False,
        "learning_rate": 1e-6, "lr_scheduler_type": "constant", "weight_decay": 0.01, "max_grad_norm": 1.0,
        "beta": 0.0, "gradient_checkpointing": False, "dataloader_num_workers": 0,
        "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": MEMORY[shape],
        "vllm_max_model_length": work.prompt + work.response, "vllm_importance_sampling_correction": False,
    }  # fmt: skip


def train(model: Path, shape: str, work: Work, folder: Path, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Make the two steps; what the second took, by phase, and what it sampled."""
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl.generation import vllm_generation

    vllm_generation.LLM = partial(vllm_generation.LLM, **engine)
    watch, ends, tokens = Stopwatch(), list[float](), list[int]()

    class Steps(TrainerCallback):
        """The end of each step; the second begins where the first ends, and has responses of full length."""

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(now())
            if len(ends) == 1:
                trainer.vllm_generation.max_completion_length = work.response
                watch.seconds.clear()
                if torch.cuda.is_available():
                    torch.cuda.reset_peak_memory_stats()

    def reward(completions: list[str], **rest: Any) -> list[float]:
        tokens.append(sum(len(ids) for ids in rest["completion_ids"]))
        return character_share(completions)

    trainer = trl.GRPOTrainer(
        model=str(model), reward_funcs=reward, args=trl.GRPOConfig(**settings(work, shape, folder)),
        train_dataset=Dataset.from_dict({"prompt": prompts(2 * work.prompts, work.prompt)}),
        processing_class=AutoTokenizer.from_pretrained(model), callbacks=[Steps()],
    )  # fmt: skip
    trainer.vllm_generation.max_completion_length = min(WARM_UP_RESPONSE, work.response)
    watch.watch(trainer.vllm_generation, "generate", "generate")
    watch.watch(trainer.vllm_generation, "sync_weights", "sync")
    watch.watch(trainer, "_generate_and_score_completions", "experience")
    trainer.train()
    others = {"tokens": tokens[-1], "reward": trainer.state.log_history[1].get("reward")}
    return taken(ends[1] - ends[0], watch.seconds) | others


def taken(step: float, seconds: Mapping[str, float]) -> dict[str, float]:
    """Phases of a step that do not overlap; what prepares samples besides sampling is `score`."""
    experience, generate, sync = (seconds.get(name, 0.0) for name in ("experience", "generate", "sync"))
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return {
        "step": step, "generate": generate, "sync": sync, "score": experience - generate - sync,
        "update": step - experience, "peak_gib": peak,
    }  # fmt: skip


def measure(shape: str, models: Path, folder: Path, limit_s: float) -> dict[str, Any] | None:
    """What TRL's step took, by a process for each way to start vLLM until one succeeds; None where none does."""
    end = time.monotonic() + limit_s
    for engine in ENGINES:
        log, result = folder / f"trl_{engine}.log", folder / f"trl_{engine}.json"
        result.unlink(missing_ok=True)
        command = [
            sys.executable, "-m", "tools.peer_trl_gpu", "--shape", shape, "--engine", engine, "--folder", str(folder),
            "--models", str(models),
        ]  # fmt: skip
        status = run_within(command, log, max(1.0, end - time.monotonic()), environment=ENVIRONMENT | os.environ)
        if result.is_file():
            return json.loads(result.read_text()) | {"engine": engine}
        print(f"TRL with vLLM {engine}: status {status}", flush=True)
        print("\n".join(log.read_text(errors="replace").splitlines()[-60:]), flush=True)
    return None


def report(shape: str, found: Mapping[str, Any], beside: Path | None, work: Work = WORK) -> None:
    """Print TRL's step with its phases, and how many times rlflow's it takes; of other work than that it says so."""
    sampled = found["tokens"]
    if sampled != work.sampled:
        print(f"TRL sampled {sampled} tokens in its second step, not {work.sampled}: the ratio is not of the same work")
    details = {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}
    emit("peer", f"TRL {shape} step", found["step"], "s", more_is_better=False,
         details=details | {"tokens/s": round(sampled / found["step"])})  # fmt: skip
    steps = steps_of(beside / shape / "config.yaml") if beside is not None else []
    if beside is not None and not steps:
        print(f"{beside / shape} holds no steps of rlflow: no ratio")
    if steps:
        own = medians(steps)
        ratios = {
            phase: round(found[phase] / own[f"time/{phase}"], 2) for phase in ("generate", "update", "sync")
        }  # fmt: skip
        emit("peer", f"TRL : rlflow, {shape} step", found["step"] / own["time/step"], "", target=TARGET,
             details={"rlflow_s": round(own["time/step"], 2)} | ratios)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SEQUENCES, default="0.5b")
    parser.add_argument("--beside", type=Path, help="the folder of tools.gpu.whole_step")
    parser.add_argument("--engine", choices=ENGINES, help="make the steps in this process, with vLLM started so")
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--folder", type=Path, help="for logs, to keep; default: one that goes at the end")
    parser.add_argument("--limit-s", type=float, default=240.0)
    arguments = parser.parse_args()
    require_gpu()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        model = save(arguments.models / arguments.shape, arguments.shape)
        if arguments.engine is not None:
            found = train(model, arguments.shape, WORK, folder / "trl", ENGINES[arguments.engine])
            (folder / f"trl_{arguments.engine}.json").write_text(json.dumps(found))
            return 0
        measured = measure(arguments.shape, arguments.models, folder, arguments.limit_s)
        if measured is None:
            return 1
        report(arguments.shape, measured, arguments.beside)
    return 0


if __name__ == "__main__":
    sys.exit(main())
