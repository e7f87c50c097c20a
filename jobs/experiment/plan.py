"""Plans an experiment: each run with its configuration, and whether it is done."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from jobs.config.file import ConfigError, apply_overrides, read_toml, validate
from jobs.experiment.experiments import CONFIGS, KINDS, Experiment, Trial, trials
from jobs.restart.start import differing_run
from jobs.run.file import RunFileError
from jobs.run.reader import DAMAGE, RunReader

RUNS = "runs"
EVALUATIONS = 16  # of a run that is shortened to so many steps, at most, and one at its end


@dataclass(frozen=True)
class Planned:
    """A trial with its whole configuration and its run file; done says that the file is complete."""

    trial: Trial
    document: Mapping[str, Any]
    file: Path
    done: bool


def plan(experiment: Experiment, options: argparse.Namespace) -> list[Planned]:
    """Every run with its configuration, and whether it is done already.

    Raises:
        ConfigError: a configuration that cannot be used.
        RunFileError: a complete run of another configuration is in the way.
    """
    base = apply_overrides(
        _merged(read_toml(CONFIGS / experiment.config), experiment.settings), options.overrides
    )
    if options.data is not None:
        base = _merged(base, {"data.path": str(options.data)})
    overridden = {override.partition("=")[0].strip() for override in options.overrides}
    for unit in ("epochs", "steps"):
        if (length := getattr(options, unit)) is not None:
            base = shortened(base, unit, length, overridden)
    # what cannot be continued is begun again
    begins_again = not base.get("checkpoint", {}).get("enabled", True)
    every = trials(experiment, options)
    if options.kinds is not None:
        wanted = [trial for trial in every if trial.kind in options.kinds]
        every = sorted(wanted, key=lambda trial: options.kinds.index(trial.kind))
    if options.runs is not None:
        unknown = set(options.runs) - {trial.name for trial in every}
        if unknown:
            raise ConfigError(
                f"--runs {' '.join(sorted(unknown))}: not in the plan; --plan without it lists all"
            )
        every = [trial for trial in every if trial.name in options.runs]
    planned = []
    for trial in every:
        file = options.output / RUNS / f"{trial.name}.h5"
        settings = {"run.file": str(file), "run.overwrite": begins_again, **trial.settings}
        document = _merged(base, settings)
        planned.append(Planned(trial, document, file, is_done(file, document, trial)))
    return planned


def shortened(
    document: Mapping[str, Any], unit: str, length: int, kept: Collection[str] = ()
) -> dict[str, Any]:
    """The configuration as a run of another length: schedule, dense warm-ups and evaluations keep their place in it.

    Args:
        document: a configuration.
        unit: "epochs" or "steps", which the configuration must count in.
        length: so many of them. A run of so many steps is evaluated some EVALUATIONS times.
        kept: "section.key" of what stays as it is.

    Raises:
        ConfigError: the configuration counts in the other unit.
    """
    training, schedule = document.get("training", {}), document.get("schedule", {})
    planned = training.get(unit, 0)
    if not planned:
        other = "epochs" if unit == "steps" else "steps"
        raise ConfigError(f"--{unit} {length}: this experiment counts in {other}: give --{other}")
    share = length / planned
    changed: dict[str, Any] = {}
    if schedule.get("unit", "steps") != "run":
        for key in ("warmup", "milestones"):
            if key in schedule:
                value = schedule[key]
                scaled = [each * share for each in (value if isinstance(value, list) else [value])]
                changed[f"schedule.{key}"] = scaled if isinstance(value, list) else scaled[0]
    if warmup := document.get("reduction", {}).get("dense_warmup_steps", 0):
        changed["reduction.dense_warmup_steps"] = max(1, round(warmup * share))
    if unit == "steps":
        changed["training.eval_every"] = math.ceil(length / EVALUATIONS)
    changed = {name: value for name, value in changed.items() if name not in kept}
    return _merged(
        document, {**changed, "training.epochs": 0, "training.steps": 0, f"training.{unit}": length}
    )


def _merged(document: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    return apply_overrides(
        document, [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in settings.items()]
    )


def _of_no_consequence(trial: Trial) -> set[str]:
    """The "section.key" of what may be another one, and the run still be this trial's."""
    free = {"data.path"}
    if trial.kind != "speed":
        return free | {"reduction.deferred"}
    # a short run ends by its steps; and only with Ok-Topk does it matter whether the host waits
    return free | {"training.epochs"} | ({"reduction.deferred"} if trial.method != "oktopk" else set())


def is_done(file: Path, document: Mapping[str, Any], trial: Trial) -> bool:
    """Whether a run is complete. Raises RunFileError: it is, and was another one than is asked for now."""
    config = validate(document)
    try:
        with RunReader(file) as reader:
            if reader.status != "complete":
                return False
            info = reader.info
            steps, evaluated = reader.steps()["step"], reader.evaluations()["seconds"]
    except (RunFileError, *DAMAGE):
        return False
    ended = len(steps) and len(evaluated) and steps[-1] == config.training.steps
    if trial.kind == "speed" and not ended:
        return False
    differing = differing_run(info, config, frozenset({"run", "checkpoint", *_of_no_consequence(trial)}))
    if info.ranks != trial.ranks:
        differing.append(f"ranks: {info.ranks} there, {trial.ranks} here")
    if differing:
        raise RunFileError(
            f"{file} is a complete run of another experiment ({'; '.join(differing)}): choose another -o"
        )
    return True


def describe(planned: Sequence[Planned]) -> str:
    """The plan as a table: what is complete, then what is to do, in its order."""
    ordered = sorted(planned, key=lambda each: not each.done)
    rows = [
        [trial.name, trial.method, trial.ranks, trial.seed, trial.kind, "complete" if done else ""]
        for trial, done in ((each.trial, each.done) for each in ordered)
    ]
    table = tabulate(rows, ["run", "method", "ranks", "seed", "kind", "state"])
    return f"{table}\n\n{sum(not each.done for each in planned)} of {len(planned)} runs to do"


def planned_files(planned: Sequence[Planned]) -> dict[str, list[Path]]:
    """The run files there are, by the kind of their trial."""
    there = [each for each in planned if each.file.exists()]
    return {kind: [each.file for each in there if each.trial.kind == kind] for kind in KINDS}
