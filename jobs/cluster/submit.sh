#!/usr/bin/env bash
# Queue a batch script with the settings of jobs/cluster/site.sh, from the checkout's root:
#
#     jobs/cluster/submit.sh [sbatch options] jobs/cluster/train.sbatch CONFIG.toml [section.key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=jobs/cluster/site.sh
source "${OKTOPK_SITE:-jobs/cluster/site.sh}"
# The environment overrides the #SBATCH lines of a script, and options of the command line override both.
[ -z "$PARTITION" ] || export SBATCH_PARTITION="$PARTITION"
[ -z "$ACCOUNT" ] || export SBATCH_ACCOUNT="$ACCOUNT"
[ -z "$QOS" ] || export SBATCH_QOS="$QOS"
[ "$GPUS_PER_RANK" -eq 0 ] || export SBATCH_GPUS_PER_TASK="$GPUS_PER_RANK"
mkdir -p runs "$RUNS" # Slurm opens the output in the first, and fails in silence where it cannot
exec sbatch "$@"
