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

arguments=() starts=()
while [[ $# -gt 0 ]]; do
    case "$1" in
        --init | --resume)
            [[ $# -ge 2 ]] || die "$1 needs a folder"
            starts+=("checkpoint.${1#--}=$2")
            shift
            ;;
        --init=* | --resume=*) starts+=("checkpoint.${1#--}") ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
set -- ${arguments[@]+"${arguments[@]}"} ${starts[@]+"${starts[@]}"}

[[ ${#arguments[@]} -ge 1 && "$1" != -* ]] ||
    die "usage: launch/pretrain.sh RECIPE [section.key=value ...] [--init FOLDER] [--resume auto|CHECKPOINT]"
[[ -f "$1" ]] || die "no recipe $1; those that come along are in $root/launch/recipes"

prepare run
nodes="${NNODES:-1}"
if [[ "$nodes" == 1 ]]; then
    where=(--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --local-addr=localhost)
else
    [[ -n "${MASTER_ADDR:-}" ]] || die "NNODES=$nodes also needs MASTER_ADDR, the host of node 0"
    [[ -n "${NODE_RANK:-}" ]] || die "NNODES=$nodes also needs NODE_RANK, 0 to $((nodes - 1))"
    where=(--node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}")
fi

processes="${NPROC_PER_NODE:-}"
if [[ -z "$processes" ]]; then
    gpus="$("$python" -c 'import torch; print(torch.cuda.device_count())')"
    processes="$("$python" -m megacore.config processes --nodes "$nodes" --gpus "$gpus" "$@")"
fi

cores="$(nproc 2>/dev/null || sysctl -n hw.logicalcpu)"
threads=$((cores / processes))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"

# On a CPU, activations are large allocations that come and go each step. glibc would map and unmap each, and the kernel
# would zero its pages each time: keep them in the heap instead.
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-1073741824}"
export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-1073741824}"

# Tensor, data and pipeline parallel messages each have a CUDA stream. With fewer hardware queues than streams a message
# that waits could hold up the kernels that it waits for.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}"

# What is wrong with the run is said here, once and plainly, before any process is started.
"$python" -m megacore.pretrain --check $((nodes * processes)) "$processes" "$@"

exec "$python" -m megacore.elastic --nnodes="$nodes" --nproc-per-node="$processes" "${where[@]}" \
    --shutdown-timeout="${SHUTDOWN_TIMEOUT:-600}" -m megacore.pretrain "$@"
