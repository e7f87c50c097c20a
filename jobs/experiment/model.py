"""What an experiment is: the runs of a table of results, and its claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs.report.groups import Group
from jobs.report.page import Claim


@dataclass(frozen=True)
class Experiment:
    """A table of results.

    Attributes:
        title: of its report.
        config: file in jobs/configs that all runs start from; settings: "section.key" -> value, on top of it.
        methods: trained to the end, in this order; repeated: those of them that are trained with every seed.
        fast: methods that are compared by their speed.
        rivals: name -> "section.key" -> value, of further ways to reduce that are trained, with one seed unless `repeated`, and
            compared by speed. Those by another method than the library's need GPUs.
        buckets: "reduction.bucket_mb" that the speeds of rivals are compared at; empty: the configuration's.
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
    rivals: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    swept: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    compares_regions: bool = False
