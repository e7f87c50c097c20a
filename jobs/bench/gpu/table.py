"""The table of GPU targets: each cell is a run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from mpi4py import MPI

from jobs.bench.document import BASELINES, BenchError
from jobs.bench.options import Options
from jobs.bench.run import measure_run

TARGET_RANKS = 4
"""The targets are for this many ranks, a GPU each."""


@dataclass(frozen=True)
class Cell:
    """One row of the table.

    Attributes:
        length: n.
        threshold_interval: as in training with a model of this length.
        steps: measured; a multiple of the interval, so that exact steps have their share in the mean.
        targets: gradient type -> times that NCCL's dense allreduce of it takes, at least, of a mean step.
    """

    length: int
    density: float
    threshold_interval: int
    steps: int
    targets: dict[str, float] = field(default_factory=dict)


CELLS = (
    Cell(14_728_266, 0.02, 32, 256, {"float32": 1.8, "bfloat16": 1.25}),
    Cell(14_728_266, 0.01, 32, 256, {"float32": 2.1, "bfloat16": 1.3}),
    Cell(27_569_568, 0.02, 32, 256, {"float32": 2.2, "bfloat16": 1.3}),
    Cell(133_547_324, 0.01, 128, 256, {"float32": 3.3, "bfloat16": 2.0}),
    Cell(133_547_324, 0.001, 128, 256, {"float32": 4.2, "bfloat16": 2.5}),
)
"""VGG-16, VGG-16, LSTM, BERT-base, BERT-base: lengths and intervals as in the paper's experiments."""

TYPES = ("float32", "bfloat16")


def chosen(options: Options, cells: tuple[Cell, ...] = CELLS) -> list[tuple[Cell, Options]]:
    """The cells that were asked for, in the order in which they run, each with the options of a run of its own.

    Raises:
        BenchError: a row's number is out of range.
    """
    for number in options.rows:
        if number > len(cells):
            raise BenchError(f"--rows {number} is not in [1, {len(cells)}]")
    rows = [cells[number - 1] for number in options.rows] or list(cells)
    kinds = (options.gradient_type,) if options.gradient_type else TYPES
    return [(cell, _options(options, cell, kind)) for cell in rows for kind in kinds]


def _options(options: Options, cell: Cell, gradient_type: str) -> Options:
    return replace(
        options,
        lengths=(cell.length,),
        density=cell.density,
        steps=cell.steps,
        dense_steps=cell.steps,
        warmup=round(2 / cell.density),  # error feedback settles
        settings={"threshold_interval": cell.threshold_interval, "boundary_interval": 64},
        gradient_type=gradient_type,
    )


def target(cell: Cell, gradient_type: str, ranks: int) -> dict[str, float | str] | None:
    """The cell's target; None where there is none for so many ranks."""
    if ranks != TARGET_RANKS or gradient_type not in cell.targets:
        return None
    return {"against": BASELINES[gradient_type], "at_least": cell.targets[gradient_type]}


def measure_cell(cell: Cell, options: Options, comm: MPI.Intracomm) -> dict[str, Any]:
    """A run with its target, and with the select kernel alone where that runs on a GPU. Collective.

    Raises:
        BenchError: it cannot be done; on every rank alike.
    """
    result = measure_run(options, comm)
    select = None
    if options.device == "cuda":
        from jobs.bench.gpu.device import Cuda
        from jobs.bench.gpu.speeds import select_record

        copy = comm.bcast(result["speeds"]["memory"] if comm.rank == 0 else None)
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
