"""Makes a whole table of results by one command, which continues the table when repeated.

    python -m jobs.experiment vgg --data cifar10.h5 -o vgg --budget 540
    python -m jobs.experiment bert --data text.h5 -o bert --steps 2000
    python -m jobs.experiment gpt --data gpt.h5 -o gpt --steps 3000
    python -m jobs.experiment vit --data cifar10.h5 -o vit --steps 500

Trains every method, some with several seeds, and times all of them on several numbers of ranks or at several sizes of
batches; vit also trains DDP with its bfloat16 hook, gpt also updates.
It prints what it is about to do, skips the runs whose files are complete, stops the run at work with a checkpoint after
--budget, and writes the report, its figures as CSV and the tables as Markdown into DIR/report.

Several jobs may fill one table at the same time, each with --methods, --kinds or --runs of its own; the command for all of it,
given last, writes the report of all.

Exit status: 0 when the table is complete; 3 when runs are left for another call; 1 when one failed; 2 when what was
asked for cannot be done.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from data.command import command_parser, show
from data.durable import replaced
from jobs.config.file import ConfigError, add_overrides, commented_toml, validate
from jobs.experiment.experiments import EXPERIMENTS, KINDS
from jobs.experiment.plan import Planned, describe, plan, planned_files
from jobs.experiment.report import write_report
from jobs.launch import run_job
from jobs.restart.signals import EXIT_STATUS
from jobs.restart.start import checkpoint_folder
from jobs.run.file import RunFileError
from oktopk import METHODS
from oktopk.launch import LaunchError, end_on_sigterm


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_parser(
        "jobs.experiment",
        "Train and time every method for one table of results. The same command continues an interrupted table.",
        "vgg --data cifar10.h5 -o vgg --budget 540",
        "bert --data text.h5 -o bert --steps 2000",
    )
    add = parser.add_argument
    add("experiment", choices=EXPERIMENTS, help="Network that the table is about, with the paper's settings")
    text = "Data set that data.prepare wrote; required unless --set data.path names it"
    add("--data", type=Path, metavar="FILE.h5", help=text)
    text = "Folder of the runs and of their report"
    add("-o", "--output", type=Path, required=True, metavar="DIR", help=text)
    add("--ranks", type=int, default=4, help="Number of ranks to train on, at least 1; default: %(default)s")
    text = "Stop the run at work with a checkpoint after so many seconds; default: no limit"
    add("--budget", type=float, metavar="SECONDS", help=text)
    length = parser.add_mutually_exclusive_group()
    for unit, experiments in (("epochs", "vgg, lstm"), ("steps", "bert, gpt, vit")):
        shortened = (
            "schedule, dense warm-up and evaluations" if unit == "steps" else "schedule and dense warm-up"
        )
        text = f"Length of the training in {unit}, at least 1, for {experiments}; shortens the {shortened} in proportion, except "
        text += "for keys given with --set; default: that of the configuration"
        length.add_argument(f"--{unit}", type=int, help=text)
    text = "Number of seeds of dense and oktopk, at least 1; default: 3, for bert and vit 2"
    add("--seeds", type=int, help=text)
    add("--methods", nargs="+", metavar="METHOD", help="Methods to train and time; default: all")
    text = "Numbers of ranks to compare speeds on; default: 1, 2, 4 … up to --ranks, for bert, gpt and vit --ranks alone"
    add("--speed-ranks", type=int, nargs="*", metavar="RANKS", help=text)
    text = "Steps of each run that compares speeds; 0: no such runs; default: 200, for bert, gpt and vit 148"
    add("--speed-steps", type=int, metavar="STEPS", help=text)
    text = "Samples per rank and step to compare speeds at, at least 1; default: as in training, for bert 8 and 256"
    add("--speed-batches", type=int, nargs="+", metavar="SAMPLES", help=text)
    text = "Kinds of runs to do, in this order; default: all kinds, the most informative runs first"
    add("--kinds", nargs="+", choices=KINDS, help=text)
    text = (
        "Names of the runs to do, as --plan prints them, so that several jobs can share a table; default: all"
    )
    add("--runs", nargs="+", metavar="NAME", help=text)
    text = "Leave out NCCL, DistributedDataParallel and its hooks, which need GPUs"
    add("--no-gpu-methods", action="store_true", help=text)
    text = "Values of keys of the configuration, for all runs; the keys are in jobs/config/sections.py"
    add_overrides(parser, text)
    text = "Sentence for the top of the report, on the data for instance; may be repeated"
    add("--note", action="append", default=[], metavar="TEXT", help=text)
    add("--plan", action="store_true", help="Print the plan and exit without a run")
    options = parser.parse_args(words)
    experiment = EXPERIMENTS[options.experiment]
    for name in ("seeds", "speed_steps", "speed_batches"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(experiment, name))
    for name in ("ranks", "seeds", "epochs", "steps", "speed_batches"):
        value = getattr(options, name)
        if value is not None and min(value if isinstance(value, Sequence) else [value], default=1) < 1:
            parser.error(f"--{name.replace('_', '-')} {value} is not at least 1")
    if options.budget is not None and not options.budget > 0:
        parser.error(f"--budget {options.budget} is not above 0")
    if options.speed_ranks is None:
        sizes = [2**i for i in range(options.ranks.bit_length()) if 2**i <= options.ranks]
        options.speed_ranks = sizes if experiment.scaling else [options.ranks]
    every = (*experiment.methods, *experiment.rivals)
    unknown = set(options.methods or ()) - set(every)
    if unknown:
        known = ", ".join(every)
        parser.error(f"--methods {' '.join(sorted(unknown))}: not among {known}")
    # jobs run in the checkout's root
    options.output = options.output.absolute()
    options.data = None if options.data is None else options.data.absolute()
    return options


LEFT = 3
PATIENCE = 20.0  # seconds to stop with a checkpoint in


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
        show(describe(planned), flush=True)
        if options.plan:
            return 0
        failed = run_trials(planned, deadline)
        planned = plan(experiment, options)
        command = shlex.join(["python", "-m", "jobs.experiment", *words])
        left = [each.trial.name for each in planned if not each.done]
        waiting = [name for name in left if name not in failed]
        notes = [*options.note, *([f"not complete: {', '.join(waiting)}"] if waiting else [])]
        notes += [f"{name} failed: {reason}" for name, reason in failed.items()]
        show(write_report(experiment, planned_files(planned), options.output / "report", command, notes))
    except (ConfigError, LaunchError, RunFileError, OSError) as error:
        show(f"jobs.experiment: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    for name, reason in failed.items():
        show(f"jobs.experiment: {name} failed: {reason}", file=sys.stderr)
    if any(each.trial.method not in METHODS for each in planned if each.trial.name in failed):
        show("jobs.experiment: --no-gpu-methods leaves out what needs GPUs", file=sys.stderr)
    if left:
        show(f"{len(planned) - len(left)} of {len(planned)} runs are complete; the same command goes on")
    return 1 if failed else LEFT if left else 0


def run_trials(planned: Sequence[Planned], deadline: float | None) -> dict[str, str]:
    """Train what is not done, one job for each run, until all is or the time is spent.

    A run's configuration stays beside its file, as NAME.toml, to be trained or continued by hand.

    Returns:
        name -> why, of the runs that failed; the others went on without them.
    """
    failed: dict[str, str] = {}
    waiting = [each for each in planned if not each.done]
    for number, each in enumerate(waiting, start=1):
        left = None if deadline is None else deadline - time.time()
        if left is not None and left <= 0:
            break
        show(f"[{number}/{len(waiting)}] {each.trial.name}", file=sys.stderr, flush=True)
        settings = each.file.with_suffix(".toml")
        settings.parent.mkdir(parents=True, exist_ok=True)
        with replaced(settings) as draft:
            draft.write_text(commented_toml(each.document), encoding="utf-8")
        words = ["-m", "jobs.train", str(settings)]
        status = run_job(each.trial.ranks, words, patience=PATIENCE, seconds=left)
        if status == EXIT_STATUS or (deadline is not None and time.time() >= deadline):
            break
        if status:
            failed[each.trial.name] = f"jobs.train {settings} ended with status {status}"
        else:
            # a complete run needs no checkpoint
            shutil.rmtree(checkpoint_folder(validate(each.document)), ignore_errors=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
