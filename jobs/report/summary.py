"""Reads a run once and sums it up in single figures."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.dense_allreduce import dense_words
from collectives.traffic import WORD_BYTES, lower_bound, upper_bound
from data.command import escaped, escaped_values
from jobs.run.columns import PHASES
from jobs.run.file import RunFileError, RunRecord
from jobs.run.reader import DAMAGE, RunReader
from oktopk.methods import METHODS

SELECTION_STAGES = ("select", "reduce", "apply")
"""Stages of a reduction that touch this rank's own memory; in the others ranks talk to each other."""

COMBINED_STAGE = "step"
"""The stage that is both, kernels of a GPU that select and read the memory of its peers; timed on the host."""

ON_THE_DEVICE = "gather and apply"
"""A stage that only a step has whose stages but COMBINED_STAGE were timed on the device, one by one."""

REST = "rest"
"""What the report calls seconds_rest, beside the stages."""

WARM_STEPS = 20
"""Most steps at the beginning that times are not taken from: kernels are compiled, algorithms chosen."""


@dataclass(frozen=True, eq=False)
class Run(RunRecord):
    """A run; stem, the file's name without its suffix, tells it from the others of a report."""

    stem: str
    path: Path

    @property
    def complete(self) -> bool:
        """It ended as it was meant to."""
        return self.status == "complete"

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """The configuration, section by section."""
        return dict(escaped_values(json.loads(self.info.config)))

    @property
    def count(self) -> int:
        return len(self.steps["step"])

    @property
    def sparse(self) -> NDArray[np.bool_]:
        """bool[count]: steps in which a sparse method did its work, so no dense warm-up and none skipped."""
        return (self.steps["dense"] == 0) & (self.steps["skipped"] == 0)

    @property
    def warmed_up(self) -> NDArray[np.bool_]:
        """bool[count]: sparse steps of the run's own density, so none of a warm-up of the density either."""
        return self.sparse & (self.steps["k"] == self.info.k)

    @property
    def bytes_sent(self) -> NDArray[np.float64]:
        """float64[count]: bytes sent per rank from the first step on: payload, rows and control messages, mean over the ranks.

        As many are received, so that it is (sent + received) / 2, too.
        """
        words = self.steps["words"] + self.steps["control_words"]
        return np.cumsum(WORD_BYTES * words + self.steps["row_bytes"])

    @property
    def samples_per_step(self) -> int:
        """Samples of all ranks in a step."""
        accumulated: int = self.config.get("training", {}).get("accumulate", 1)
        return self.info.batch_size * self.info.ranks * accumulated

    @property
    def tokens(self) -> NDArray[np.float64]:
        """float64[count]: tokens of all ranks from the first step on; 0 where the configuration does not name their number."""
        per_sample = self.config.get("model", {}).get("positions", 0)
        return np.asarray(self.steps["step"] * self.samples_per_step * per_sample, np.float64)

    @property
    def upper_bound(self) -> float | None:
        """6k(P-1)/P words per step, over a grid 8k(P-1)/P, which only Ok-Topk promises; None where there is no such step."""
        if self.info.method != "oktopk" or not self.warmed_up.any():
            return None
        exchange = self.config.get("reduction", {}).get("exchange", "direct")
        return upper_bound(self.info.k, self.info.ranks, exchange) or None

    @property
    def dense_words(self) -> float | None:
        """2n(P-1)/P words per step; None where nothing is sent."""
        return dense_words(self.info.length, self.info.ranks) or None

    @property
    def step_seconds(self) -> NDArray[np.float64]:
        """float64[count]: seconds of each step, mean over the ranks, all phases."""
        return np.sum([self.steps[f"seconds_{phase}"] for phase in PHASES], axis=0)

    @property
    def training_seconds(self) -> NDArray[np.float64]:
        """float64[count]: seconds since training began at the end of each step, without evaluating and measuring."""
        elapsed = self.steps["elapsed"].astype(np.float64)
        # an evaluation follows its step; a measurement is part of its own
        for extra, follows in ((self.evaluations, 1), (self.measures, 0)):
            if len(extra["step"]):
                spent = np.cumsum(extra["seconds"])
                before = np.searchsorted(extra["step"], self.steps["step"] - follows, side="right")
                elapsed = elapsed - np.where(before > 0, spent[before - 1], 0.0)
        return elapsed

    def at_steps(self, values: NDArray[Any], steps: NDArray[Any]) -> NDArray[np.float64]:
        """float[len(steps)]: `values`, which has one value per step, where so many steps are done; NaN where none is."""
        indices = np.searchsorted(self.steps["step"], steps, side="right") - 1
        if not self.count:
            return np.full(len(steps), np.nan)
        return np.where(indices >= 0, values[np.maximum(indices, 0)], np.nan)

    def warm(self, values: NDArray[Any]) -> NDArray[Any]:
        """`values` without those of the first steps."""
        return values[min(WARM_STEPS, max(1, self.count // 5)) if self.count > 1 else 0 :]

    def parts(self) -> dict[str, NDArray[np.float64]]:
        """Part of a step -> seconds[count].

        Computing is forward, backward and the optimizer; selection is what a reduction does in this rank's memory
        (SELECTION_STAGES); communication the rest of the reduction, but for COMBINED_STAGE, with what no stage timed;
        data the wait for a batch. Where the host's stages take longer than the reduction on the device, selection is less
        by the difference: it waited for the backward pass.
        """
        seconds = {phase: self.steps[f"seconds_{phase}"] for phase in PHASES}
        rest, combined = self.steps["seconds_rest"], self._stage(COMBINED_STAGE)
        selection = np.sum([self._stage(stage) for stage in SELECTION_STAGES], axis=0)
        on_the_device = self._stage(ON_THE_DEVICE) > 0
        selection = np.maximum(selection + np.where(on_the_device, 0.0, np.minimum(rest, 0.0)), 0.0)
        combined += np.where(combined > 0, np.where(on_the_device, rest, np.maximum(rest, 0.0)), 0.0)
        combined = np.clip(combined, 0.0, np.maximum(seconds["reduction"] - selection, 0.0))
        return {
            "compute": seconds["forward"] + seconds["backward"] + seconds["optimizer"],
            "selection": selection,
            "communication": np.maximum(seconds["reduction"] - selection - combined, 0.0),
            "combined": combined,
            "data": seconds["data"],
        }

    def _stage(self, name: str) -> NDArray[np.float64]:
        """float64[count]: seconds of a stage; 0 where a step has none."""
        values = self.stages.get(name, np.zeros(0))[: self.count]
        # a run that was killed may have a row of steps whose stages were not written any more
        return np.pad(values, (0, self.count - len(values)))


def read_readable(paths: Sequence[str | Path]) -> tuple[list[Run], list[str]]:
    """Read run files, running, killed or complete, and give each a stem of its own.

    Returns:
        The runs, and a line on each path that gave none: a missing file, no run file, or the same one again.
    """
    runs: list[Run] = []
    problems: list[str] = []
    for path in map(Path, paths):
        try:
            if any(path.exists() and os.path.samefile(path, run.path) for run in runs):
                raise RunFileError(f"{path} is given twice")
            runs.append(_read(path, runs))
        except RunFileError as error:
            problems.append(str(error))
        except DAMAGE as error:
            problems.append(f"{path} is not a whole run file: {error}")
    return runs, problems


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """As read_readable, for those who need them all. Raises RunFileError on the first that gives no run."""
    runs, problems = read_readable(paths)
    if problems:
        raise RunFileError(problems[0])
    return runs


def _read(path: Path, others: Sequence[Run]) -> Run:
    with RunReader(path) as reader:
        record = reader.record()
    for text in (record.info.config, record.info.hardware, record.info.versions):
        dict(json.loads(text))
    name, used = escaped(path.stem), [run.stem for run in others]
    stems = (name, *(f"{name}-{number}" for number in range(2, len(used) + 2)))
    return Run(**vars(record), stem=next(stem for stem in stems if stem not in used), path=path)


def figures(run: Run) -> dict[str, float | int | str | None]:
    """The run in single figures, None where it has none (yet). Names end in their unit where they have one.

    Times are means over all steps but the first, see Run.warm. Every other mean is over all steps, that of words
    also over those after both warm-ups, as deviations and the busiest rank's words over the mean are; xi, fill-in and the
    balance of regions are of measured ones of these.
    """
    warmed_up = run.warmed_up
    words, k, ranks = _mean(run.steps["words"]), run.info.k, run.info.ranks
    # entries that each rank was to select, after both warm-ups
    local_k = METHODS[run.info.method].local_k(k, ranks) if run.info.method in METHODS else k
    settled = np.isin(run.measures["step"], run.steps["step"][warmed_up])
    xi, fill_in, balance = (run.measures[name][settled] for name in ("xi", "fill_in", "region_balance"))
    xi, balance = xi[np.isfinite(xi)], balance[np.isfinite(balance)]
    accuracy, characters = (_last(run.evaluations[name]) for name in ("accuracy", "character_error_rate"))
    speech = characters is not None and np.isfinite(characters)
    volume, ring = _last(run.bytes_sent), run.count * (run.dense_words or 0.0) * WORD_BYTES / 2
    sent, busiest = (run.steps[name][warmed_up] for name in ("words", "words_busiest"))
    result: dict[str, float | int | str | None] = {
        "run": run.stem,
        "method": run.info.method,
        "status": run.status,
        "ranks": ranks,
        "steps": run.count,
        "length": run.info.length,
        "k": k,
        "dense_steps": int((run.steps["dense"] == 1).sum()),
        "denser_steps": int((run.sparse & ~warmed_up).sum()),
        "skipped_steps": int((run.steps["skipped"] == 1).sum()),
        "held_out_accuracy": accuracy,
        "held_out_loss": _last(run.evaluations["loss"]),
        "word_error_rate": 1.0 - accuracy if speech and accuracy is not None else None,
        "character_error_rate": characters if speech else None,
        "words": words,
        "words_busiest": _mean(run.steps["words_busiest"]),
        "words_sparse_steps": _mean(sent),
        "control_words": _mean(run.steps["control_words"]),
        "messages": _mean(run.steps["messages"]),
        "rounded": _mean(run.steps["rounded"][warmed_up]) or None,
        "lower_bound_words": lower_bound(k, ranks) or None if warmed_up.any() else None,
        "upper_bound_words": run.upper_bound,
        "dense_words": run.dense_words,
        "share_of_dense": words / run.dense_words if words is not None and run.dense_words else None,
        "megabytes": None if volume is None else volume / 1e6,
        "share_of_bfloat16_ring": volume / ring if volume is not None and ring else None,
        "global_nnz_deviation": _mean(np.abs(run.steps["global_nnz"] / run.steps["k"] - 1)[warmed_up]),
        "local_nnz_deviation": _mean(np.abs(run.steps["local_nnz"] / local_k - 1)[warmed_up]),
        "fill_in": _mean(fill_in),
        "xi": _mean(xi),
        "xi_largest": float(xi.max()) if len(xi) else None,
        "xi_share_not_below_ranks": _mean(xi >= ranks),
        "region_balance": _mean(balance),
        "region_balance_largest": float(balance.max()) if len(balance) else None,
        "words_balance": float(busiest.mean() / sent.mean()) if len(sent) and sent.mean() else None,
    }
    step = run.warm(run.step_seconds)
    result["step_seconds"] = _mean(step)
    result["step_seconds_median"] = float(np.median(step)) if len(step) else None
    result["samples_per_second"] = float(run.samples_per_step / step.mean()) if len(step) else None
    for name, values in run.parts().items():
        result[f"part_{name}_seconds"] = _mean(run.warm(values))
    for phase in PHASES:
        result[f"{phase}_seconds"] = _mean(run.warm(run.steps[f"seconds_{phase}"]))
    stages = {**run.stages, REST: run.steps["seconds_rest"]}
    result.update({f"stage_{stage}_seconds": _mean(run.warm(values)) for stage, values in stages.items()})
    result["training_seconds"] = _last(run.training_seconds)
    result["total_seconds"] = _last(run.steps["elapsed"])
    return result


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None


def _last(values: NDArray[Any]) -> float | None:
    return float(values[-1]) if len(values) else None
