"""Opening a model folder of either kind as a source, with all that is to be known of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_bridge.checkpoints import names_of, open_source
from megatron_bridge.distcp import EMBEDDING, find_iteration, is_torch_dist
from megatron_bridge.errors import UserError
from megatron_bridge.families import Architecture, load_architecture
from megatron_bridge.files import MappedTensors, holds_weights
from megatron_bridge.folders import CONFIG
from megatron_bridge.layouts import HFLayout, Layout
from megatron_bridge.layouts.torch_dist import TorchDistLayout
from megatron_bridge.record import has_record

HUGGING_FACE, MEGATRON = "Hugging Face", "Megatron"
KINDS = {
    HUGGING_FACE: f"a Hugging Face folder ({CONFIG} and safetensors)",
    MEGATRON: "a Megatron checkpoint (latest_checkpointed_iteration.txt, or .metadata)",
}


@dataclass(frozen=True)
class Checkpoint:
    """A folder's weights, mapped, as a source for `layout.ranks`.

    `model` is the folder of its config, tokenizer and generation settings, `names` what Hugging Face's files call, or
    would call, its tensors.
    """

    folder: Path
    kind: str
    model: Path
    arch: Architecture
    names: HFLayout
    layout: Layout
    tensors: MappedTensors

    @property
    def sources(self) -> tuple[Path, ...]:
        """The folders that are read."""
        return self.folder, self.model

    @property
    def remark(self) -> str:
        """What whoever converts it should know, as a line; mostly nothing."""
        if not isinstance(self.layout, TorchDistLayout) or has_record(find_iteration(self.folder)):
            return ""
        rows = max(rows for (_, rows), _ in self.layout.boxes[EMBEDDING])
        if rows == (size := self.arch.vocab):
            return ""
        return (
            f"{self.folder}: vocab_size is {size} by the config: {rows - size} of the checkpoint's {rows} rows are "
            "taken for padding"
        )


def open_checkpoint(
    folder: str | Path, *, config: str | Path | None = None, ranks: Sequence[int] = (0,), kind: str | None = None
) -> Checkpoint:
    """The checkpoint in a folder, which must be of `kind` if one is given.

    `config` is a Hugging Face folder that says what a Megatron checkpoint does not say of itself. UserError says what
    is wrong with the folder and its files.
    """
    path = Path(folder)
    found = kind_of(path)
    if kind not in (None, found):
        raise UserError(path, f"is {KINDS[found]}, where {KINDS[kind or found]} is expected")
    model = path if found == HUGGING_FACE else Path(config) if config is not None else find_model(path)
    if model is None:
        raise UserError(folder, f"has no {CONFIG}: give --hf DIR, a Hugging Face folder of the same model")
    arch = load_architecture(model)
    layout, tensors = open_source(path, arch, ranks)
    return Checkpoint(path, found, model, arch, names_of(model, arch), layout, tensors)


def kind_of(folder: Path) -> str:
    """What a folder holds, `HUGGING_FACE` or `MEGATRON`; UserError if neither, with what is near."""
    if not folder.exists():
        raise UserError(folder, "no such folder")
    if not folder.is_dir():
        raise UserError(folder, "is a file: give the folder of the model")
    if is_torch_dist(folder):
        return MEGATRON
    if (folder / CONFIG).is_file() or holds_weights(folder):
        return HUGGING_FACE
    near = [path for path in sorted(folder.glob("*/")) + sorted(folder.glob("*/*/")) if _is_model(path)]
    hint = f"; {near[0]} is one" if near else ""
    raise UserError(folder, f"neither {KINDS[HUGGING_FACE]} nor {KINDS[MEGATRON]}{hint}")


def _is_model(folder: Path) -> bool:
    return folder.is_dir() and ((folder / CONFIG).is_file() or is_torch_dist(folder))


def find_model(folder: Path) -> Path | None:
    """The folder with the config of a Megatron checkpoint: itself, or one that it lies in, if there is one.

    An iteration's folder, or a trainer's step, has its config above.
    """
    inside = find_iteration(folder).resolve()
    places = (folder, inside, *inside.parents[:2])
    return next((place for place in places if (place / CONFIG).is_file()), None)
