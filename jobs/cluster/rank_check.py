"""Checks that launcher and MPI agree on the number of ranks. Imports no torch, which takes seconds.

    srun --mpi=pmix python -m mpi4py -m jobs.cluster.rank_check

The classic trap: a launcher of another MPI starts N processes, each of which takes itself for the only rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import numpy as np
from mpi4py import MPI

from data.command import show
from jobs.restart.signals import leave

ELEMENTS = 1 << 20  # enough for the protocol of large messages


def launch_problem(size: int, environ: Mapping[str, str]) -> str:
    """What is wrong with the number of ranks, in a sentence; "" if nothing is.

    Args:
        size: of the communicator.
        environ: of rank 0.
    """
    for name, who in _WITNESSES:
        started = environ.get(name, "")
        if not started.isdigit():
            continue
        if int(started) == size:
            return ""
        library = MPI.Get_library_version().rstrip("\0").splitlines()[0].strip()
        why = (
            f"they belong to different MPI installations (mpi4py uses {library})"
            if size == 1
            else f"start the job with as many, or unset {name}"
        )
        return f"{who} started {started} ranks, but mpi4py's MPI sees {size}: {why}"
    return ""


# Who knows best comes first. Under mpiexec SLURM_NTASKS counts the daemons that it started on the nodes.
_WITNESSES = (
    ("OKTOPK_RANKS", "the batch script"),
    ("OMPI_COMM_WORLD_SIZE", "mpiexec"),
    ("PMI_SIZE", "mpiexec"),
    ("SLURM_NTASKS", "Slurm"),
)


def main(comm: MPI.Intracomm = MPI.COMM_WORLD) -> int:
    """Check the number of ranks and that they reach each other; returns the exit status, the same on all ranks."""
    problem = launch_problem(comm.size, os.environ)
    expected = comm.size * (comm.size + 1) // 2
    total = np.full(ELEMENTS, comm.rank + 1, np.int64)
    comm.Allreduce(MPI.IN_PLACE, total)
    wrong = np.flatnonzero(total != expected)
    difference = f"{total[wrong[0]]} at {wrong[0]}" if len(wrong) else ""
    # small messages may arrive where large ones do not
    sums = comm.allgather(difference)
    if any(sums) and not problem:
        named = ", ".join(f"{text} on rank {rank}" for rank, text in enumerate(sums) if text)
        problem = (
            f"an Allreduce of {ELEMENTS} integers over {comm.size} ranks gave {named}: {expected} is right"
        )
    problem = comm.bcast(problem)
    if problem and comm.rank == 0:
        show(problem, file=sys.stderr, flush=True)
    return 2 if problem else 0


if __name__ == "__main__":
    leave(main())
