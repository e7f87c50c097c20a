"""Brings what every rank measured in its steps to rank 0: one gather for many steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from jobs.run.columns import MEASURE_COLUMNS, STEP_COLUMNS, Columns, Step, reduced, rows


class Gathered(NamedTuple):
    """Some steps, reduced over the ranks.

    Attributes:
        steps: every name of STEP_COLUMNS, each [steps].
        stages: stage -> seconds[steps], mean over the ranks; 0 in a step without it.
        measures: every name of MEASURE_COLUMNS, each [measured steps].
    """

    steps: Columns
    stages: dict[str, NDArray[np.float64]]
    measures: Columns


def gather(comm: MPI.Intracomm, steps: Sequence[Step]) -> Gathered | None:
    """Reduce the steps over the ranks. Collective.

    Args:
        comm: every rank calls with the same steps, as it measured them.
        steps: at least one.

    Returns:
        On rank 0; None elsewhere.

    Traffic: one gather of float64[steps, columns + stages].
    """
    measured = [step for step in steps if step.report.measures is not None]
    names = dict.fromkeys(name for step in steps for name in step.report.seconds)
    stages = {name: np.array([step.report.seconds.get(name, 0.0) for step in steps]) for name in names}
    gathered = comm.gather((rows(STEP_COLUMNS, steps), stages, rows(MEASURE_COLUMNS, measured)))
    if gathered is None:
        return None
    of_steps, of_stages, of_measures = zip(*gathered, strict=True)
    nothing = np.zeros(len(steps))
    return Gathered(
        reduced(STEP_COLUMNS, of_steps),
        {
            name: np.mean([mine.get(name, nothing) for mine in of_stages], axis=0)
            for name in dict.fromkeys(name for mine in of_stages for name in mine)
        },
        reduced(MEASURE_COLUMNS, of_measures),
    )
