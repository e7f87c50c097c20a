"""Runs the bench on the ranks of an mpiexec, or starts an mpiexec for each number of ranks."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from mpi4py import MPI

from jobs.bench.document import BenchError, Output, command_line, document, read
from jobs.bench.gpu.table import run_table
from jobs.bench.nccl import leave
from jobs.bench.options import JOB, Options
from jobs.bench.run import FAULTS, measure_run, written
from jobs.bench.tables import document_tables, sweep_table
from jobs.cluster.agreement import check_launch, decide_on_root, say
from jobs.launch import run_job
from oktopk import NonFiniteGradientError
from oktopk.launch import LaunchError, end_on_sigterm


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
        check_launch(comm, raises=BenchError)
        path = options.json
        if path is not None:
            output = decide_on_root(comm, lambda: Output(path), FAULTS, BenchError)
        if options.table == "gpu":
            run_table(options, comm, output)
            return 0
        if options.table == "hook":
            from jobs.bench.hook import measure_hooks  # torch

            kind, measured = "hook table", measure_hooks
        elif options.table == "rows":
            from jobs.bench.rows import measure_rows  # torch

            kind, measured = "rows table", measure_rows
        elif options.table == "dense":
            from jobs.bench.dense import measure_dense  # torch and CuPy

            kind, measured = "dense table", measure_dense
        else:
            kind, measured = "ablation" if options.ablate else "bench", measure_run
        runs: list[dict[str, Any]] = []
        for length in (options.length, *options.more_lengths):
            runs.append(measured(dataclasses.replace(options, length=length), comm))
            if comm.rank != 0:
                continue
            content = written(kind, runs, options, comm)
            if not options.quiet:
                print("\n" * (len(runs) > 1) + document_tables(content | {"runs": runs[-1:]}), flush=True)
            if output is not None:
                output.write(content)  # so that what is done stays when the job is cut off
    except (BenchError, NonFiniteGradientError) as error:
        say(comm, f"jobs.bench: {error}", sys.stderr)
        return 2
    return 0


def drive(options: Options, words: Sequence[str]) -> int:
    """Run an ablation or a sweep. Not under mpiexec, and before MPI is initialised in this process.

    An interrupt or a SIGTERM ends the job at work first.

    Args:
        words: the command line of the options, which the jobs get, too.

    Returns:
        The exit status: 0, 2 when it cannot be done, or that of the job that failed.
    """
    end_on_sigterm()
    runs: list[dict[str, Any]] = []
    sweep, library = options.sweep_ranks, ""
    try:
        output = Output(options.json) if options.json is not None else None
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {JOB: "1"}):
            for ranks in sweep or options.ranks:
                path = Path(folder) / f"{ranks}.json"
                print(f"{ranks} ranks", file=sys.stderr, flush=True)
                quiet = ["--quiet"] * bool(sweep)  # its table comes at its end
                status = run_job(ranks, ["-m", "jobs.bench", *words, *quiet, "--json", str(path)])
                if status:
                    print(f"jobs.bench: the job of {ranks} ranks ended with status {status}", file=sys.stderr)
                    return status
                found = read(path)
                runs += found["runs"]
                library = found["mpi"]
        if sweep:
            print(sweep_table(runs), flush=True)
        if output is not None:
            output.write(document("sweep" if sweep else "ablation", runs, library, command_line(None)))
    except (BenchError, LaunchError) as error:
        print(f"jobs.bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
