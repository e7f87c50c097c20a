#!/usr/bin/env bash
# Runs of sim.py on all GPUs of a host at once: race.sh FOLDER OUT SECONDS
#
# FOLDER/g0, FOLDER/g1, ...: a SPEC a line, run one after the other on that GPU. Lines of OUT are
# those of sim.py, OUT.0.err what GPU 0 says. After SECONDS no run begins, and what still runs is
# ended a minute later. DATA, STEPS, P, L and D are as for sim.py.
set -u
here=$(dirname "$0")
outs=()
for list in "$1"/g*; do
    gpu=${list##*/g}
    outs+=("$2.$gpu")
    CUDA_VISIBLE_DEVICES=$gpu LIMIT=$3 timeout $(($3 + 60)) \
        xargs -a "$list" python3 "$here/sim.py" >"$2.$gpu" 2>"$2.$gpu.err" &
done
wait
cat "${outs[@]}" >"$2"
rm "${outs[@]}"
