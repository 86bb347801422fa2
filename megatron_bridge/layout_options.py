"""Reads a model and two layouts from the words of a command line, such as `tp=4,pp=2`.

What is wrong is a UserError that names the option; nothing here plans or prints.
"""

import json
from collections.abc import Mapping, Sequence
from math import lcm, prod
from pathlib import Path
from typing import Any

from megatron_bridge.errors import UserError
from megatron_bridge.families import Architecture, load_architecture, read_json
from megatron_bridge.layouts import MegatronLayout, VLLMLayout
from megatron_bridge.layouts.grid import LARGEST_WORLD, fewest_replicas, valid_sizes
from megatron_bridge.layouts.layout import cut_faults, tensor_cuts

TRAIN_KEYS, ROLLOUT_KEYS = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "stages"), ("tp", "pp", "ep", "dp")
MOST_DIGITS = 9


def read_model(model: str) -> Architecture:
    """The model of a folder, of a file like its config.json, or of such a file's text."""
    is_text = model.lstrip().startswith("{")
    where = "--model" if is_text else f"--model {model}"
    if not is_text and Path(model).is_dir():
        return load_architecture(model, reads_weights=False)
    if not is_text and not Path(model).is_file():
        raise UserError(where, "no such file or folder; give a folder with config.json, or that file")
    try:
        config = json.loads(model) if is_text else read_json(Path(model))
        return load_architecture(config, reads_weights=False)
    except (ValueError, RecursionError) as error:
        raise UserError(where, f"broken JSON: {error}") from error
    except UserError as error:
        raise UserError(where, error.message) from error


def read_layouts(arch: Architecture, train: str, rollout: str, order: str) -> tuple[MegatronLayout, VLLMLayout]:
    """The layouts on ranks from 0 on; what is not given of data parallelism makes both fill the same ranks."""
    grid, engine = _read_sizes("--train", train, TRAIN_KEYS), _read_sizes("--rollout", rollout, ROLLOUT_KEYS)
    block = prod(grid.get(key, 1) for key in ("tp", "cp", "pp"))
    size = prod(engine.get(key, 1) for key in ("tp", "pp"))
    grid.setdefault("dp", _replicas(grid, block, size, engine.get("dp")))
    if (world := max(block * grid["dp"], size * engine.get("dp", 1))) > LARGEST_WORLD:
        raise UserError(f"--train {train} --rollout {rollout}", f"{world:,} ranks are too many")
    engines, rest = divmod(block * grid["dp"], size)
    if "dp" not in engine and rest:
        fault = f"{block * grid['dp']} training ranks do not divide into engines of {size}"
        raise UserError(f"--rollout {rollout}", f"{fault}: give dp, the number of engines, or another tp")
    if engine.get("ep", 1) not in (1, engine.get("tp", 1)):
        fault = f"an engine's experts are on its tp ranks: ep is 1 or {engine.get('tp', 1)}"
        raise UserError(f"--rollout {rollout}", fault)
    for option, text, sizes in (("--train", train, grid), ("--rollout", rollout, engine)):
        if arch.experts is None and (sizes.get("ep", 1) > 1 or "etp" in sizes):
            raise UserError(f"{option} {text}", f"this {arch.family} model has no experts to spread")
        _check_split(arch, option, text, sizes.get("tp", 1))
    ranks = tuple(range(size * engine.get("dp", engines)))
    options: dict[str, Any] = {**grid, "stages": _read_stages(train), "order": order}
    try:
        layout = MegatronLayout(arch, **options)
    except UserError as error:
        where = f"--order {order}" if "order " in error.message else f"--train {train}"
        raise UserError(where, error.message) from error
    try:
        return layout, VLLMLayout(arch, engine.get("tp", 1), ranks, engine.get("pp", 1), engine.get("ep", 1) > 1)
    except UserError as error:
        raise UserError(f"--rollout {rollout}", error.message) from error


def _replicas(grid: Mapping[str, int], block: int, size: int, engines: int | None) -> int:
    """The fewest training replicas that fill the rollout's ranks, or whole engines, and can place each expert."""
    if engines is not None:
        return max(1, size * engines // block)
    stage = block // grid.get("pp", 1)
    return lcm(lcm(block, size) // block, fewest_replicas(stage, grid.get("ep", 1), grid.get("etp", grid.get("tp", 1))))


def _read_sizes(option: str, text: str, keys: Sequence[str]) -> dict[str, int]:
    """`tp=4,pp=2` as numbers; `stages` is checked to be a list of them, and left out."""
    sizes: dict[str, int] = {}
    for word in text.split(","):
        key, _, value = word.partition("=")
        numbers = value.split("-") if key == "stages" else [value]
        if key not in keys or not all(number.isdecimal() for number in numbers):
            raise UserError(f"{option} {text}", f"{word!r} is none of {', '.join(keys)} = a number, such as tp=4,pp=2")
        if any(len(number) > MOST_DIGITS for number in numbers):
            raise UserError(f"{option} {text}", f"{key} is too large")
        if key in sizes or (key != "stages" and int(value) < 1):
            fault = "is given twice" if key in sizes else "must be at least 1"
            raise UserError(f"{option} {text}", f"{key} {fault}")
        if key != "stages":
            sizes[key] = int(value)
    return sizes


def _read_stages(text: str) -> tuple[int, ...]:
    given = [word.removeprefix("stages=") for word in text.split(",") if word.startswith("stages=")]
    return tuple(int(layers) for layers in given[0].split("-")) if given else ()


def _check_split(arch: Architecture, option: str, text: str, tp: int) -> None:
    def faults(size: int) -> list[str]:
        return cut_faults(arch, tensor_cuts(size, 0), replicate_kv=True)

    if found := faults(tp):
        raise UserError(f"{option} {text}", f"{'; '.join(found)}: tp may be {valid_sizes(faults, arch.heads)}")
