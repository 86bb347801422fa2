#!/usr/bin/env bash
# Everything that must hold, from a fresh clone: environment, lint, types, tests.
# usage: bash tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh cpu,dev
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
ruff check .
ruff format --check .
mypy
python -m pytest "$@"
