#!/usr/bin/env bash
# Runs the tests, after making .venv if it is not there. Arguments go on to pytest: ./launch/test.sh -k layout -x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

prepare dev
cd "$root"
# Here the working folder is meant: tests of a changed copy of the tree (sensitivity.py) import that copy. Hundreds of
# processes import the same files, which the first one compiles, also where images tell Python to keep nothing of that.
exec env -u PYTHONSAFEPATH -u PYTHONDONTWRITEBYTECODE "$python" -m pytest "$@"
