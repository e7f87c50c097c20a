"""The experiments of jobs/configs/experiments.toml: targets and runs of each table of results."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from jobs.config.file import read_toml
from jobs.config.modes import DENSE_OVLP
from oktopk import METHODS, Settings

CONFIGS = Path(__file__).parents[1] / "configs"


class Model(BaseModel):
    """A table of the file: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Value(Model):
    """A figure, and how it is written.

    Attributes:
        value: "METHOD.FIGURE", divided by others or numbers, or less them, from left to right; jobs.experiment.report has both.
        measured: a text in which {value} and {METHOD.FIGURE} are figures. {also} is `Target.also`, "" where it was not measured.
    """

    value: str
    measured: str


class Target(Value):
    """What runs are to show: a value that is below, at most or at least a number.

    Attributes:
        text: the claim; {where} names the batches where speeds are compared at several, {of_type} NCCL's type of gradients.
        of: runs that are trained to the end, or those that are compared by speed, on the most ranks and for each size of batches.
        each: once for every way to reduce but dense, which value and texts call "each".
        in_equal_time: two methods whose held-out losses are those when the faster of the two has ended.
    """

    text: str
    below: float | None = None
    at_most: float | None = None
    at_least: float | None = None
    of: Literal["train", "speed"] = "train"
    each: bool = False
    in_equal_time: tuple[str, str] | None = None
    also: Value | None = None

    @model_validator(mode="after")
    def _has_one_bound(self) -> Self:
        if sum(bound is not None for bound in (self.below, self.at_most, self.at_least)) != 1:
            raise ValueError("a target has one of below, at_most and at_least")
        return self

    def holds(self, value: float) -> bool:
        """Whether a value is within the bounds."""
        return (
            (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
            and (self.at_least is None or value >= self.at_least)
        )


class Experiment(Model):
    """A table of results.

    Attributes:
        title: of its report.
        config: file in jobs/configs that all runs start from; settings: "section.key" -> value, on top of it.
        methods: trained to the end, in this order; repeated: those of them that are trained with every seed.
        fast: methods that are compared by their speed.
        targets: what the runs are to show.
        rivals: name -> "section.key" -> value, of further ways to reduce that are trained, with one seed unless `repeated`, and
            compared by speed. Those by another method than the library's need GPUs.
        buckets: "reduction.bucket_mb" that the speeds of rivals are compared at; empty: the configuration's.
        accuracy: held out, to which times are taken; None where a loss is compared.
        seeds: of the repeated methods, unless another number is asked for.
        speed_steps: of a run that is compared by its speed, likewise.
        speed_batches: samples per rank that speeds are compared at, likewise; empty: as many as are trained with.
        scaling: whether speeds are compared on fewer ranks too, likewise.
    """

    title: str
    config: str
    settings: Mapping[str, Any]
    methods: tuple[str, ...]
    repeated: tuple[str, ...]
    fast: tuple[str, ...]
    targets: tuple[Target, ...]
    accuracy: float | None = None
    seeds: int = 3
    speed_steps: int = 200
    speed_batches: tuple[int, ...] = ()
    scaling: bool = True
    rivals: Mapping[str, Mapping[str, Any]] = {}
    buckets: tuple[float, ...] = ()


def _experiments() -> dict[str, Experiment]:
    tables = read_toml(CONFIGS / "experiments.toml")
    common, targets = tables.pop("common"), tables.pop("targets")
    return {
        name: Experiment(**common | table | {"targets": [targets[each] for each in table["targets"]]})
        for name, table in tables.items()
    }


EXPERIMENTS = _experiments()
"""Name -> experiment, of each table of results."""


ALWAYS_TIMED = ("nccl", "ddp")  # what speeds are held against, on GPUs alone
KINDS = ("train", "speed")


@dataclass(frozen=True)
class Trial:
    """One run of an experiment.

    Attributes:
        name: of its run file.
        kind: one of KINDS: "train", to the end; or "speed", some steps.
        settings: "section.key" -> value, on top of everything else.
    """

    name: str
    kind: str
    method: str
    ranks: int
    seed: int
    settings: Mapping[str, Any]


def trials(experiment: Experiment, options: argparse.Namespace) -> list[Trial]:
    """Every run of an experiment, the most telling first, so that a table that is cut short is still one.

    Args:
        experiment: an entry of EXPERIMENTS.
        options: the command line, as jobs.experiment.__main__.parse returns it.
    """
    ways: dict[str, Mapping[str, Any]] = {
        **{name: {"reduction.method": name} for name in (*experiment.methods, *experiment.fast)},
        **experiment.rivals,
    }
    here = {name: name for name in ways}
    if options.no_gpu_methods:
        here = {name: name for name, way in ways.items() if way["reduction.method"] in METHODS}
        overlapped = {"reduction.method": "dense", "reduction.overlap": True, "reduction.deferred": False}
        here["ddp"], ways[DENSE_OVLP] = DENSE_OVLP, overlapped
    asked = options.methods or (*experiment.methods, *experiment.rivals)
    own = [here[name] for name in experiment.methods if name in asked and name in here]
    rivals = [name for name in experiment.rivals if name in asked and name in here]
    timed = asked if options.no_gpu_methods else (*asked, *ALWAYS_TIMED)
    fast = [here[name] for name in experiment.fast if name in here and name in timed]
    methods = {name: name for name in ways} | {name: ways[name]["reduction.method"] for name in rivals}
    seeds = {name: range(options.seeds if name in experiment.repeated else 1) for name in ways}

    trained = [(name, seed) for seed in range(options.seeds) for name in own if seed in seeds[name]]
    trained += [(name, seed) for name in rivals for seed in seeds[name]]
    planned = [
        _trial(f"{name}-{seed}", "train", methods[name], options.ranks, seed, ways[name])
        for name, seed in trained
    ]

    timed = [(name, methods[name], ways[name]) for name in fast]
    for name in rivals:
        sizes = [(f"-{size:g}mb", {"reduction.bucket_mb": size}) for size in experiment.buckets] or [("", {})]
        timed += [(f"{name}{size}", methods[name], {**ways[name], **bucket}) for size, bucket in sizes]
    steps = options.speed_steps
    for size in sorted(options.speed_ranks, reverse=True) if steps else ():
        for batch in options.speed_batches or (None,):
            on = f"speed-{size}" if batch is None else f"speed-{size}x{batch}"
            alike = {} if batch is None else {"training.batch_size": batch}
            for name, method, settings in timed:
                planned.append(_speed_trial(f"{on}-{name}", method, size, steps, {**alike, **settings}))
    return planned


def _speed_trial(name: str, method: str, ranks: int, steps: int, settings: Mapping[str, Any]) -> Trial:
    """A run that is compared by its speed: what is measured is the method, not how it starts."""
    short: dict[str, Any] = {
        "training.steps": steps,
        "training.epochs": 0,
        "training.eval_every": steps,
        # begun again rather than continued
        "run.overwrite": True,
        "checkpoint.enabled": False,
        **settings,
        "run.measure_every": 0,
        "reduction.dense_warmup_steps": 0,
        "reduction.density_warmup_steps": 0,
        "reduction.first_density": Settings.first_density,
    }
    return _trial(name, "speed", method, ranks, 0, short)


def _trial(name: str, kind: str, method: str, ranks: int, seed: int, settings: Mapping[str, Any]) -> Trial:
    every = {"reduction.method": method, "training.seed": seed, **settings}
    if method not in METHODS:
        every["run.measure_every"] = 0  # a way of summing all gradients has nothing of the kind
    return Trial(name, kind, method, ranks, seed, every)
