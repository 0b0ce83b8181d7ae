#!/usr/bin/env bash
# Pretrains what a recipe describes:
#   launch/pretrain.sh RECIPE [section.key=value ...] [--init FOLDER] [--resume auto|CHECKPOINT]
# --init starts from the weights of a Hugging Face folder or a checkpoint, --resume goes on with a run: they stand for
# checkpoint.init=FOLDER and checkpoint.resume=...
#
# SIGTERM and Ctrl-C end the run after its step, with a checkpoint; SIGUSR1 only saves one. SHUTDOWN_TIMEOUT: seconds that
# SIGTERM leaves for that (600).
#
# On one machine nothing else is needed. On several, run it once on each with
#   NNODES=4 NODE_RANK=0..3 MASTER_ADDR=<host of node 0> [MASTER_PORT=29500]
# NPROC_PER_NODE: processes on each node; by default one for each GPU, or on a CPU as many as the recipe's mesh needs.
# OMP_NUM_THREADS: threads of each process; by default the cores shared out evenly.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage="launch/pretrain.sh RECIPE [section.key=value ...] [--init FOLDER] [--resume auto|CHECKPOINT]"
overrides "init resume" "$@"
train "${arguments[@]}"
