#!/usr/bin/env bash
# The main job on a laptop: tokenizes the source of Python's own standard library and trains a small LLaMA on it, with 2
# tensor parallel ranks x 2 pipeline stages. Everything goes to runs/quickstart. Arguments override the recipe's values:
# launch/quickstart.sh train.steps=50
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

prepare run
cd "$root"
run=runs/quickstart
if [[ ! -f "$run/data/stdlib.idx" ]]; then
    library="$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
    say "Tokenizing $library"
    "$python" -m tools.tokenize "$library" --out "$run/data" --name stdlib --train-vocab 4096 \
        --exclude site-packages --exclude test --exclude tests --on-error skip
fi
rm -rf "$run/config.yaml" "$run/metrics.jsonl" "$run/loss.png" "$run/checkpoints"
exec launch/pretrain.sh launch/recipes/quickstart.yaml "$@"
