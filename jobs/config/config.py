"""The configuration of a training run: all sections, the checks between them, and differences.

jobs.config.file reads it from a file and a command line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, Self

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

_OF_MODES = {
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
        reads_text = self.model.name in ("bert", "gpt")
        if self.model.name != "own" and reads_text != (self.data.name == "text"):
            raise ValueError(f"model.name {self.model.name!r} does not take data.name {self.data.name!r}")
        if self.training.label_smoothing and self.task != "images":
            raise ValueError(f"training.label_smoothing is for images, not for {self.task}")
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
        if method not in METHODS and (key := self._other_than(_OF_MODES)):
            raise ValueError(f"{key} {self.value(key)!r} is not for reduction.method {method!r}")
        return self

    def _other_than(self, needed: Mapping[str, Any]) -> str:
        """The first "section.key" that has another value, "" if none has."""
        return next((key for key, value in needed.items() if self.value(key) != value), "")

    def value(self, key: str) -> Any:
        """The value of "section.key"."""
        section, _, name = key.partition(".")
        return getattr(getattr(self, section), name)

    @property
    def task(self) -> Literal["images", "speech", "text"]:
        """The task of the network; with one's own network, of the data set."""
        if self.model.name in ("lstm", "bert", "gpt"):
            return "speech" if self.model.name == "lstm" else "text"
        if self.model.name == "own" and self.data.name in ("an4", "text"):
            return "speech" if self.data.name == "an4" else "text"
        return "images"

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
    found = []
    for section in sorted({*there, *here} - ignored):
        a, b = there.get(section, {}), here.get(section, {})
        for key in sorted({*a, *b}):
            if f"{section}.{key}" not in ignored and a.get(key) != b.get(key):
                found.append(f"{section}.{key}: {a.get(key)!r} there, {b.get(key)!r} here")
    return found
