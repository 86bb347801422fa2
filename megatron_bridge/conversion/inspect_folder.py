"""Say what a model folder holds: family, sizes, layout, dtypes, tensors, and what is wrong with their names.

    rlflow-convert inspect Qwen3-8B-megatron

Nothing is read but headers. A Megatron checkpoint without a config is described as far as its metadata goes.
"""

import argparse
import json
import re
from collections import Counter, defaultdict
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from megatron_bridge.checkpoints import hf_layout, name_faults, names_of
from megatron_bridge.command_line import path, say
from megatron_bridge.conversion.checkpoint import HUGGING_FACE, find_model, kind_of
from megatron_bridge.distcp import find_iteration, read_metadata
from megatron_bridge.families import Architecture, load_architecture
from megatron_bridge.files import DTYPES, read_header, tensor_files
from megatron_bridge.folders import show_bytes
from megatron_bridge.layouts.torch_dist import IGNORED, are_layers_stacked

FACTS = ("family", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied", "head", "max_positions")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `inspect`."""
    parser.add_argument("folder", type=path, metavar="DIR", help="a model folder")
    parser.add_argument("--json", action="store_true", help="print a JSON object, with every tensor")


def run(args: argparse.Namespace) -> int:
    """Describe the folder."""
    folder = Path(args.folder)
    found = describe_hf(folder) if kind_of(folder) == HUGGING_FACE else describe_megatron(folder)
    say(json.dumps(found) if args.json else table(found))
    return 0


def describe_hf(folder: Path) -> dict[str, Any]:
    """A Hugging Face folder; the names are checked against the config."""
    arch, files = load_architecture(folder), tensor_files(folder)
    headers = {path: read_header(path) for path in sorted(set(files.values()))}
    entries = [(name, entry) for header in headers.values() for name, entry in header.items()]
    tensors = [
        _tensor(name, entry["shape"], str(DTYPES[entry["dtype"]]), entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in entries
    ]
    names = names_of(folder, arch)
    return {
        "folder": str(folder),
        "kind": "Hugging Face",
        "layout": {
            "root": names.root,
            "experts stacked": names.stacked,
            "own tied head": names.tied_head,
        },
        **_facts(arch),
        **_totals(tensors),
        "files": {path.name: path.stat().st_size for path in headers},
        "faults": name_faults(files, hf_layout(files, arch)),
        "tensors": tensors,
    }


def describe_megatron(folder: Path) -> dict[str, Any]:
    """A Megatron checkpoint; of an optimizer's state and the like only the size is said."""
    place, model = find_iteration(folder), find_model(folder)
    held = read_metadata(place)
    tensors, other = [], 0
    for key, stored in held.items():
        nbytes = prod(stored.shape) * stored.dtype.itemsize
        if IGNORED.fullmatch(key):
            other += nbytes
        else:
            tensors.append(_tensor(key, stored.shape, str(stored.dtype), nbytes) | {"chunks": len(stored.chunks)})
    return {
        "folder": str(place),
        "kind": "Megatron torch_dist",
        "layout": {
            "layers stacked": are_layers_stacked(held),
            "config": str(model) if model else "none: give --hf to convert",
        },
        **(_facts(load_architecture(model)) if model else {}),
        **_totals(tensors),
        **({"optimizer_bytes": other} if other else {}),
        "files": {path.name: path.stat().st_size for path in sorted(place.glob("*.distcp"))},
        "faults": [],
        "tensors": tensors,
    }


def _tensor(name: str, shape: Any, dtype: str, nbytes: int) -> dict[str, Any]:
    return {"name": name, "shape": list(shape), "dtype": dtype.removeprefix("torch."), "bytes": nbytes}


def _facts(arch: Architecture) -> dict[str, Any]:
    facts = {name: getattr(arch, name) for name in FACTS}
    facts |= {name: asdict(value) for name in ("experts", "latent") if (value := getattr(arch, name)) is not None}
    if len(set(arch.layer_kinds)) > 1:
        facts["layer_kinds"] = dict(Counter(arch.layer_kinds))
    return facts


def _totals(tensors: list[dict[str, Any]]) -> dict[str, Any]:
    dtypes: Counter[str] = Counter()
    for tensor in tensors:
        dtypes[tensor["dtype"]] += tensor["bytes"]
    return {
        "parameters": sum(prod(tensor["shape"]) for tensor in tensors),
        "bytes": sum(dtypes.values()),
        "dtypes": dict(dtypes),
    }


def table(found: dict[str, Any]) -> str:
    """The description as lines; tensors that differ in numbers of their names only are one."""
    lines = [f"{found['folder']}: {found['kind']}"]
    plain = {key: value for key, value in found.items() if key not in ("folder", "kind", "files", "faults", "tensors")}
    plain["parameters"] = f"{found['parameters']:,}"
    plain |= {key: show_bytes(value) for key, value in plain.items() if key.endswith("bytes")}
    plain["dtypes"] = {dtype: show_bytes(nbytes) for dtype, nbytes in found["dtypes"].items()}
    for key, value in plain.items():
        said = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        lines.append(f"  {key.replace('_', ' '):<16}{said}")
    lines.append(f"  {'files':<16}{len(found['files'])}: {', '.join(list(found['files'])[:4])}")
    alike: dict[tuple[str, str, str], list[list[int]]] = defaultdict(list)
    for tensor in found["tensors"]:
        numbers = [int(number) for number in re.findall(r"(?<![a-z])\d+", tensor["name"])]
        pattern = re.sub(r"(?<![a-z])\d+", "{}", tensor["name"])
        alike[pattern, str(tensor["shape"]), tensor["dtype"]].append(numbers)
    lines += [f"  {_spanned(name, numbers)}  {shape} {dtype}" for (name, shape, dtype), numbers in alike.items()]
    return "\n".join(lines + [f"  fault: {fault}" for fault in found["faults"]])


def _spanned(pattern: str, numbers: list[list[int]]) -> str:
    """A name whose numbers are said as the range that they span."""
    ends = [(min(column), max(column)) for column in zip(*numbers, strict=True)]
    return pattern.format(*(f"{{{first}…{last}}}" if first < last else first for first, last in ends))
