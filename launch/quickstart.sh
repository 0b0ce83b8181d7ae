#!/usr/bin/env bash
# The main job on a laptop: tokenizes the source of Python's own standard library and trains a small LLaMA on it, with 2
# tensor parallel ranks x 2 pipeline stages. Everything goes to runs/quickstart; a run that is there already stays as it
# is, and the next one goes to runs/quickstart-2, and so on. Arguments override the recipe's values:
# launch/quickstart.sh train.steps=50
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

prepare run
cd "$root"
run=runs/quickstart
if [[ ! -f "$run/data/stdlib.idx" ]]; then
    library="$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
    say "Tokenizing $library"
    "$python" -m megacore tokenize "$library" --out "$run/data" --name stdlib --train-vocab 4096 \
        --exclude site-packages --exclude test --exclude tests --on-error skip
fi
out="$run"
if [[ "$*" != *resume* ]]; then
    for ((number = 2; ; number++)); do
        [[ -e "$out/config.yaml" || -e "$out/metrics.jsonl" || -e "$out/checkpoints" ]] || break
        out="$run-$number"
    done
fi
exec launch/pretrain.sh launch/recipes/quickstart.yaml "out=$out" "$@"
