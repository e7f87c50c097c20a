"""The experiments of jobs/configs/experiments.toml: the runs of each table of results, and its targets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from jobs.config.file import read_toml

CONFIGS = Path(__file__).parents[1] / "configs"


class Model(BaseModel):
    """A table of the file: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Value(Model):
    """A figure, and how it is written.

    Attributes:
        value: "METHOD.FIGURE", divided by others or numbers, or less them, from left to right; jobs.experiment.targets has both.
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
        staged: whether Ok-Topk runs once more with its stages timed one by one.
        swept: "section.key" -> values that Ok-Topk is trained with besides, one away from the configuration at a time.
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
    staged: bool = False
    rivals: Mapping[str, Mapping[str, Any]] = {}
    buckets: tuple[float, ...] = ()
    swept: Mapping[str, tuple[Any, ...]] = {}


def _experiments() -> dict[str, Experiment]:
    tables = read_toml(CONFIGS / "experiments.toml")
    common, targets = tables.pop("common"), tables.pop("targets")
    return {
        name: Experiment(**common | table | {"targets": [targets[each] for each in table["targets"]]})
        for name, table in tables.items()
    }


EXPERIMENTS = _experiments()
"""Name -> experiment, of each table of results."""
