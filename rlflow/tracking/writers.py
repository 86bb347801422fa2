"""Where metrics and samples go besides metrics.jsonl: TensorBoard, Weights & Biases, and one file of samples a step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

from rlflow.batch import Sample
from rlflow.errors import UserError


class Writer(Protocol):
    """A place that metrics go to, step by step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars and sample texts in the run folder's tensorboard/; steps done again after a resume are purged."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def texts(self, step: int, samples: Iterable[Sample]) -> None:
        for number, sample in enumerate(samples):
            heading = f"{sample.prompt.id} · reward {sample.reward} · answer {sample.prompt.answer}"
            self._writer.add_text(f"sample/{number}", f"{heading}\n\n{_indented(sample.text)}", step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One run of a project; its id is kept in the run folder, so that a resumed run goes on in the same one."""

    def __init__(self, run_dir: Path, project: str, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError("tracking.wandb", "needs the package wandb: pip install 'rlflow[wandb]'") from None
        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(wandb.util.generate_id())
        self._run = wandb.init(
            project=project, name=run_dir.name, id=id_file.read_text(), resume="allow", dir=str(run_dir),
            config=dict(settings),
        )  # fmt: skip

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def sample_file(run_dir: Path, step: int) -> Path:
    return run_dir / "samples" / f"step_{step:06}.jsonl"


def write_samples(run_dir: Path, step: int, samples: Sequence[Sample], prompt_key: str) -> None:
    """One line for each sample: the prompt as its row has it, response, answer, reward and every score."""
    path = sample_file(run_dir, step)
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        for sample in samples:
            line = {
                "prompt_id": sample.prompt.id,
                "index": sample.index,
                "prompt": sample.prompt.row.get(prompt_key),
                "response": sample.text,
                "answer": sample.prompt.answer,
                "reward": sample.reward,
                "scores": sample.scores,
                "response_tokens": len(sample.response_ids),
                "truncated": sample.truncated,
                "weights_version": sample.weights_version,
            }
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")


def _indented(text: str) -> str:
    """As a Markdown code block, whatever the text contains."""
    return "\n".join(f"    {line}" for line in text.splitlines())
