"""The runs of an experiment."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.config.modes import DENSE_OVLP
from jobs.experiment.experiments import Experiment
from oktopk import METHODS, Settings

SUMMED_ELSEWHERE = ("nccl", "ddp")  # GPUs only, and compared by speed alone
KINDS = ("train", "sweep", "speed")


@dataclass(frozen=True)
class Trial:
    """One run of an experiment.

    Attributes:
        name: of its run file.
        kind: one of KINDS: "train", to the end; "sweep", as long and with another setting; or "speed", some steps.
        settings: "section.key" -> value, on top of everything else.
    """

    name: str
    kind: str
    method: str
    ranks: int
    seed: int
    settings: Mapping[str, Any]


def trials(
    experiment: Experiment, options: argparse.Namespace, usual: Mapping[str, Any] | None = None
) -> list[Trial]:
    """Every run of an experiment, the most telling first, so that a table that is cut short is still one.

    Args:
        experiment: an entry of EXPERIMENTS.
        options: the command line, as jobs.experiment.options.parse returns it.
        usual: "section.key" -> value of the settings that are swept, as the configuration has them: that value is not
            trained with again. None: nothing is swept.
    """
    ranks, elsewhere = options.ranks, not options.no_gpu_methods
    asked = options.methods or (*experiment.methods, *experiment.rivals)
    own = {DENSE_OVLP: overlapped_dense("nccl" if elsewhere else "dense")}
    methods = {
        name: {"reduction.method": name, **own.get(name, {})}
        for name in dict.fromkeys((*experiment.methods, *experiment.fast))
    }
    rivals = {
        name: settings
        for name, settings in experiment.rivals.items()
        if name in asked and (elsewhere or settings["reduction.method"] in METHODS)
    }
    planned = []
    for seed in range(options.seeds):
        for name in experiment.methods:
            if name in asked and (not seed or name in experiment.repeated):
                planned.append(_trial(f"{name}-{seed}", "train", name, ranks, seed, methods[name]))
    for name, settings in rivals.items():
        for seed in range(options.seeds if name in experiment.repeated else 1):
            method = settings["reduction.method"]
            planned.append(_trial(f"{name}-{seed}", "train", method, ranks, seed, settings))
    fast = [
        name
        for name in experiment.fast
        if (name in asked or name in SUMMED_ELSEWHERE) and (elsewhere or name not in SUMMED_ELSEWHERE)
    ]
    steps = options.speed_steps
    for size in sorted(options.speed_ranks, reverse=True) if steps else ():
        for batch in options.speed_batches or (None,):
            on = f"speed-{size}" if batch is None else f"speed-{size}x{batch}"
            alike = {} if batch is None else {"training.batch_size": batch}
            for name in fast:
                planned.append(_speed_trial(f"{on}-{name}", name, size, steps, alike | methods[name]))
            for name, settings in rivals.items():
                for bucket in experiment.buckets or (None,):
                    called = f"{on}-{name}" if bucket is None else f"{on}-{name}-{bucket:g}mb"
                    changed = {**alike, **settings}
                    if bucket is not None:
                        changed["reduction.bucket_mb"] = bucket
                    method = settings["reduction.method"]
                    planned.append(_speed_trial(called, method, size, steps, changed))
            if experiment.staged and "oktopk" in fast:
                staged = alike | {"run.time_stages": True}
                planned.append(_speed_trial(f"{on}-oktopk-stages", "oktopk", size, steps, staged))
    if usual is not None and "oktopk" in asked:
        for name, values in experiment.swept.items():
            for value in values:
                if value != usual[name]:
                    called = f"sweep-{name.split('.')[-1]}-{value}"
                    planned.append(_trial(called, "sweep", "oktopk", ranks, 0, {name: value}))
    return planned


def overlapped_dense(method: str) -> dict[str, Any]:
    """The settings of DenseOvlp by a method: "nccl", which is of GPUs, or "dense"."""
    return {"reduction.method": method, "reduction.overlap": True, "reduction.deferred": False}


def _speed_trial(name: str, method: str, size: int, steps: int, settings: Mapping[str, Any]) -> Trial:
    """A run that is compared by its speed: what is measured is the method, not how it starts."""
    start: dict[str, Any] = {"run.measure_every": 0}
    start |= {"reduction.dense_warmup_steps": 0, "reduction.density_warmup_steps": 0}
    start["reduction.first_density"] = Settings.first_density
    if method == "powersgd":
        start["reduction.powersgd_start"] = 2  # the least
    return _trial(name, "speed", method, size, 0, {**_short(steps), **settings, **start})


def _short(steps: int) -> dict[str, Any]:
    """Settings of a run that is seconds long."""
    return {
        "training.steps": steps,
        "training.epochs": 0,
        "training.eval_every": steps,
        # begun again rather than continued
        "run.overwrite": True,
        "checkpoint.enabled": False,
    }


def _trial(name: str, kind: str, method: str, ranks: int, seed: int, settings: Mapping[str, Any]) -> Trial:
    every = {"reduction.method": method, "training.seed": seed, **settings}
    if method not in METHODS:
        every["run.measure_every"] = 0  # a way of summing all gradients has nothing of the kind
    return Trial(name, kind, method, ranks, seed, every)


def launches(trials: Sequence[Trial]) -> list[list[Trial]]:
    """The trials by their number of ranks, in order of appearance: those of one launch together."""
    by_ranks: dict[int, list[Trial]] = {}
    for trial in trials:
        by_ranks.setdefault(trial.ranks, []).append(trial)
    return list(by_ranks.values())
