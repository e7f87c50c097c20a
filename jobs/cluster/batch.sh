# shellcheck shell=bash
# What all batch scripts share: start the ranks as this site wants it, hand signals on, queue the job again when it asks for it.

# Slurm sends USR1 before the time limit (--signal) and TERM when it ends or preempts the job. From the first line on neither kills
# this script. srun and mpiexec hand USR1 and USR2 on to the ranks; TERM would end them.
SIGNALLED="" CHILD="" HANDED_ON=no
# What came, and what the ranks get.
hand_on() {
  SIGNALLED=$1
  [ -n "$CHILD" ] || return
  HANDED_ON=yes
  kill "-$2" "$CHILD" 2>/dev/null
}
trap 'hand_on USR1 USR1' USR1
trap 'hand_on TERM USR1' TERM
trap '[ -z "$CHILD" ] || hand_on USR2 USR2' USR2 # ranks that are not there have no stacks to show

cd "${SLURM_SUBMIT_DIR:?submit me from the root of the checkout: jobs/cluster/submit.sh jobs/cluster/NAME.sbatch}" || exit 2
# shellcheck source=jobs/cluster/site.sh
source "${OKTOPK_SITE:-jobs/cluster/site.sh}"
load_modules
# Ranks compare it with their communicator. SLURM_NTASKS itself will not do: mpiexec's daemons are a step of their own.
export OKTOPK_RANKS="$SLURM_NTASKS"
export OKTOPK_ENDED=""
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
# Since Slurm 22.05 srun does not take it from the job any more.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
# Open MPI's mpiexec (5, 4) would bind each rank with all its threads to one core, and another job's to the same one.
export PRTE_MCA_hwloc_default_binding_policy="${PRTE_MCA_hwloc_default_binding_policy:-none}"
export OMPI_MCA_hwloc_base_binding_policy="${OMPI_MCA_hwloc_base_binding_policy:-none}"

KILLED_BY_USR1=$((128 + $(kill -l USR1))) KILLED_BY_USR2=$((128 + $(kill -l USR2)))
AGAIN=75 # exit status of a job that stopped with a checkpoint, see jobs/restart/signals.py

# A signal that comes while Python starts waits until it is listened to, where env can do that (coreutils 8.31).
SHIELD=()
env --block-signal=USR1,USR2 true 2>/dev/null && SHIELD=(env --block-signal=USR1,USR2)

# The words that start the ranks, into COMMAND.
command_for() {
  local rank=("${CONTAINER[@]}" "${SHIELD[@]}" "$PYTHON" -m mpi4py)
  case $1 in
    srun-*)
      local gpus=()
      # every rank sees all GPUs of its node, so that neighbours can reach each other's memory
      [ "$GPUS_PER_RANK" -eq 0 ] || gpus=("--gpus-per-task=$GPUS_PER_RANK" --gpu-bind=none)
      COMMAND=(srun "--mpi=${1#srun-}" --kill-on-bad-exit=1 "${gpus[@]}" "${rank[@]}")
      ;;
    mpiexec) COMMAND=("$MPIEXEC" -n "$SLURM_NTASKS" "${rank[@]}") ;;
    *)
      echo "LAUNCHER=$1 is not one of auto, srun-pmix, srun-pmi2, mpiexec" >&2
      exit 2
      ;;
  esac
}

# Set COMMAND by LAUNCHER, unless a signal comes first.
choose_launcher() {
  if [ "$LAUNCHER" != auto ]; then
    command_for "$LAUNCHER"
    return
  fi
  local tried answer plugins
  plugins=$(srun --mpi=list 2>&1)
  for tried in srun-pmix srun-pmi2 mpiexec; do
    # a plugin that this Slurm lacks need not be tried
    [[ $tried == mpiexec || $plugins == *"${tried#srun-}"* ]] || continue
    [ -z "$SIGNALLED" ] || return
    command_for "$tried"
    if answer=$(timeout -k 10 60 "${COMMAND[@]}" -m jobs.cluster.rank_check 2>&1); then
      echo "launcher: $tried ($SLURM_NTASKS ranks on $SLURM_JOB_NODELIST)"
      return
    fi
    printf '%s does not start %s ranks that see each other:\n%s\n' "$tried" "$SLURM_NTASKS" "$answer" >&2
  done
  [ -z "$SIGNALLED" ] || return
  echo "no launcher works here: see docs/cluster.md" >&2
  exit 2
}

# Queue the job again, which stopped as these words say, unless it was cancelled.
queue_again() {
  # Slurm itself ends the job, not for its time: a user did. What it preempts without notice it queues again.
  if [[ $(squeue -h -j "$SLURM_JOB_ID" -o "%T %r") =~ ^COMPLETING\ (.*) && ${BASH_REMATCH[1]} != TimeLimit ]]; then
    echo "job $SLURM_JOB_ID was cancelled and stopped $1: submit it once more to continue"
    return
  fi
  echo "job $SLURM_JOB_ID stopped $1: queued again"
  trap '' TERM USR1 # requeueing ends this script
  scontrol requeue "$SLURM_JOB_ID" || echo "it could not be queued again: submit it once more to continue" >&2
}

# Run the words on all ranks and leave with their status; queue the job again if they stopped with a checkpoint.
run_ranks() {
  local status=0 before interrupted=no
  choose_launcher
  if [ -n "$SIGNALLED" ]; then
    queue_again "before its ranks were started"
    exit "$AGAIN"
  fi
  "${COMMAND[@]}" "$@" &
  CHILD=$!
  [ -z "$SIGNALLED" ] || hand_on "$SIGNALLED" USR1 # it came before the child was known
  while :; do
    SIGNALLED="" before=$status
    wait "$CHILD"
    status=$?
    [ -n "$SIGNALLED" ] || break # a wait that a signal ended says nothing about the ranks
    interrupted=yes
  done
  # unless they had ended with it: then there is nothing left to wait for, and it had their status
  [ "$status" -ne 127 ] || [ "$interrupted" = no ] || status=$before
  [ "$status" -ne "$AGAIN" ] || queue_again "with a checkpoint"
  # what was handed on killed the launcher: it was not listening yet
  if [ "$HANDED_ON" = yes ] && [[ $status -eq $KILLED_BY_USR1 || $status -eq $KILLED_BY_USR2 ]]; then
    queue_again "as its launcher was killed by a signal that was for the ranks"
    status=$AGAIN
  fi
  if [ "$status" -eq 0 ] && [ -n "$OKTOPK_ENDED" ] && ! rm "$OKTOPK_ENDED" 2>/dev/null; then
    echo "job $SLURM_JOB_ID: the launcher ended without an error, but the training did not end: submit it once more" >&2
    status=1
  fi
  exit "$status"
}

# Run a training on all ranks.
run_training() {
  # Open MPI's mpiexec leaves with 0 when it loses a node: so the training says itself that it has come to its end.
  mkdir -p "$RUNS"
  export OKTOPK_ENDED="$RUNS/.ended-$SLURM_JOB_ID"
  rm -f "$OKTOPK_ENDED"
  run_ranks "$@"
}

# train NAME CONFIG.toml [section.key=value ...]: into the run file NAME, unless the arguments say otherwise.
train() {
  run_training -m jobs.train "$2" --set "run.file=$RUNS/$1.h5" "${@:3}"
}
