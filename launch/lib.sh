# Sourced by the scripts beside it, from bash: finds a Python and keeps the virtual environment.
# MEGACORE_VENV names another folder than .venv for it.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${MEGACORE_VENV:-$root/.venv}"
[[ "$venv" == /* ]] || venv="$PWD/$venv"
python="$venv/bin/python"

say() { printf '%s\n' "$*" >&2; }
die() { say "$0: $*"; exit 1; }

# A name may be on the PATH and yet not run, be too old, or lack ensurepip: so each candidate is tried.
find_python() {
    local candidate
    for candidate in python3.13 python3.12 python3.11 python3 python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "no Python 3.11 or newer with venv and ensurepip was found; install one (on Debian: python3 and python3-venv)"
}

make_venv() {
    local base
    "$python" -m pip --version >/dev/null 2>&1 && return
    base="$(find_python)" || return
    say "Making $venv with $("$base" --version)"
    "$base" -m venv "$venv"
}

# What an environment was installed from: when one of these changes, it is installed again.
fingerprint() { { printf '%s\n' "$root"; cat "$root/pyproject.toml" "$root/constraints.txt"; } | cksum; }

installed() { [[ -f "$venv/.megacore-$1" && "$(<"$venv/.megacore-$1")" == "$(fingerprint)" ]]; }

install() {
    local kind="$1" wanted="$root"
    [[ "$kind" == dev ]] && wanted="$root[dev]"
    make_venv || return
    say "Installing into $venv (once; a few minutes)"
    "$python" -m pip install -q -c "$root/constraints.txt" -e "$wanted" >&2 || return
    fingerprint >"$venv/.megacore-$kind"
}

# prepare run | prepare dev: afterwards $python has Megacore, with the development tools for dev.
prepare() {
    local kind="$1"
    if installed "$kind" || installed dev; then return; fi
    # Several nodes may share the folder: one installs, the others wait and find it done.
    mkdir -p "$venv"
    exec 9>"$venv/.megacore-lock"
    if command -v flock >/dev/null; then flock 9; fi
    if ! installed "$kind" && ! installed dev; then
        install "$kind" || die "could not install into $venv; the reason stands above, and a second run tries again"
    fi
    exec 9>&-
}

# overrides "init resume" ARGUMENT...: sets `arguments` to the recipe and its overrides, of what was given; --init FOLDER
# stands for checkpoint.init=FOLDER, and so do the other names.
overrides() {
    local names=" $1 " name given=() last=()
    shift
    while [[ $# -gt 0 ]]; do
        name="${1%%=*}"
        if [[ "$1" != --* || "$names" != *" ${name#--} "* ]]; then
            given+=("$1")
        elif [[ "$1" == *=* ]]; then
            last+=("checkpoint.${1#--}")
        else
            [[ $# -ge 2 ]] || die "$1 needs a folder"
            last+=("checkpoint.${1#--}=$2")
            shift
        fi
        shift
    done
    [[ ${#given[@]} -ge 1 && "${given[0]}" != -* ]] || die "usage: $usage"
    [[ -f "${given[0]}" ]] || die "no recipe ${given[0]}; those that come along are in $root/launch/recipes"
    arguments=("${given[@]}" ${last[@]+"${last[@]}"})
}

# train RECIPE [section.key=value ...]: on this node, in place of this shell; pretrain.sh says which variables it heeds.
train() {
    local nodes where processes gpus cores threads
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

    # On a CPU, activations are large allocations that come and go each step. glibc would map and unmap each, and the
    # kernel would zero its pages each time: keep them in the heap instead.
    export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-1073741824}"
    export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-1073741824}"

    # Tensor, data and pipeline parallel messages each have a CUDA stream. With fewer hardware queues than streams a
    # message that waits could hold up the kernels that it waits for.
    export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}"

    # What is wrong with the run is said here, once and plainly, before any process is started.
    "$python" -m megacore.pretrain --check $((nodes * processes)) "$processes" "$@"

    exec "$python" -m megacore.elastic --nnodes="$nodes" --nproc-per-node="$processes" "${where[@]}" \
        --shutdown-timeout="${SHUTDOWN_TIMEOUT:-600}" -m megacore.pretrain "$@"
}
