"""The table of Ok-Topk beside NCCL inside one host: each cell is a run."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from jobs.bench.document import BenchError
from jobs.bench.options import Options


class Cell(NamedTuple):
    """One row of the table.

    Attributes:
        length: n.
        threshold_interval: as in training with a model of this length.
        steps: measured; a multiple of the interval, so that exact steps have their share in the mean.
    """

    length: int
    density: float
    threshold_interval: int
    steps: int


CELLS = (
    Cell(14_728_266, 0.02, 32, 256),
    Cell(14_728_266, 0.01, 32, 256),
    Cell(27_569_568, 0.02, 32, 256),
    Cell(133_547_324, 0.01, 128, 256),
    Cell(133_547_324, 0.001, 128, 256),
)
"""VGG-16, VGG-16, LSTM, BERT-base, BERT-base: lengths and intervals as in the paper's experiments."""

TYPES = ("float32", "bfloat16")


def chosen(options: Options, cells: tuple[Cell, ...] = CELLS) -> list[Options]:
    """The options of each cell that was asked for, in the order in which they run.

    Raises:
        BenchError: a row's number is out of range.
    """
    for number in options.rows:
        if number > len(cells):
            raise BenchError(f"--rows {number} is not in [1, {len(cells)}]")
    kinds = (options.gradient_type,) if options.gradient_type else TYPES
    return [
        replace(
            options,
            lengths=(cell.length,),
            density=cell.density,
            steps=cell.steps,
            dense_steps=cell.steps,
            warmup=round(2 / cell.density),  # error feedback settles
            settings={"threshold_interval": cell.threshold_interval, "boundary_interval": 64},
            gradient_type=kind,
        )
        for cell in ([cells[number - 1] for number in options.rows] or cells)
        for kind in kinds
    ]
