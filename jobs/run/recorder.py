"""What every rank measured in each step, brought to rank 0 every so many steps: one gather, none per step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.traffic import lower_bound, upper_bound
from jobs.run.file import PHASES
from oktopk import StepReport

_REPORTED = (
    "words",
    "messages",
    "control_words",
    "control_messages",
    "k",
    "local_nnz",
    "global_nnz",
    "local_threshold",
    "global_threshold",
    "exact",
    "skipped",
)
# Equal on all ranks, so rank 0's value stands for all; every other column is a mean.
_COMMON = ("step", "k", "global_nnz", "global_threshold", "skipped", "dense")

Columns = dict[str, NDArray[Any]]


class StepRecorder:
    """Keeps the steps since the last gather, on every rank.

    Args:
        comm: gather() is collective, add() is not.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._rows: list[dict[str, float]] = []
        self._stages: list[dict[str, float]] = []
        self._local: list[tuple[float, float]] = []
        self._measures: list[dict[str, float]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self,
        report: StepReport,
        *,
        loss: float,
        seconds: dict[str, float],
        learning_rate: float,
        elapsed: float,
    ) -> None:
        """Keep one step. seconds has every phase of PHASES."""
        row = {name: float(getattr(report, name)) for name in _REPORTED}
        row["step"] = report.step + 1.0
        row["dense"] = float(report.method == "dense")
        row["loss"] = loss
        row.update({f"seconds_{phase}": seconds[phase] for phase in PHASES})
        self._rows.append(row)
        self._stages.append(dict(report.seconds))
        self._local.append((learning_rate, elapsed))
        if report.measures is not None:
            self._measures.append(_measured(report, self._comm.size))

    def gather(self) -> tuple[Columns, dict[str, NDArray[np.float64]]] | None:
        """Collect the kept steps of all ranks and forget them.

        Returns:
            On rank 0: the columns of runfile.STEP_COLUMNS, and the seconds of each stage; else None.

        Traffic: one gather of float64[steps, columns].
        """
        if not self._rows:
            return None
        names = tuple(self._rows[0])
        # A stage that only some steps have, such as the exact threshold's, took no time in the others.
        stages = tuple(dict.fromkeys(name for step in self._stages for name in step))
        table = np.array(
            [
                [*row.values(), *(step.get(name, 0.0) for name in stages)]
                for row, step in zip(self._rows, self._stages, strict=True)
            ]
        )
        gathered = self._comm.gather((stages, table))
        local = np.array(self._local)
        self._rows, self._stages, self._local = [], [], []
        if gathered is None:
            return None
        return self._combine(names, gathered, local)

    def gather_measures(self) -> Columns | None:
        """Collect the measured steps of all ranks and forget them.

        Returns:
            On rank 0 and if there are any: the columns of runfile.MEASURE_COLUMNS; else None.

        Traffic: one gather of float64[measured steps, columns], none without any.
        """
        if not self._measures:
            return None
        names = tuple(self._measures[0])
        gathered = self._comm.gather(np.array([list(row.values()) for row in self._measures]))
        self._measures = []
        if gathered is None:
            return None
        return dict(zip(names, np.mean(gathered, axis=0).T, strict=True))

    def _combine(
        self,
        names: tuple[str, ...],
        gathered: list[tuple[tuple[str, ...], NDArray[np.float64]]],
        local: NDArray[np.float64],
    ) -> tuple[Columns, dict[str, NDArray[np.float64]]]:
        ranks = len(gathered)
        columns: Columns = {"learning_rate": local[:, 0], "elapsed": local[:, 1]}
        every = np.stack([table[:, : len(names)] for _, table in gathered])
        for position, name in enumerate(names):
            columns[name] = every[0, :, position] if name in _COMMON else every[:, :, position].mean(axis=0)
        columns["exact"] = every[:, :, names.index("exact")].max(
            axis=0
        )  # a rank may name its own threshold alone
        columns["words_busiest"] = every[:, :, names.index("words")].max(axis=0)
        stages: dict[str, NDArray[np.float64]] = {}
        for known, table in gathered:
            for position, name in enumerate(known):
                share = table[:, len(names) + position] / ranks
                stages[name] = stages[name] + share if name in stages else share
        return columns, stages


def _measured(report: StepReport, ranks: int) -> dict[str, float]:
    """A row of MEASURE_COLUMNS as this rank sees it."""
    measures, k = report.measures, report.k
    assert measures is not None
    lower, upper = lower_bound(k, ranks), upper_bound(k, ranks)
    return {
        "step": report.step + 1.0,
        "xi": measures.xi,
        "missed": measures.missed,
        "gradient_norm": measures.gradient_norm,
        "fill_in": measures.fill_in,
        "region_balance": measures.region_balance,
        "local_deviation": abs(report.local_nnz - k) / k,
        "global_deviation": abs(report.global_nnz - k) / k,
        "words_over_lower": report.words / lower if lower else math.nan,
        "words_over_upper": report.words / upper if upper else math.nan,
        "seconds": measures.seconds,
    }
