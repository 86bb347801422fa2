"""Time the conversion of a random model of a billion parameters against copying its files on the same disk.

Usage: python -m tools.bench_convert --out FOLDER [--layers 16] [--repeats 3]

A model in the shape of Llama-3.2-1B is made in FOLDER and removed afterwards; four times its 2.5 GB must be free. Each
repeat copies the files, imports and exports, one after another, all made durable, with the source in the page cache
(warm) and not (cold). Prints one JSON line: medians of seconds, their ratios to the copy's, and peak memory. The
interpreter's start is counted apart; seconds of the processor too, which other work on the machine disturbs less.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_bridge.families import load_architecture
from megatron_bridge.files import SINGLE, stream_file
from megatron_bridge.folders import make_durable
from megatron_bridge.layouts import HFLayout

CONFIG = {
    "model_type": "llama", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
COMMAND = """
import json, resource, sys, time
from megatron_bridge.cli import main
import megatron_bridge.conversion.import_hf, megatron_bridge.conversion.export_megatron, torch.distributed.checkpoint
begin, cpu = time.perf_counter(), time.process_time()
assert main(sys.argv[1:]) == 0
spent, cpu = time.perf_counter() - begin, time.process_time() - cpu
print(json.dumps({"seconds": spent, "cpu": cpu, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def make_model(folder: Path, config: Mapping[str, Any]) -> int:
    """A bfloat16 model of repeated random numbers; returns the bytes of its weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    parameters = HFLayout(load_architecture(folder), (0,)).parameters(0)
    some = torch.randn(2**20).to(torch.bfloat16)

    def values(name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        size = prod(parameters[name].shape)
        return (some[: size - begin] for begin in range(0, size, len(some)))

    stream_file(folder / SINGLE, {name: (param.shape, torch.bfloat16) for name, param in parameters.items()}, values)
    return (folder / SINGLE).stat().st_size


def forget(folder: Path) -> None:
    """Have a folder's files out of the page cache."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def copy(source: Path, target: Path) -> dict[str, float]:
    """A durable copy, timed; it is removed."""
    begin, cpu = time.perf_counter(), time.process_time()
    shutil.copytree(source, target)
    make_durable(target)
    spent, cpu = time.perf_counter() - begin, time.process_time() - cpu
    shutil.rmtree(target)
    return {"seconds": spent, "cpu": cpu}


def convert(*words: str) -> dict[str, float]:
    """What a command in a process of its own takes, and what its process takes besides."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", COMMAND, *words], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found | {"start": time.perf_counter() - begin - found["seconds"]}


def measure(source: Path, out: Path, cold: bool) -> dict[str, dict[str, float]]:
    """One copy, import and export."""
    megatron, back = out / "megatron", out / "back"
    if cold:
        forget(source)
    found = {"copy": copy(source, out / "copy")}
    if cold:
        forget(source)
    found["import"] = convert("import", "--hf", str(source), "--out", str(megatron), "--tp", "4")
    if cold:
        forget(megatron)
    found["export"] = convert("export", "--megatron", str(megatron), "--out", str(back))
    for folder in (megatron, back):
        shutil.rmtree(folder)
    return found


def summary(repeats: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """Medians over repeats, and ratios to the copy."""
    gathered: dict[str, list[float]] = defaultdict(list)
    for found in repeats:
        for name in ("copy", "import", "export"):
            gathered[f"{name}_seconds"].append(found[name]["seconds"])
            gathered[f"{name}_cpu_seconds"].append(found[name]["cpu"])
            if name != "copy":
                gathered[f"{name}_ratio"].append(found[name]["seconds"] / found["copy"]["seconds"])
                gathered["start_seconds"].append(found[name]["start"])
    return {name: round(statistics.median(values), 3) for name, values in gathered.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder on the disk to be measured")
    parser.add_argument("--layers", type=int, default=16, help="16 are 1.24 billion parameters")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    source = arguments.out / "model"
    line: dict[str, Any] = {"model_bytes": make_model(source, {**CONFIG, "num_hidden_layers": arguments.layers})}
    peaks = []
    for state in ("warm", "cold"):
        repeats = [measure(source, arguments.out, state == "cold") for _ in range(arguments.repeats)]
        line[state] = summary(repeats)
        peaks += [found[name]["peak"] for found in repeats for name in ("import", "export")]
    shutil.rmtree(source)
    print(json.dumps(line | {"peak_rss_bytes": int(max(peaks)), "load": os.getloadavg()[0]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
