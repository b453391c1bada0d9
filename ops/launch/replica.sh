#!/bin/sh
# Keep one replica running: start it again where that helps, and end where it does not.
#
#   replica.sh train.py [ARGUMENT ...]       RANKS=8 for a replica of eight processes
#
# A trainer's exit code says what to do: 0 finished, 75 restart me, 1 do not. torchrun makes 1 of both 75 and 1. So
# each rank writes its own code down here, and torchrun restarts nothing itself.
#
#   exit code 0    the job has finished, or the replica was drained
#   exit code 1    a restart does not help: a rank ended with 1
#   exit code 75   the replica was drained for the file LEAVE_FILE: start it again elsewhere
#   126, 127       the trainer could not be started
#   143            this script was told to end
set -u

codes=$(mktemp -d) || exit 126
child=
ends=
trap 'rm -rf "$codes"' EXIT
trap 'ends=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM INT

# $LOCAL_RANK and "$@" are those of the rank.
# shellcheck disable=SC2016
rank='"$@"; code=$?; echo "$code" > "$CODES/$LOCAL_RANK"; exit "$code"'

pause=1
while [ -z "$ends" ]; do
    rm -f "$codes"/*
    began=$(date +%s)
    CODES=$codes torchrun --standalone --nproc-per-node="${RANKS:-1}" --max-restarts=0 --no-python \
        sh -c "$rank" rank fabric run "$@" &
    child=$!
    wait "$child"
    code=$?
    # A signal ends the wait, and not the child.
    while kill -0 "$child" 2>/dev/null; do
        wait "$child"
        code=$?
    done
    child=
    [ -z "$ends" ] || break
    case $code in
        0)
            [ -n "${LEAVE_FILE:-}" ] && [ -e "$LEAVE_FILE" ] && exit 75
            exit 0
            ;;
        126 | 127)
            echo "replica ${FABRIC_REPLICA:-}: torchrun cannot be started, exit code $code: see its message" >&2
            exit "$code"
            ;;
    esac
    if grep -qx 1 "$codes"/* 2>/dev/null; then
        echo "replica ${FABRIC_REPLICA:-}: its trainer says that a restart does not help: see its last sentence" >&2
        exit 1
    fi
    [ $(($(date +%s) - began)) -lt 60 ] || pause=1
    echo "replica ${FABRIC_REPLICA:-}: ended with $(cat "$codes"/* 2>/dev/null | tr '\n' ' '), again in $pause s" >&2
    sleep "$pause" &
    child=$!
    wait "$child"
    child=
    pause=$((pause * 2 > 30 ? 30 : pause * 2))
done
exit 143
