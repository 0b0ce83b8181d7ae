#!/usr/bin/env bash
# One node of a run on Kubernetes: `megacore train ARGUMENT...`, to whom the SIGTERM that ends a pod is passed on.
# A node that ends with 76 is cordoned where the pod's service account may do so; else it is said who it was.
# RETRY_AS: another status for 75 and 76, where 1 to 127 are not retried.
set -uo pipefail

trap 'kill -TERM "$launcher"' TERM
megacore train "$@" &
launcher=$!
wait "$launcher"
status=$?
while kill -0 "$launcher" 2>/dev/null; do # a signal ends the waiting, not the run
    wait "$launcher"
    status=$?
done
if ((status == 76)) && ! kubectl cordon "$NODE_NAME"; then
    echo "$NODE_NAME ended with 76, its hardware is at fault, and it could not be cordoned" >&2
fi
((status == 75 || status == 76)) && status="${RETRY_AS:-$status}"
exit "$status"
