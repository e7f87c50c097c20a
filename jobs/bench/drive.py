"""Benches that need more than one number of ranks: starts an mpiexec for each, and puts their runs into one document."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

from jobs.bench.document import BenchError, Output, command_line, document, read
from jobs.bench.options import Options
from jobs.bench.tables import sweep_table
from jobs.launch import run_job
from oktopk.launch import LaunchError, end_on_sigterm


def drive(options: Options) -> int:
    """Run an ablation or a sweep. Not under mpiexec, and before MPI is initialised in this process.

    An interrupt or a SIGTERM ends the job at work first.

    Returns:
        The exit status: 0, 2 when it cannot be done, or that of the job that failed.
    """
    end_on_sigterm()
    output: Output | None = None
    try:
        output = Output(options.json) if options.json is not None else None
        runs, library, status = _run_all(options)
        if status:
            return status
        if options.sweep_ranks:
            print(sweep_table(runs), flush=True)
        if output is not None:
            kind = "sweep" if options.sweep_ranks else "ablation"
            output.write(document(kind, runs, library, command_line(None)))
    except (BenchError, LaunchError) as error:
        print(f"jobs.bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _run_all(options: Options) -> tuple[list[dict[str, Any]], str, int]:
    """The runs so far, the MPI library, and the status of the job that failed, if any."""
    runs: list[dict[str, Any]] = []
    library = ""
    sweep = options.sweep_ranks
    # a sweep's table comes at its end; relative paths are ours, not the checkout's
    replay = options.replay and options.replay.absolute()
    child = dataclasses.replace(options, quiet=options.quiet or bool(sweep), replay=replay)
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sweep or options.ranks:
            path = Path(folder) / f"{ranks}.json"
            print(f"{ranks} ranks", file=sys.stderr, flush=True)
            status = run_job(ranks, ["-m", "jobs.bench", *child.words(), "--json", str(path)])
            if status:
                print(f"jobs.bench: the job of {ranks} ranks ended with status {status}", file=sys.stderr)
                return runs, library, status
            found = read(path)
            runs += found["runs"]
            library = found["mpi"]
    return runs, library, 0
