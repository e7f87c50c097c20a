"""The bench on the ranks of an mpiexec: one run, or the table of GPUs."""

from __future__ import annotations

import os
import sys

from mpi4py import MPI

from jobs.bench.document import BenchError, Output
from jobs.bench.gpu.table import run_table
from jobs.bench.nccl import leave
from jobs.bench.options import Options
from jobs.bench.run import measure_run, say, together, written
from jobs.bench.tables import run_tables
from jobs.cluster.rank_check import launch_problem
from oktopk import NonFiniteGradientError


def run(options: Options | str, comm: MPI.Intracomm = MPI.COMM_WORLD) -> int:
    """Measure what rank 0's options ask for; collective.

    Args:
        options: or a text to print instead of measuring: the usage, or what is wrong with the command line.

    Returns:
        The exit status, the same on all ranks.
    """
    options = comm.bcast(options)
    if isinstance(options, str):
        wrong = options.startswith("jobs.bench: ")
        say(comm, options, sys.stderr if wrong else sys.stdout)
        return 2 if wrong else 0
    status = _run(options, comm)
    leave()  # not after an exception: a rank that is alone would wait for the others
    return status


def _run(options: Options, comm: MPI.Intracomm) -> int:
    output: Output | None = None
    try:
        _check_launch(comm)
        path = options.json
        if path is not None:
            output = together(comm, lambda: Output(path) if comm.rank == 0 else None)
        if options.table:
            run_table(options, comm, output)
            return 0
        result = measure_run(options, comm)
        if comm.rank == 0:
            if not options.quiet:
                print(run_tables(result), flush=True)
            if output is not None:
                kind = "ablation" if options.ablate else "bench"
                output.write(written(kind, [result], options, comm))
    except (BenchError, NonFiniteGradientError) as error:
        say(comm, f"jobs.bench: {error}", sys.stderr)
        return 2
    return 0


def _check_launch(comm: MPI.Intracomm) -> None:
    """Refuse to run as many jobs of one rank each, which is what a launcher of another MPI makes of a job."""
    problem = comm.bcast(launch_problem(MPI.COMM_WORLD.size, os.environ) if comm.rank == 0 else None)
    if problem:
        raise BenchError(problem)
