#!/usr/bin/env bash
# Fine-tunes a model, from a Hugging Face folder (or a checkpoint) to a Hugging Face folder:
#   launch/finetune.sh RECIPE --init FOLDER [--export FOLDER] [--resume auto|CHECKPOINT] [section.key=value ...]
# They stand for checkpoint.init=FOLDER, checkpoint.export=FOLDER and checkpoint.resume=... Processes, nodes and signals
# are those of pretrain.sh; docs/finetune.md goes through a run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

megacore finetune "$@"
