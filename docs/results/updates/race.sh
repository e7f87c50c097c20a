#!/usr/bin/env bash
# Runs of sim.py on all GPUs of a host at once: race.sh FOLDER OUT SECONDS
#
# FOLDER/g0, FOLDER/g1, ...: what one GPU runs, a line after the other, each in a process of its own:
# workers, layers, channels, then specs of sim.py. Lines of OUT are those of sim.py, OUT.0.err what
# GPU 0 says. After SECONDS no run begins, and what still runs is ended a minute later. DATA and
# STEPS are as for sim.py.
set -u
here=$(dirname "$0")
begun=$(date +%s)
outs=()
race() {
    local workers layers channels specs left
    while read -r workers layers channels specs || [ -n "$workers" ]; do
        left=$(($2 - $(date +%s) + begun))
        [ "$left" -gt 0 ] || continue
        # shellcheck disable=SC2086  # specs have no blanks
        P=$workers L=$layers D=$channels LIMIT=$left timeout $((left + 60)) \
            python3 "$here/sim.py" $specs </dev/null
    done <"$1"
}
for list in "$1"/g*; do
    gpu=${list##*/g}
    outs+=("$2.$gpu")
    CUDA_VISIBLE_DEVICES=$gpu race "$list" "$3" >"$2.$gpu" 2>"$2.$gpu.err" &
done
wait
cat "${outs[@]}" >"$2"
rm "${outs[@]}"
