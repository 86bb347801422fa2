"""Layers of a checkpoint that predict further tokens: no part of the model here, but carried along to new folders.

A checkpoint has all of their tensors or none. Training and rollout leave them out; a folder that is written from one
that has them gets them as they were.
"""

import functools
import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_bridge.families import FAMILIES
from megatron_bridge.files import INDEX, SINGLE, open_hf, stream_file
from megatron_bridge.layouts.hf import ROOT, HFLayout
from megatron_bridge.layouts.layout import layer_prefix

FILE = "model-prediction.safetensors"
PART = 2**24  # elements that are copied at a time

logger = logging.getLogger(__name__)


def prediction_names(layout: HFLayout, given: Collection[str]) -> frozenset[str]:
    """The tensors of the layers after the last, as many as the config says, under a checkpoint's names.

    Each is a layer of the last one's kind with the tensors that its family declares besides. As these layers stay what
    they were when a folder is written anew, the names `given` decide whether their experts are stacked.
    """
    forms = [layout, replace(layout, stacked=not layout.stacked)] if FAMILIES[layout.arch.family].stacked else [layout]
    return max(map(_names, forms), key=lambda names: len(names.intersection(given)))


def _names(layout: HFLayout) -> frozenset[str]:
    arch, family, whole = layout.arch, FAMILIES[layout.arch.family], replace(layout, owners=None)
    count = int(arch.hf_config.get("num_nextn_predict_layers") or 0)
    if not count or not family.prediction:
        return frozenset()
    more = replace(arch, layers=arch.layers + count, layer_kinds=arch.layer_kinds + arch.layer_kinds[-1:] * count)
    rank = layout.ranks[0]
    names = replace(whole, arch=more).parameters(rank).keys() - whole.parameters(rank).keys()
    prefixes = [layout.root + layer_prefix(layer).removeprefix(ROOT) for layer in range(arch.layers, more.layers)]
    besides = (*family.prediction, *family.prediction_copies)
    return frozenset(names | {prefix + name for prefix in prefixes for name in besides})


def prediction_faults(names: Iterable[str], layout: HFLayout) -> list[str]:
    """What a checkpoint lacks that has some of these tensors; copies of what the model has anyway may be absent."""
    names = set(names)
    wanted = prediction_names(layout, names)
    given = wanted & names
    optional = FAMILIES[layout.arch.family].prediction_copies
    return [f"{name} is missing" for name in sorted(wanted - given) if given and not name.endswith(optional)]


@functools.cache
def say_left_out(folder: str, count: int) -> None:
    """Tell once that tensors of a folder are not loaded."""
    logger.warning("%s: %d tensors of layers that predict further tokens are left out", folder, count)


def copy_predictions(source: Path, target: Path, layout: HFLayout) -> frozenset[str]:
    """Copy such tensors from a Hugging Face folder into a file of a new one, as they are.

    Returns their names; none if the source has none, or is Megatron's.
    """
    if not any((source / name).exists() for name in (INDEX, SINGLE)):
        return frozenset()
    held = open_hf(source)
    names = prediction_names(layout, held) & held.keys()

    def values(name: str, dtype: torch.dtype) -> Iterator[Tensor]:
        for part in held[name].view(-1).split(PART):
            yield part
            held.release()

    if names:
        stream_file(target / FILE, {name: (tuple(held[name].shape), held[name].dtype) for name in names}, values)
    return names
