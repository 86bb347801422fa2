#!/usr/bin/env bash
# Everything that must hold, from a fresh clone: environment, lint, types, tests.
# usage: bash tests/run.sh [pytest arguments]
#
# Without arguments the tests run in two halves beside each other: those that start few processes, or wait, leave cores
# idle. A half sees nothing of the other; what the second had to say is shown when the first has ended.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/environment.sh cpu,dev
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
ruff check .
ruff format --check .
if [ $# -gt 0 ]; then
    mypy
    exec python -m pytest "$@"
fi

second=()
for package in algorithms batch bridge cli config data inspect models parallel rewards tools tracking trainers; do
    second+=("tests/$package")
done
output=$(mktemp)
(mypy && exec python -m pytest "${second[@]}") > "$output" 2>&1 &
beside=$!
trap 'kill "$beside" 2> /dev/null || true; cat "$output"; rm "$output"' EXIT
code=0
python -m pytest "${second[@]/#/--ignore=}" || code=$?
wait "$beside" || code=$?
exit "$code"
