"""Measure every method on the same gradients: time by stage, words, messages, memory.

    mpiexec -n 4 python -m mpi4py -m jobs.bench --methods oktopk,mpi --length 14728266 --density 0.01 --json FILE
    python -m jobs.bench --ablate --json FILE                   starts mpiexec itself, on 4 and on 8 ranks
    python -m jobs.bench --sweep-ranks 2,4,8,16,32,64 --json FILE
    mpiexec -n 4 python -m mpi4py -m jobs.bench --table gpu --json FILE    against NCCL, on 4 GPUs

Rank 0 prints the tables and writes the JSON. jobs.report draws that of a sweep.

Exit status: 0; 2 when what was asked for cannot be done, with one message and before anything is measured.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import mpi4py

from data.command import show
from jobs.bench.document import BenchError


def main(argv: Sequence[str] | None = None) -> int:
    """Bench as the command line says. Under mpiexec collective; returns the exit status, the same on all ranks."""
    words = list(sys.argv[1:] if argv is None else argv)
    launched = is_launched()
    drives = not launched and any(word.split("=")[0] in ("--ablate", "--sweep-ranks") for word in words)
    if drives:
        # a process that has started MPI must not start an mpiexec
        mpi4py.rc.initialize = False
    from jobs.bench.arguments import parse, usage
    from jobs.bench.options import Options

    try:
        options: Options | str = usage() if {"-h", "--help"} & set(words) else parse(words, launched=launched)
    except BenchError as error:
        options = f"jobs.bench: {error}"
    if not drives:
        from jobs.bench.job import run

        return run(options)
    from jobs.bench.job import drive

    if isinstance(options, Options):
        return drive(options, words)
    wrong = options.startswith("jobs.bench: ")
    show(options, file=sys.stderr if wrong else sys.stdout)
    return 2 if wrong else 0


def is_launched() -> bool:
    """Whether an mpiexec, or srun, started this process."""
    return any(
        name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")
    )


if __name__ == "__main__":
    status = main()
    from jobs.restart.signals import leave

    leave(status)
