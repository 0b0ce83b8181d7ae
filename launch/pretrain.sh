#!/usr/bin/env bash
# Pretrains what a recipe describes:
#   launch/pretrain.sh RECIPE [section.key=value ...] [--init FOLDER] [--resume auto|CHECKPOINT]
# --init starts from the weights of a Hugging Face folder or a checkpoint, --resume goes on with a run: they stand for
# checkpoint.init=FOLDER and checkpoint.resume=...
#
# Ctrl-C, SIGTERM and SIGHUP end the run after its step, with a checkpoint, within SHUTDOWN_TIMEOUT seconds (600). A second
# Ctrl-C ends it at once, without one, also where ranks hang. SIGUSR1 only saves a checkpoint; SIGUSR2 writes where each
# rank stands. A rank that stands still for train.timeout minutes (10) ends the run, and is named. Ranks die with the
# launcher. docs/launch.md says more.
#
# On one machine nothing else is needed. On several, which must be on a network that you trust, run it once on each with
#   NNODES=4 NODE_RANK=0..3 MASTER_ADDR=<host of node 0> [MASTER_PORT=29500]
# NPROC_PER_NODE: processes on each node; by default one for each GPU, or on a CPU as many as the recipe's mesh needs.
# OMP_NUM_THREADS: threads of each process; by default the cores shared out evenly.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

megacore train "$@"
