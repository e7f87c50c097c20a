"""The command line of jobs.experiment."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from data.command import command_parser
from jobs.config.file import add_overrides
from jobs.experiment.experiments import EXPERIMENTS, KINDS


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
    text = "Data set that data.prepare wrote; required unless --set data.path names it, or for vit, whose images are made up"
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
