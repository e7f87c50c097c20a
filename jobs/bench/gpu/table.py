"""All cells of the table in one launch: each is a run of its own, written as soon as it is done."""

from __future__ import annotations

import sys
import time
from typing import Any

from mpi4py import MPI

from jobs.bench.document import Output
from jobs.bench.gpu.markdown import cell_line, gpu_tables
from jobs.bench.gpu.targets import CELLS, Cell, chosen, target
from jobs.bench.options import Options
from jobs.bench.run import measure_run, say, written

KIND = "gpu table"


def run_table(
    options: Options, comm: MPI.Intracomm, output: Output | None, cells: tuple[Cell, ...] = CELLS
) -> dict[str, Any]:
    """Measure the cells that the options name, as far as the budget goes. Collective.

    Args:
        output: written after each cell, so that what is done stays when the job is cut off; on rank 0.

    Returns:
        The document, on rank 0.

    Raises:
        BenchError: it cannot be done; on every rank alike.
    """
    began = time.monotonic()
    todo = chosen(options, cells)
    runs: list[dict[str, Any]] = []
    content: dict[str, Any] = {}
    longest = 0.0
    for number, (cell, of_cell) in enumerate(todo):
        spent = time.monotonic() - began
        # one that would not end in time is not begun; rank 0's clock counts
        if comm.bcast(number > 0 and spent + longest > options.budget):
            say(
                comm,
                f"{len(todo) - number} of {len(todo)} cells were not begun: {spent:.0f} s are gone, a cell took up to "
                f"{longest:.0f} s and the budget is {options.budget:g} s",
                sys.stderr,
            )
            break
        result = _measure_cell(of_cell, cell, comm)
        seconds = time.monotonic() - began - spent
        longest = max(longest, seconds)
        if comm.rank != 0:
            continue
        runs.append({**result, "seconds_taken": seconds})
        content = written(KIND, runs, options, comm) | {"cells": len(todo)}
        say(comm, cell_line(runs[-1]), sys.stderr)
        if output is not None:
            output.write(content)
    if content and not options.quiet:
        print(gpu_tables(content), flush=True)
    return content


def _measure_cell(options: Options, cell: Cell, comm: MPI.Intracomm) -> dict[str, Any]:
    """A run with its target, and with the select kernel alone where that runs on a GPU. Collective."""
    result = measure_run(options, comm)
    select = None
    if options.device == "cuda":
        from jobs.bench.gpu.device import Cuda
        from jobs.bench.gpu.speeds import select_record

        copy = comm.bcast(result["speeds"]["memory"] if comm.rank == 0 else None)
        assert options.length is not None
        select = select_record(comm, options.length, options.density, options.gradient_type, copy)
        Cuda().release()
    own_gpu = result["ranks_per_device"] == 1
    return {
        **result,
        "methods": [_shortened(method) for method in result["methods"]],
        "target": target(cell, options.gradient_type, comm.size) if own_gpu else None,
        "select": select,
    }


def _shortened(method: dict[str, Any]) -> dict[str, Any]:
    """Without the series that nobody draws: ten cells of them are megabytes."""
    kept = ("seconds", "exact", "words", "global_nnz") if method["name"] == "oktopk" else ("seconds", "exact")
    return {**method, "series": {name: method["series"][name] for name in kept}}
