"""The configuration of a training run: all sections, the checks between them, and differences.

jobs.config.file reads it from a file and a command line.
"""

from __future__ import annotations

import json
from operator import attrgetter
from typing import Literal, Self

from pydantic import model_validator

from jobs.config.sections import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ReductionConfig,
    RunConfig,
    ScheduleConfig,
    Section,
    TrainingConfig,
)
from oktopk import METHODS

_OF_MODES: dict[str, object] = {
    "reduction.sends": "gradients",
    "reduction.every": 1,
    "reduction.nonfinite": "raise",
    "reduction.average": True,
    "reduction.wire": "auto",
    "reduction.levels": "auto",
    "reduction.ranks_per_host": 0,
    "run.measure_every": 0,
}


class Config(Section):
    """One run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    reduction: ReductionConfig = ReductionConfig()
    training: TrainingConfig
    run: RunConfig = RunConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _sections_go_together(self) -> Self:
        trained_on = {"lstm": "speech", "bert": "text", "gpt": "text", "own": self.task}
        if trained_on.get(self.model.name, "images") != self.task:
            raise ValueError(f"model.name {self.model.name!r} does not take data.name {self.data.name!r}")
        for name in ("label_smoothing", "channels_last"):
            if getattr(self.training, name) and self.task != "images":
                raise ValueError(f"training.{name} is for images, not for {self.task}")
        if self.training.cuda_graph and self.task == "speech":
            raise ValueError("training.cuda_graph needs batches of one shape, and those of speech differ")
        if self.reduction.overlap and self.run.measure_every:
            raise ValueError(f"run.measure_every {self.run.measure_every} is not for reduction.overlap")
        for name in ("dense_warmup_steps", "density_warmup_steps"):
            start, steps = getattr(self.reduction, name), self.training.steps
            if self.reduction.sends == "updates" and steps and start > -(-steps // self.reduction.every):
                raise ValueError(
                    f"reduction.{name} {start} is more than the run's exchanges: training.steps is {steps}"
                )
        return self

    @model_validator(mode="after")
    def _modes_do_no_more_than_sum(self) -> Self:
        method = self.reduction.method
        for key, needed in _OF_MODES.items() if method not in METHODS else ():
            if (value := attrgetter(key)(self)) != needed:
                raise ValueError(f"{key} {value!r} is not for reduction.method {method!r}")
        return self

    @property
    def task(self) -> Literal["images", "speech", "text"]:
        """What the data set trains a network for."""
        name = self.data.name
        return "speech" if name == "an4" else "text" if name == "text" else "images"

    def to_json(self) -> str:
        """The whole configuration, defaults included."""
        return self.model_dump_json()


def differences(saved: str, own: str, ignored: frozenset[str]) -> list[str]:
    """What differs between two configurations in JSON, as "section.key: saved there, own here".

    Args:
        saved, own: objects of objects.
        ignored: "section" or "section.key" that may differ.
    """
    there, here = json.loads(saved), json.loads(own)
    changed = []
    for section in sorted({*there, *here} - ignored):
        a, b = there.get(section, {}), here.get(section, {})
        for key in sorted({*a, *b}):
            if f"{section}.{key}" not in ignored and a.get(key) != b.get(key):
                changed.append(f"{section}.{key}: {a.get(key)!r} there, {b.get(key)!r} here")
    return changed
