"""The table that Ok-Topk on GPUs is held to: each cell a length, a density and a gradient type, with its target."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jobs.bench.document import BASELINES, BenchError
from jobs.bench.options import Options

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
    Cell(14_728_266, 0.02, 32, 256, {"float32": 1.6, "bfloat16": 1.0}),
    Cell(14_728_266, 0.01, 32, 256, {"float32": 1.7, "bfloat16": 1.1}),
    Cell(27_569_568, 0.02, 32, 256, {"float32": 2.0, "bfloat16": 1.2}),
    Cell(133_547_324, 0.01, 128, 256, {"float32": 3.2, "bfloat16": 2.0}),
    Cell(133_547_324, 0.001, 128, 256, {"float32": 4.0, "bfloat16": 2.5}),
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
    return [(cell, _options(options, cell, kind)) for cell in rows for kind in options.types or TYPES]


def _options(options: Options, cell: Cell, gradient_type: str) -> Options:
    return replace(
        options,
        length=cell.length,
        density=cell.density,
        steps=cell.steps,
        dense_steps=cell.steps,
        warmup=round(2 / cell.density),  # error feedback settles
        settings={"threshold_interval": cell.threshold_interval, "boundary_interval": 64},
        gradient_type=gradient_type,
    )


def target(cell: Cell, gradient_type: str, ranks: int) -> dict[str, float | str] | None:
    """What the cell is held to, None where nothing is promised for so many ranks."""
    if ranks != TARGET_RANKS or gradient_type not in cell.targets:
        return None
    return {"against": BASELINES[gradient_type], "at_least": cell.targets[gradient_type]}
