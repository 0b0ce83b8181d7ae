#!/usr/bin/env bash
# One node of a run on Kubernetes: `megacore train ARGUMENT...`, to whom the SIGTERM that ends a pod is passed on.
# A node that ends with 76 is cordoned where the pod's service account may do so; else it is said who it was.
# Where another node has heard a SIGTERM and this one has not, its ranks end with 0 too, after the same step. To whom 0 is
# the end of the job, 143 is said then, and where its status cannot be read: name the run's folder by out=FOLDER among
# the arguments.
# RETRY_AS: another status for 75 and 76, where 1 to 127 are not retried.
set -uo pipefail

# A notice may come before it is known whom to pass it on to.
launcher="" noticed=""
trap 'noticed=1; [[ -z "$launcher" ]] || kill -TERM "$launcher"' TERM
megacore train "$@" &
launcher=$!
[[ -z "$noticed" ]] || kill -TERM "$launcher"
wait "$launcher"
status=$?
while kill -0 "$launcher" 2>/dev/null; do # a signal ends the waiting, not the run
    wait "$launcher"
    status=$?
done
for argument in "$@"; do [[ "$argument" == out=* ]] && out="${argument#out=}"; done
if ((status == 0)) && [[ -n "${out:-}" ]]; then
    megacore status "$out" --done >/dev/null || status=143
fi
if ((status == 76)) && ! kubectl cordon "$NODE_NAME"; then
    echo "$NODE_NAME ended with 76, its hardware is at fault, and it could not be cordoned" >&2
fi
((status == 75 || status == 76)) && status="${RETRY_AS:-$status}"
exit "$status"
