"""Runs the bench on the ranks of an mpiexec, or starts an mpiexec for each number of ranks."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from mpi4py import MPI

from data.command import show
from jobs.bench.document import BenchError, Output, command_line, document, read
from jobs.bench.gpu.table import chosen
from jobs.bench.nccl import leave
from jobs.bench.options import JOB, Options
from jobs.bench.run import FAULTS, measure_run, written
from jobs.bench.tables import cell_line, document_tables
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
    status = run_all(partial(_todo, options, comm), options, comm)
    leave()  # not after an exception: a rank that is alone would wait for the others
    return status


Measure = Callable[[], dict[str, Any]]
"""Measures one run, collectively, and returns it as it stands in the document, on rank 0."""


def run_all(todo: Callable[[], tuple[str, list[Measure]]], options: Options, comm: MPI.Intracomm) -> int:
    """Measure runs, print their tables and write the document, for the bench and for scripts beside results. Collective.

    Args:
        todo: gives the kind of the document, and its runs; may raise BenchError on every rank alike.
        options: of these budget, json, quiet, commit, device and module are read.

    Returns:
        The exit status, the same on all ranks: 0, or 2 with one message.
    """
    output: Output | None = None
    try:
        check_launch(comm, raises=BenchError)
        path = options.json
        if path is not None:
            output = decide_on_root(comm, lambda: Output(path), FAULTS, BenchError)
        measure_all(*todo(), options, comm, output)
    except (BenchError, NonFiniteGradientError) as error:
        say(comm, f"{options.module}: {error}", sys.stderr)
        return 2
    return 0


def _todo(options: Options, comm: MPI.Intracomm) -> tuple[str, list[Measure]]:
    """The kind of the document, and its runs."""
    if options.table == "gpu":
        return "gpu table", [partial(measure_run, own, comm) for own in chosen(options)]
    each = [dataclasses.replace(options, lengths=(length,)) for length in options.lengths]
    return "ablation" if options.ablate else "bench", [partial(measure_run, own, comm) for own in each]


def measure_all(
    kind: str, todo: Sequence[Measure], options: Options, comm: MPI.Intracomm, output: Output | None
) -> dict[str, Any]:
    """Measure runs one after another, as far as the budget goes. Collective.

    Args:
        kind: of the document.
        todo: the runs.
        output: written after each, so that what is done stays when the job is cut off; on rank 0.

    Returns:
        The document, on rank 0.

    Raises:
        BenchError: it cannot be done; on every rank alike.
    """
    began, longest = time.monotonic(), 0.0
    runs: list[dict[str, Any]] = []
    content: dict[str, Any] = {}
    for number, measure in enumerate(todo):
        spent = time.monotonic() - began
        # one that would not end in time is not begun; rank 0's clock counts
        if comm.bcast(number > 0 and spent + longest > options.budget):
            said = f"{len(todo) - number} of {len(todo)} cells were not begun: {spent:.0f} s are gone, a cell took up to "
            say(comm, f"{said}{longest:.0f} s and the budget is {options.budget:g} s", sys.stderr)
            break
        result = measure()
        seconds = time.monotonic() - began - spent
        longest = max(longest, seconds)
        if comm.rank != 0:
            continue
        runs.append({**result, "seconds_taken": seconds})
        content = written(kind, runs, options, comm) | {"cells": len(todo)}
        if kind == "gpu table":
            say(comm, cell_line(runs[-1]), sys.stderr)
        elif not options.quiet:
            show("\n" * (number > 0) + document_tables(content | {"runs": runs[-1:]}), flush=True)
        if output is not None:
            output.write(content)
    if content and kind == "gpu table" and not options.quiet:
        show(document_tables(content), flush=True)
    return content


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
                show(f"{ranks} ranks", file=sys.stderr, flush=True)
                quiet = ["--quiet"] * bool(sweep)  # its table comes at its end
                status = run_job(ranks, ["-m", "jobs.bench", *words, *quiet, "--json", str(path)])
                if status:
                    show(f"jobs.bench: the job of {ranks} ranks ended with status {status}", file=sys.stderr)
                    return status
                found = read(path)
                runs += found["runs"]
                library = found["mpi"]
        if sweep:
            show(document_tables({"kind": "sweep", "runs": runs}), flush=True)
        if output is not None:
            output.write(
                document("sweep" if sweep else "ablation", runs, library, command_line(None, options.module))
            )
    except (BenchError, LaunchError) as error:
        show(f"jobs.bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
