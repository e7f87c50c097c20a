"""The experiments: which methods are trained how often and on how many ranks, and what they are to show.

One entry of EXPERIMENTS is one table of results; jobs.experiment runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs.experiment.claims import WORD_ERROR_RATE, sparse_claims, speech_claims
from jobs.experiment.language_claims import language_claims
from jobs.report.groups import Group
from jobs.report.page import Claim
from oktopk import METHODS

EVERY_METHOD = ("dense", "oktopk", "dense-ovlp", "topka", "topkdsa", "gtopk", "gaussiank")
SUMMED_ELSEWHERE = ("nccl", "ddp")  # GPUs only, and compared by speed alone
# a number that no interval of thresholds divides: both exact and regular steps are met
MEASURE_EVERY = 50
REGIONS_EVERY = 10  # of the short runs that compare regions
# A warm-up that times leave out and one period of BERT's exact thresholds: their share of the steps is that of a long run.
ONE_PERIOD = 20 + 128


@dataclass(frozen=True)
class Experiment:
    """A table of results.

    Attributes:
        title: of its report.
        config: file in jobs/configs that all runs start from; settings: "section.key" -> value, on top of it.
        methods: trained to the end, in this order; repeated: those of them that are trained with every seed.
        fast: methods that are compared by their speed.
        claims: what the runs are to show, of the groups trained to the end and those compared by speed.
        target: held-out accuracy that dense must reach, and to which times are taken; None where a loss is compared.
        epoch_seconds, step_seconds: how long an epoch, or a step, is expected to take where nothing was measured yet: by
            what the configuration counts in.
        seeds: of the repeated methods, unless another number is asked for.
        speed_steps: of a run that is compared by its speed, likewise.
        speed_batches: samples per rank that speeds are compared at, likewise; empty: as many as are trained with.
        scaling: whether speeds are compared on fewer ranks too, likewise.
        staged: whether Ok-Topk runs once more with its stages timed one by one.
        swept: "section.key" -> values that Ok-Topk is trained with besides, one away from the configuration at a time.
        compares_regions: whether Ok-Topk also runs with regions of equal length.
    """

    title: str
    config: str
    settings: Mapping[str, Any]
    methods: tuple[str, ...]
    repeated: tuple[str, ...]
    fast: tuple[str, ...]
    claims: Callable[[Experiment, Sequence[Group], Sequence[Group]], list[Claim]]
    target: float | None = None
    epoch_seconds: float = 0.0
    step_seconds: float = 0.0
    seeds: int = 3
    speed_steps: int = 200
    speed_batches: tuple[int, ...] = ()
    scaling: bool = True
    staged: bool = False
    swept: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    compares_regions: bool = False


SHORT = ("regions", "speed")
KINDS = ("train", "sweep", *SHORT)


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
        """What runs share that take about as long, on as many ranks."""
        batch = self.settings.get("training.batch_size")
        kind = "train" if self.kind == "sweep" else self.kind
        return kind if batch is None else f"{kind}, batches of {batch}"


def trials(
    experiment: Experiment,
    *,
    ranks: int,
    seeds: int,
    methods: Sequence[str],
    speed_ranks: Sequence[int],
    speed_steps: int,
    region_steps: int,
    elsewhere: bool,
    speed_batches: Sequence[int] = (),
    usual: Mapping[str, Any] | None = None,
) -> list[Trial]:
    """Every run of an experiment, the most telling first, so that a table that is cut short is still one.

    Args:
        experiment: an entry of EXPERIMENTS.
        ranks: of the runs to the end.
        seeds: of the repeated methods.
        methods: those of the experiment that are wanted.
        speed_ranks, speed_steps: of the runs that are compared by speed; none where either is empty or 0.
        region_steps: of the two runs that compare regions, where the experiment does; 0: none.
        elsewhere: whether NCCL and DDP can run here, which are of GPUs.
        speed_batches: samples per rank of these runs; empty: the configuration's.
        usual: "section.key" -> value of the settings that are swept, as the configuration has them: that value is not
            trained with again. None: nothing is swept.
    """
    planned = []
    for seed in range(seeds):
        for method in experiment.methods:
            if method in methods and (not seed or method in experiment.repeated):
                planned.append(_trial(f"{method}-{seed}", "train", method, ranks, seed, {}))
    if experiment.compares_regions and region_steps and ranks > 1 and "oktopk" in methods:
        for balanced in (True, False):
            # with the dense warm-up: regions that are cut by the very first gradients say little of later ones
            settings = {
                **_short(region_steps),
                "reduction.density_warmup_steps": 0,
                "run.measure_every": REGIONS_EVERY,
                "reduction.balanced_regions": balanced,
            }
            name = f"regions-{'balanced' if balanced else 'equal'}"
            planned.append(_trial(name, "regions", "oktopk", ranks, 0, settings))
    fast = [name for name in experiment.fast if name in (*methods, *SUMMED_ELSEWHERE)]
    for size in sorted(speed_ranks, reverse=True) if speed_steps else ():
        for batch in speed_batches or (None,):
            for method in fast:
                if elsewhere or method not in SUMMED_ELSEWHERE:
                    planned.append(_speed_trial(method, size, batch, speed_steps))
            if experiment.staged and "oktopk" in fast:
                planned.append(_speed_trial("oktopk", size, batch, speed_steps, staged=True))
    if usual is not None and "oktopk" in methods:
        for name, values in experiment.swept.items():
            for value in values:
                if value != usual[name]:
                    called = f"sweep-{name.split('.')[-1]}-{value}"
                    planned.append(_trial(called, "sweep", "oktopk", ranks, 0, {name: value}))
    return planned


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


EXPERIMENTS: dict[str, Experiment] = {
    "vgg": Experiment(
        title="VGG-16 with sparse and dense allreduce",
        config="vgg.toml",
        settings={"run.measure_every": MEASURE_EVERY, "checkpoint.keep": 1},
        methods=EVERY_METHOD,
        repeated=("dense", "oktopk"),
        fast=(*EVERY_METHOD, *SUMMED_ELSEWHERE),
        target=0.9,
        epoch_seconds=2.0,
        claims=sparse_claims,
    ),
    "lstm": Experiment(
        title="LSTM on speech with sparse and dense allreduce",
        config="lstm.toml",
        settings={"run.measure_every": MEASURE_EVERY, "checkpoint.keep": 1},
        methods=EVERY_METHOD,
        repeated=("dense", "oktopk"),
        fast=(*EVERY_METHOD, *SUMMED_ELSEWHERE),
        target=1 - WORD_ERROR_RATE,
        epoch_seconds=10.0,
        claims=speech_claims,
        compares_regions=True,
    ),
    "bert": Experiment(
        title="BERT pre-training with sparse and dense allreduce",
        config="bert.toml",
        settings={"run.measure_every": MEASURE_EVERY, "checkpoint.keep": 1},
        methods=EVERY_METHOD,
        repeated=("dense", "oktopk"),
        fast=(*EVERY_METHOD, *SUMMED_ELSEWHERE),
        claims=language_claims,
        step_seconds=0.1,
        seeds=2,
        speed_steps=ONE_PERIOD,
        speed_batches=(8, 256),  # the paper's, and one that keeps an H200 busy
        scaling=False,
        staged=True,
        swept={
            "reduction.threshold_interval": (32, 64, 128, 256),
            "reduction.density": (0.001, 0.01, 0.05),
        },
    ),
}
