"""The runs of an experiment, and their expected durations."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs.config.modes import DENSE_OVLP
from jobs.experiment.experiments import Experiment
from oktopk import METHODS

SUMMED_ELSEWHERE = ("nccl", "ddp")  # GPUs only, and compared by speed alone
REGIONS_EVERY = 10  # of the short runs that compare regions
SHORT = ("regions", "speed")
KINDS = ("train", "sweep", *SHORT)


START_SECONDS = 20.0
"""A launch: imports, MPI, the first touch of a GPU."""

RUN_SECONDS = 3.0
"""What a run takes beside its steps: its network, its kernels, its file."""


@dataclass(frozen=True)
class Trial:
    """One run of an experiment.

    Attributes:
        name: of its run file.
        kind: one of KINDS: "train", to the end; "sweep", as long and with another setting; "regions", some hundred steps; or
            "speed", a few.
        settings: "section.key" -> value, on top of everything else.
    """

    name: str
    kind: str
    method: str
    ranks: int
    seed: int
    settings: Mapping[str, Any]

    @property
    def work(self) -> str:
        """Key that runs of similar duration on as many ranks share."""
        batch = self.settings.get("training.batch_size")
        kind = "train" if self.kind == "sweep" else self.kind
        return kind if batch is None else f"{kind}, batches of {batch}"


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
    methods = options.methods or (*experiment.methods, *experiment.rivals)
    planned = []
    own = {DENSE_OVLP: overlapped_dense("nccl" if elsewhere else "dense")}
    for seed in range(options.seeds):
        for method in experiment.methods:
            if method in methods and (not seed or method in experiment.repeated):
                planned.append(_trial(f"{method}-{seed}", "train", method, ranks, seed, own.get(method, {})))
    rivals = {
        name: settings
        for name, settings in experiment.rivals.items()
        if name in methods and (elsewhere or settings["reduction.method"] in METHODS)
    }
    for name, settings in rivals.items():
        for seed in range(options.seeds if name in experiment.repeated else 1):
            called, method = f"{name}-{seed}", settings["reduction.method"]
            planned.append(_trial(called, "train", method, ranks, seed, settings))
    if experiment.compares_regions and options.region_steps and ranks > 1 and "oktopk" in methods:
        for balanced in (True, False):
            # with the dense warm-up: regions that are cut by the very first gradients say little of later ones
            settings = {
                **_short(options.region_steps),
                "reduction.density_warmup_steps": 0,
                "run.measure_every": REGIONS_EVERY,
                "reduction.balanced_regions": balanced,
            }
            name = f"regions-{'balanced' if balanced else 'equal'}"
            planned.append(_trial(name, "regions", "oktopk", ranks, 0, settings))
    fast = [name for name in experiment.fast if name in (*methods, *SUMMED_ELSEWHERE)]
    steps = options.speed_steps
    for size in sorted(options.speed_ranks, reverse=True) if steps else ():
        for batch in options.speed_batches or (None,):
            for method in fast:
                if elsewhere or method not in SUMMED_ELSEWHERE:
                    trial = _speed_trial(method, size, batch, steps)
                    changed = {**trial.settings, **own.get(method, {})}
                    planned.append(dataclasses.replace(trial, settings=changed))
            for name, settings in rivals.items():
                for bucket in experiment.buckets or (None,):
                    planned.append(_rival_speed_trial(name, settings, size, batch, bucket, steps))
            if experiment.staged and "oktopk" in fast:
                planned.append(_speed_trial("oktopk", size, batch, steps, staged=True))
    if usual is not None and "oktopk" in methods:
        for name, values in experiment.swept.items():
            for value in values:
                if value != usual[name]:
                    called = f"sweep-{name.split('.')[-1]}-{value}"
                    planned.append(_trial(called, "sweep", "oktopk", ranks, 0, {name: value}))
    return planned


def overlapped_dense(method: str) -> dict[str, Any]:
    """The settings of DenseOvlp by a method: "nccl", which is of GPUs, or "dense"."""
    return {"reduction.method": method, "reduction.overlap": True, "reduction.deferred": False}


def _speed_trial(method: str, size: int, batch: int | None, steps: int, *, staged: bool = False) -> Trial:
    settings = {
        **_short(steps),
        # what is measured is the method, not how it starts
        "reduction.dense_warmup_steps": 0,
        "reduction.density_warmup_steps": 0,
        "run.measure_every": 0,
    }
    called = f"{size}" if batch is None else f"{size}x{batch}"
    if batch is not None:
        settings["training.batch_size"] = batch
    if staged:
        settings["run.time_stages"] = True
    name = f"speed-{called}-{method}" + ("-stages" if staged else "")
    return _trial(name, "speed", method, size, 0, settings)


def _rival_speed_trial(
    name: str, settings: Mapping[str, Any], size: int, batch: int | None, bucket: float | None, steps: int
) -> Trial:
    alike = _speed_trial(settings["reduction.method"], size, batch, steps)
    changed = dict(settings)
    called = f"{alike.name.removesuffix(alike.method)}{name}"
    if alike.method == "powersgd":
        changed["reduction.powersgd_start"] = 2  # the least: again not how it starts
    if bucket is not None:
        changed["reduction.bucket_mb"] = bucket
        called += f"-{bucket:g}mb"
    return dataclasses.replace(alike, name=called, settings={**alike.settings, **changed})


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


@dataclass
class Pace:
    """Seconds that runs took.

    Attributes:
        guesses: Trial.work -> seconds of a run where none was measured.
        measured: (work, method, ranks, seconds) of each run that is done.
    """

    guesses: Mapping[str, float]
    measured: list[tuple[str, str, int, float]] = field(default_factory=list)

    def add(self, trial: Trial, seconds: float) -> None:
        self.measured.append((trial.work, trial.method, trial.ranks, seconds))

    def seconds(self, trial: Trial) -> float:
        """Expected seconds of a run: the mean of its method and ranks, else the slowest of its ranks, else of its work."""
        alike = [seconds for *key, seconds in self.measured if key == [trial.work, trial.method, trial.ranks]]
        if alike:
            return sum(alike) / len(alike)
        for same in ((trial.work, trial.ranks), (trial.work,)):
            near = [s for work, _, ranks, s in self.measured if (work, ranks)[: len(same)] == same]
            if near:
                return max(near)
        return self.guesses[trial.work]

    def known(self, trial: Trial) -> bool:
        """Whether a run of such work was measured."""
        return any(work == trial.work for work, *_ in self.measured)


def launches(trials: Sequence[Trial]) -> list[list[Trial]]:
    """The trials by their number of ranks, in order of appearance: those of one launch together."""
    by_ranks: dict[int, list[Trial]] = {}
    for trial in trials:
        by_ranks.setdefault(trial.ranks, []).append(trial)
    return list(by_ranks.values())
