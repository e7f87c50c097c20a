# shellcheck shell=bash disable=SC2034
# What differs from site to site: the one file to edit. jobs/cluster/submit.sh and every batch script read it.

# The queue. Empty: the site's default.
PARTITION=""            # sinfo -s
ACCOUNT=""              # sacctmgr show associations user=$USER
QOS=""

# Where run files and checkpoints go: a file system that all nodes share and that holds some copies of the model.
RUNS=runs

# 1 where each rank computes on a GPU of its own, 0 on CPUs.
GPUS_PER_RANK=0

# How ranks are started: srun-pmix, srun-pmi2 or mpiexec. auto: the first of these that starts as many ranks as the job has,
# tried at the beginning of every job, which takes seconds.
LAUNCHER=auto

# The interpreter that has oktopk's requirements, and its mpiexec if there is one.
PYTHON=.venv/bin/python
MPIEXEC="$(dirname "$PYTHON")/mpiexec"
[ -x "$MPIEXEC" ] || MPIEXEC=mpiexec

# Put in front of the interpreter on every rank.
CONTAINER=()            # for instance (apptainer exec --nv /path/to/image.sif)

# Run once in the batch script, before anything else.
load_modules() {
  :                     # for instance: module load openmpi/5 cuda/12.6
}
