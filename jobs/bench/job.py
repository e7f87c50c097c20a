"""Runs the bench on the ranks of an mpiexec."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpi4py import MPI

from data.command import show
from jobs.bench.document import BenchError, Output
from jobs.bench.gpu.table import chosen
from jobs.bench.nccl import leave
from jobs.bench.options import Options, parse, parser
from jobs.bench.run import FAULTS, measure_run, written
from jobs.bench.tables import cells_table, document_tables
from jobs.cluster.agreement import check_launch, decide_on_root, say
from oktopk import NonFiniteGradientError


def run(words: Sequence[str], comm: MPI.Intracomm = MPI.COMM_WORLD) -> int:
    """Measure what rank 0's command line asks for; collective. Returns the exit status, the same on all ranks."""
    if comm.bcast(bool({"-h", "--help"} & {*words})):
        say(comm, parser().format_help(), sys.stdout)
        return 0
    try:
        options = decide_on_root(comm, lambda: parse(words), (BenchError,), BenchError)
    except BenchError as error:
        say(comm, f"jobs.bench: {error}")
        return 2
    status = run_all(partial(_todo, options, comm), options, comm)
    leave()  # not after an exception: a rank that is alone would wait for the others
    return status


Measure = Callable[[], dict[str, Any]]
"""Measures one run, collectively, and returns it as it stands in the document, on rank 0."""


def run_all(todo: Callable[[], tuple[str, list[Measure]]], options: Options, comm: MPI.Intracomm) -> int:
    """Measure runs, print their tables and write the document, for the bench and for scripts beside results. Collective.

    Args:
        todo: gives the kind of the document, and its runs; may raise BenchError on every rank alike.
        options: of these json, quiet, commit, device and module are read.

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
        say(comm, f"{options.module}: {error}")
        return 2
    return 0


def _todo(options: Options, comm: MPI.Intracomm) -> tuple[str, list[Measure]]:
    """The kind of the document, and its runs."""
    if options.table == "gpu":
        return "gpu table", [partial(measure_run, own, comm) for own in chosen(options)]
    if options.ablate and comm.size == 1:
        raise BenchError("--ablate is not for one rank, which sends nothing: start two or more")
    each = [dataclasses.replace(options, lengths=(length,)) for length in options.lengths]
    return "ablation" if options.ablate else "bench", [partial(measure_run, own, comm) for own in each]


def measure_all(
    kind: str, todo: Sequence[Measure], options: Options, comm: MPI.Intracomm, output: Output | None
) -> None:
    """Measure runs one after another, print the tables of each, and at the end the table of all cells. Collective.

    Args:
        kind: of the document.
        todo: the runs.
        output: written after each, so that what is done stays when the job is cut off; on rank 0.

    Raises:
        BenchError: it cannot be done; on every rank alike.
    """
    runs: list[dict[str, Any]] = []
    for measure in todo:
        began = time.monotonic()
        result = measure()
        if comm.rank != 0:
            continue
        runs.append({**result, "seconds_taken": time.monotonic() - began})
        content = written(kind, runs, options, comm) | {"cells": len(todo)}
        if not options.quiet:
            show("\n" * (len(runs) > 1) + document_tables(content | {"runs": runs[-1:]}), flush=True)
        if output is not None:
            output.write(content)
    if kind == "gpu table" and len(runs) > 1 and not options.quiet:
        show(f"\n{cells_table({'runs': runs})}", flush=True)
