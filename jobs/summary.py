"""A run as the report sees it: read once, summed up in a handful of figures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.traffic import dense_words, lower_bound, upper_bound
from jobs.runfile import PHASES, RunFileError, RunInfo
from jobs.runreader import RunReader

TITLES = {
    "dense": "Dense",
    "oktopk": "Ok-Topk",
    "topka": "TopkA",
    "topkdsa": "TopkDSA",
    "gtopk": "gTopk",
    "gaussiank": "Gaussiank",
}


@dataclass(frozen=True, eq=False)
class Run:
    """What a run file held when it was read.

    label tells this run from the others of a report, stem does so in file names. The rest is what RunReader
    gives.
    """

    label: str
    stem: str
    path: Path
    info: RunInfo
    status: str
    steps: dict[str, NDArray[Any]]
    stages: dict[str, NDArray[np.float64]]
    evaluations: dict[str, NDArray[Any]]

    @property
    def count(self) -> int:
        """Steps on record."""
        return len(self.steps["step"])

    @property
    def sparse(self) -> NDArray[np.bool_]:
        """bool[count]: steps in which a sparse method did its work, so no dense warm-up and none skipped."""
        return (self.steps["dense"] == 0) & (self.steps["skipped"] == 0)

    @property
    def words_sent(self) -> NDArray[np.float64]:
        """float64[count]: payload words sent per rank from the first step on."""
        return np.cumsum(self.steps["words"])

    @property
    def lower_bound(self) -> float | None:
        """2k(P-1)/P words per step; None where no step was sparse or nothing is sent."""
        return lower_bound(self.info.k, self.info.ranks) or None if self.sparse.any() else None

    @property
    def upper_bound(self) -> float | None:
        """6k(P-1)/P words per step, which only Ok-Topk promises; None as for lower_bound."""
        promised = self.info.method == "oktopk" and self.sparse.any()
        return upper_bound(self.info.k, self.info.ranks) or None if promised else None

    @property
    def dense_words(self) -> float | None:
        """2n(P-1)/P words per step; None where nothing is sent."""
        return dense_words(self.info.length, self.info.ranks) or None


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Read run files, running, killed or complete, and give each a label of its own.

    Raises:
        RunFileError: a missing file, one that is no run file, or the same one twice.
    """
    runs: list[Run] = []
    for path in map(Path, paths):
        if any(path.exists() and os.path.samefile(path, run.path) for run in runs):
            raise RunFileError(f"{path} is given twice")
        with RunReader(path) as reader:
            runs.append(
                Run(
                    label=TITLES.get(reader.info.method, reader.info.method),
                    stem=path.stem,
                    path=path,
                    info=reader.info,
                    status=reader.status,
                    steps=reader.steps(),
                    stages=reader.stages(),
                    evaluations=reader.evaluations(),
                )
            )
    return _told_apart(runs)


def _told_apart(runs: list[Run]) -> list[Run]:
    stems = _unique([run.stem for run in runs])
    labels = [run.label for run in runs]
    # The file's name joins the method's where that alone names several runs.
    named = [
        f"{label} ({stem})" if labels.count(label) > 1 else label
        for label, stem in zip(labels, stems, strict=True)
    ]
    return [
        Run(label, stem, run.path, run.info, run.status, run.steps, run.stages, run.evaluations)
        for run, label, stem in zip(runs, named, stems, strict=True)
    ]


def _unique(names: list[str]) -> list[str]:
    unique: list[str] = []
    for name in names:
        candidate, number = name, 1
        while candidate in unique:
            number += 1
            candidate = f"{name}-{number}"
        unique.append(candidate)
    return unique


def figures(run: Run) -> dict[str, float | int | str | None]:
    """The run in single figures, None where it has none (yet). Names end in their unit where they have one.

    Times are means over all steps but the first, in which kernels are compiled. Every other mean is over all
    steps, that of words also over the sparse ones alone; a deviation is that of sparse steps.
    """
    sparse = run.sparse
    words = _mean(run.steps["words"])
    result: dict[str, float | int | str | None] = {
        "run": run.label,
        "method": run.info.method,
        "status": run.status,
        "ranks": run.info.ranks,
        "steps": run.count,
        "length": run.info.length,
        "k": run.info.k,
        "dense_steps": int((run.steps["dense"] == 1).sum()),
        "skipped_steps": int((run.steps["skipped"] == 1).sum()),
        "held_out_accuracy": _last(run.evaluations["accuracy"]),
        "held_out_loss": _last(run.evaluations["loss"]),
        "words": words,
        "words_busiest": _mean(run.steps["words_busiest"]),
        "words_sparse_steps": _mean(run.steps["words"][sparse]),
        "control_words": _mean(run.steps["control_words"]),
        "messages": _mean(run.steps["messages"]),
        "lower_bound_words": run.lower_bound,
        "upper_bound_words": run.upper_bound,
        "dense_words": run.dense_words,
        "share_of_dense": words / run.dense_words if words is not None and run.dense_words else None,
        "global_nnz_deviation": _mean(np.abs(run.steps["global_nnz"] / run.steps["k"] - 1)[sparse]),
        "local_nnz_deviation": _mean(np.abs(run.steps["local_nnz"] / run.steps["k"] - 1)[sparse]),
    }
    phases = {phase: run.steps[f"seconds_{phase}"] for phase in PHASES}
    first = 1 if run.count > 1 else 0
    result["step_seconds"] = _mean(np.sum(list(phases.values()), axis=0)[first:])
    result.update({f"{phase}_seconds": _mean(values[first:]) for phase, values in phases.items()})
    result.update({f"stage_{stage}_seconds": _mean(values[first:]) for stage, values in run.stages.items()})
    result["total_seconds"] = _last(run.steps["elapsed"])
    return result


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None


def _last(values: NDArray[Any]) -> float | None:
    return float(values[-1]) if len(values) else None
