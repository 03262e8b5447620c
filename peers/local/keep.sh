#!/bin/sh
# Keep a peer running: ./keep.sh opendiloco train ... --resume latest
#
# It is started again when it could not reach or stay in the swarm (75), and after any other failure. It is not when it
# has finished or left on request (0), and not when its settings are wrong (64): the same ones would fail again.
set -u

pause_s=${KEEP_PAUSE_S:-5}
most_s=${KEEP_MOST_S:-300}
[ $# -gt 0 ] || { echo "usage: keep.sh COMMAND [ARGUMENTS]" >&2; exit 64; }

child=
leaving=
leave() {
    leaving=yes
    [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
trap leave TERM INT HUP

wait_s=$pause_s
while :; do
    began=$(date +%s)
    "$@" &
    child=$!
    [ -z "$leaving" ] || kill -TERM "$child" # asked before there was anybody to hand it on to
    while :; do
        code=0
        wait "$child" || code=$?
        kill -0 "$child" 2>/dev/null || break # else a signal has ended the wait, not the peer
    done
    child=
    case $code in
        0 | 64) exit "$code" ;;
    esac
    [ -z "$leaving" ] || exit "$code"
    [ $(($(date +%s) - began)) -lt "$most_s" ] || wait_s=$pause_s
    echo "keep.sh: ended with $code, starts again in $wait_s s" >&2
    sleep "$wait_s" &
    child=$!
    [ -z "$leaving" ] || kill -TERM "$child"
    wait "$child" || true
    kill "$child" 2>/dev/null || true
    child=
    [ -z "$leaving" ] || exit 0
    wait_s=$((wait_s * 2))
    [ "$wait_s" -le "$most_s" ] || wait_s=$most_s
done
