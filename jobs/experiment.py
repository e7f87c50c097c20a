"""A whole table of results by one command, which may be given again until the table is complete.

    python -m jobs.experiment vgg --data cifar10.h5 -o vgg --budget 540

Trains every method, some with several seeds, and times all of them on several numbers of ranks. It prints what it is
about to do and how long that takes, skips the runs whose files are complete, stops before a run that would not end
within --budget, and writes the report, its figures as CSV and the tables as Markdown into DIR/report.

Exit status: 0 when the table is complete; 3 when runs are left for another call; 1 when one failed; 2 when what was
asked for cannot be done.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from jobs.budget import RUN_SECONDS, START_SECONDS, Pace, launches
from jobs.configfile import ConfigError, apply_overrides, read_toml, validate
from jobs.experiment_report import write_report
from jobs.experiments import EXPERIMENTS, KINDS, Experiment, Trial, trials
from jobs.launch import LaunchError, end_on_sigterm, run_job
from jobs.runfile import RunFileError
from jobs.runreader import RunReader

CONFIGS = Path(__file__).parent / "configs"
RUNS = "runs"
LEFT = 3
PATIENCE = 20.0  # seconds to stop with a checkpoint in


@dataclass(frozen=True)
class Planned:
    """A trial with its whole configuration and its run file; done says that the file is complete."""

    trial: Trial
    document: Mapping[str, Any]
    file: Path
    done: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = parse(words)
    experiment = EXPERIMENTS[options.experiment]
    end_on_sigterm()
    deadline = None if options.budget is None else time.time() + options.budget
    failed: dict[str, str] = {}
    try:
        planned = plan(experiment, options)
        pace = measured_pace(experiment, options, planned)
        print(describe(planned, pace, options.budget), flush=True)
        if options.plan:
            return 0
        failed = run_trials(planned, pace, deadline, options.output)
        planned = plan(experiment, options)
        command = shlex.join(["python", "-m", "jobs.experiment", *words])
        print(write_report(experiment, planned_files(planned), options.output / "report", command, failed))
    except (ConfigError, LaunchError, RunFileError) as error:
        print(f"jobs.experiment: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    for name, reason in failed.items():
        print(f"jobs.experiment: {name} failed: {reason}", file=sys.stderr)
    left = [each.trial.name for each in planned if not each.done]
    if left:
        print(f"{len(planned) - len(left)} of {len(planned)} runs are complete; the same command goes on")
    return 1 if failed else LEFT if left else 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.experiment", description="A whole table of results by one resumable command."
    )
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--data", type=Path, metavar="FILE.h5", help="written by data.prepare")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--ranks", type=int, default=4, help="default: %(default)s")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="start no run that would end later; default: no limit",
    )
    parser.add_argument(
        "--epochs", type=int, help="shorten the runs to so many epochs, and their schedule with them"
    )
    parser.add_argument("--seeds", type=int, default=3, help="of dense and oktopk; default: %(default)s")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="only these; default: all")
    parser.add_argument(
        "--speed-ranks",
        type=int,
        nargs="*",
        metavar="RANKS",
        help="numbers of ranks to compare speeds on; default: 1, 2, 4 … up to --ranks",
    )
    parser.add_argument("--speed-steps", type=int, default=200, help="0: none; default: %(default)s")
    parser.add_argument(
        "--region-steps",
        type=int,
        default=500,
        help="of Ok-Topk with balanced and with equal regions, in experiments that compare them; 0: none; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--no-gpu-methods", action="store_true", help="leave out NCCL and DistributedDataParallel"
    )
    parser.add_argument(
        "--epoch-seconds",
        type=float,
        metavar="SECONDS",
        help="how long an epoch is expected to take, until one was measured",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="section.key=value",
        nargs="+",
        action="extend",
        default=[],
        help="override keys of the configuration in all runs",
    )
    parser.add_argument("--plan", action="store_true", help="print the plan and leave")
    options = parser.parse_args(words)
    for name in ("ranks", "seeds", "epochs"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value} is not at least 1")
    if options.speed_ranks is None:
        options.speed_ranks = [2**i for i in range(options.ranks.bit_length()) if 2**i <= options.ranks]
    unknown = set(options.methods or ()) - set(EXPERIMENTS[options.experiment].methods)
    if unknown:
        known = ", ".join(EXPERIMENTS[options.experiment].methods)
        parser.error(f"--methods {' '.join(sorted(unknown))}: not among {known}")
    # jobs run in the checkout's root
    options.output = options.output.absolute()
    options.data = None if options.data is None else options.data.absolute()
    return options


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
    if options.epochs is not None:
        base = shortened(base, options.epochs)
    # what cannot be continued is begun again
    begins_again = not base.get("checkpoint", {}).get("enabled", True)
    planned = []
    for trial in trials(
        experiment,
        ranks=options.ranks,
        seeds=options.seeds,
        methods=options.methods or experiment.methods,
        speed_ranks=options.speed_ranks,
        speed_steps=options.speed_steps,
        region_steps=options.region_steps,
        elsewhere=not options.no_gpu_methods,
    ):
        file = options.output / RUNS / f"{trial.name}.h5"
        settings = {"run.file": str(file), "run.overwrite": begins_again, **trial.settings}
        document = _merged(base, settings)
        planned.append(Planned(trial, document, file, is_done(file, document)))
    return planned


def shortened(document: Mapping[str, Any], epochs: int) -> dict[str, Any]:
    """The configuration for so many epochs; warm-up and milestones that count in epochs keep their place in the run."""
    given = document.get("training", {}).get("epochs", 0)
    changed: dict[str, Any] = {"training.epochs": epochs, "training.steps": 0}
    schedule = document.get("schedule", {})
    if given and schedule.get("unit", "steps") == "epochs":
        for key in ("warmup", "milestones"):
            if key in schedule:
                value = schedule[key]
                scaled = [each * epochs / given for each in (value if isinstance(value, list) else [value])]
                changed[f"schedule.{key}"] = scaled if isinstance(value, list) else scaled[0]
    return _merged(document, changed)


def _merged(document: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    return apply_overrides(
        document, [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in settings.items()]
    )


def is_done(file: Path, document: Mapping[str, Any]) -> bool:
    """Whether a run is complete. Raises RunFileError: it is, and was another one than is asked for now."""
    config = json.loads(validate(document).to_json())
    try:
        with RunReader(file) as reader:
            if reader.status != "complete":
                return False
            found = reader.config
    except RunFileError:
        return False
    differing = [
        f"{section}.{key} {found.get(section, {}).get(key)!r}, not {value!r}"
        for section, keys in config.items()
        if section not in ("run", "checkpoint")
        for key, value in keys.items()
        if found.get(section, {}).get(key) != value and (section, key) != ("data", "path")
    ]
    if differing:
        raise RunFileError(
            f"{file} is a complete run of another experiment ({'; '.join(differing)}): choose another -o"
        )
    return True


def measured_pace(experiment: Experiment, options: argparse.Namespace, planned: Sequence[Planned]) -> Pace:
    """How long runs take, by those that are done."""
    epochs = max((each.document.get("training", {}).get("epochs", 0) for each in planned), default=0)
    epoch = experiment.epoch_seconds if options.epoch_seconds is None else options.epoch_seconds
    short = RUN_SECONDS + 2 * epoch
    pace = Pace({"train": RUN_SECONDS + max(1, epochs) * epoch, "regions": short, "speed": short})
    for each in planned:
        if each.done:
            with RunReader(each.file) as reader:
                elapsed, evaluating = reader.steps()["elapsed"], reader.evaluations()["seconds"]
            pace.add(each.trial, RUN_SECONDS + float(elapsed[-1]) + float(evaluating[-1]))
    return pace


def describe(planned: Sequence[Planned], pace: Pace, budget: float | None) -> str:
    """The plan as a table, and what of it fits into the budget."""
    rows, total, spent, fitting = [], 0.0, 0.0, 0
    todo = [each for each in planned if not each.done]
    order = [trial.name for launch in launches([each.trial for each in todo]) for trial in launch]
    launched: set[int] = set()
    by_name = {each.trial.name: each for each in planned}
    for each in [each for each in planned if each.done] + [by_name[name] for name in order]:
        trial = each.trial
        seconds = pace.seconds(trial)
        said = "complete"
        if not each.done:
            total += seconds + (0.0 if trial.ranks in launched else START_SECONDS)
            launched.add(trial.ranks)
            said = f"{seconds:.0f} s" + ("" if pace.known(trial) else ", a guess")
            if budget is None or total <= budget:
                spent, fitting = total, fitting + 1
        rows.append([trial.name, trial.method, trial.ranks, trial.seed, trial.kind, said])
    table = tabulate(rows, ["run", "method", "ranks", "seed", "kind", "expected"])
    closing = f"{len(todo)} of {len(planned)} runs to do, about {total:.0f} s"
    if budget is not None and todo:
        closing += f"; the budget of {budget:.0f} s is for {fitting} of them, about {spent:.0f} s"
    return f"{table}\n\n{closing}"


def run_trials(
    planned: Sequence[Planned], pace: Pace, deadline: float | None, folder: Path
) -> dict[str, str]:
    """Launch what is not done until all is or the time is spent.

    Returns:
        name -> why, of the runs that failed; the others went on without them.
    """
    failed: dict[str, str] = {}
    runs = folder / RUNS
    runs.mkdir(parents=True, exist_ok=True)
    by_name = {each.trial.name: each for each in planned}
    for launch in launches([each.trial for each in planned if not each.done]):
        waiting = [trial.name for trial in launch]
        while waiting:
            first = by_name[waiting[0]].trial
            if deadline is not None and time.time() + START_SECONDS + pace.seconds(first) > deadline:
                return failed
            outcome = _launch([by_name[name] for name in waiting], pace, deadline, runs)
            failed.update(outcome["failed"])
            if outcome["stopped"]:
                return failed
            if not outcome["current"]:
                break
            # the job died in this run: the ones after it are tried without it
            failed[outcome["current"]] = outcome["error"]
            waiting = waiting[waiting.index(outcome["current"]) + 1 :]
    return failed


def _launch(planned: Sequence[Planned], pace: Pace, deadline: float | None, runs: Path) -> dict[str, Any]:
    """One mpiexec that trains these runs; what its outcome file says."""
    plan_file, outcome_file = runs / "plan.json", runs / "outcome.json"
    entries = [
        {"trial": dataclasses.asdict(each.trial), "document": each.document, "name": each.trial.name}
        for each in planned
    ]
    plan_file.write_text(
        json.dumps(
            {"deadline": deadline, "guesses": pace.guesses, "measured": pace.measured, "trials": entries}
        )
    )
    outcome_file.unlink(missing_ok=True)
    began = time.time()
    ranks = planned[0].trial.ranks
    words = ["-m", "jobs.experiment_worker", str(plan_file), str(outcome_file)]
    status = run_job(ranks, words, patience=PATIENCE)
    if not outcome_file.exists():
        raise LaunchError(f"the job of {ranks} ranks ended with status {status} before its first run")
    outcome: dict[str, Any] = json.loads(outcome_file.read_text())
    outcome["error"] = f"the job ended with status {status} after {time.time() - began:.0f} s"
    return outcome


def planned_files(planned: Sequence[Planned]) -> dict[str, list[Path]]:
    """The run files there are, by the kind of their trial."""
    found: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    for each in planned:
        if each.file.exists():
            found[each.trial.kind].append(each.file)
    return found


if __name__ == "__main__":
    sys.exit(main())
