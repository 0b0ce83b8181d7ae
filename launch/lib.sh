# Sourced by the scripts beside it, from bash: finds a Python and keeps the virtual environment.
# MEGACORE_VENV names another folder than .venv for it, MEGACORE_CONSTRAINTS another file than constraints.txt.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${MEGACORE_VENV:-$root/.venv}"
[[ "$venv" == /* ]] || venv="$PWD/$venv"
python="$venv/bin/python"
constraints="${MEGACORE_CONSTRAINTS:-$root/constraints.txt}"

# The working folder is on nobody's import path: it may be one that was downloaded.
export PYTHONSAFEPATH=1

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
fingerprint() { { printf '%s\n' "$root"; cat "$root/pyproject.toml" "$constraints"; } | cksum; }

# pip, as far as there is something to see: which packages come and how many are installed. All that it says, its
# warnings too, goes to install.log of the environment, whose end is told where pip fails.
pip() (
    set -o pipefail
    log="$venv/install.log"
    "$python" -m pip --disable-pip-version-check "$@" 2>>"$log" | tee -a "$log" | awk '
        /^ *(Downloading|Using cached) / && !/\.metadata/ { sub(/^ */, "  "); print; fflush() }
        /^Installing collected packages/ { printf "  Installing %d packages\n", NF - 3; fflush() }' >&2 && return
    tail -n 20 "$log" >&2
    return 1
)

# For CI: wheels alone, whose hashes are known. What is built is only Megacore itself, by what is installed by then.
install_locked() {
    pip install --require-hashes --only-binary :all: --no-deps -r "$root/.ci/requirements.txt" &&
        pip install --only-binary :all: -c "$root/constraints.txt" torch &&
        pip install --no-deps --no-build-isolation -e "$root" &&
        pip check
}

installed() { [[ -f "$venv/.megacore-$1" && "$(<"$venv/.megacore-$1")" == "$(fingerprint)" ]]; }

install() {
    local kind="$1" wanted="$root"
    [[ "$kind" == dev ]] && wanted="$root[dev]"
    make_venv || return
    say "Installing into $venv (once; a few minutes); $venv/install.log has all of it"
    if [[ "$kind" == ci ]]; then
        install_locked || return
        kind=dev # it has all of that
    else
        pip install -c "$constraints" -e "$wanted" || return
    fi
    fingerprint >"$venv/.megacore-$kind"
}

# prepare run | dev | ci: afterwards $python has Megacore, with the development tools for dev; for ci, by hashes.
prepare() {
    local kind="$1"
    if [[ ! -f "$root/pyproject.toml" ]]; then # these scripts came along with an installation
        python="$(command -v python3)"
        return
    fi
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

# megacore train|finetune ARGUMENT...: on this node, in place of this shell.
megacore() {
    prepare run
    exec "$python" -m megacore.tools.main "$@"
}
