"""The command line of jobs.experiment."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jobs.experiment.registry import EXPERIMENTS
from jobs.experiment.trials import KINDS


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.experiment", description="A whole table of results by one resumable command."
    )
    add = parser.add_argument
    add("experiment", choices=EXPERIMENTS)
    add("--data", type=Path, metavar="FILE.h5", help="written by data.prepare")
    add("-o", "--output", type=Path, required=True, metavar="DIR")
    add("--ranks", type=int, default=4, help="default: %(default)s")
    add(
        "--budget", type=float, metavar="SECONDS", help="start no run that would end later; default: no limit"
    )
    length = parser.add_mutually_exclusive_group()
    for unit, experiments in (("epochs", "vgg, lstm"), ("steps", "bert")):
        text = f"{experiments}: train for so many {unit}; schedule and dense warm-up are shortened in proportion, but for what "
        text += "--set gives" + ("; evaluations too" if unit == "steps" else "")
        length.add_argument(f"--{unit}", type=int, help=text)
    add("--seeds", type=int, help="of dense and oktopk; default: 3, 2 for bert")
    add("--methods", nargs="+", metavar="METHOD", help="only these; default: all")
    text = "numbers of ranks to compare speeds on; default: 1, 2, 4 … up to --ranks, for bert --ranks alone"
    add("--speed-ranks", type=int, nargs="*", metavar="RANKS", help=text)
    add("--speed-steps", type=int, help="0: none; default: 200, 148 for bert")
    text = "of Ok-Topk with balanced and with equal regions, in experiments that compare them; 0: none; default: %(default)s"
    add("--region-steps", type=int, default=500, help=text)
    text = "per rank, to compare speeds at; default: as in training, for bert 8 and 256"
    add("--speed-batches", type=int, nargs="+", metavar="SAMPLES", help=text)
    text = "only runs of these kinds, and in this order; default: all, the most telling ones first"
    add("--kinds", nargs="+", choices=KINDS, help=text)
    text = "only these runs, as --plan names them: to spread a table over jobs"
    add("--runs", nargs="+", metavar="NAME", help=text)
    add("--no-gpu-methods", action="store_true", help="leave out NCCL and DistributedDataParallel")
    for unit in ("an epoch", "a step"):
        text = f"how long {unit} is expected to take, until a run was measured"
        add(f"--{unit.split()[1]}-seconds", type=float, metavar="SECONDS", help=text)
    add(
        "--set",
        dest="overrides",
        metavar="section.key=value",
        nargs="+",
        action="extend",
        default=[],
        help="override keys of the configuration in all runs",
    )
    text = "a sentence for the top of the report, on the data for instance"
    add("--note", action="append", default=[], metavar="TEXT", help=text)
    add("--plan", action="store_true", help="print the plan and leave")
    options = parser.parse_args(words)
    experiment = EXPERIMENTS[options.experiment]
    for name in ("seeds", "speed_steps", "speed_batches"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(experiment, name))
    for name in ("ranks", "seeds", "epochs", "steps", "speed_batches"):
        value = getattr(options, name)
        if value is not None and min(value if isinstance(value, Sequence) else [value], default=1) < 1:
            parser.error(f"--{name.replace('_', '-')} {value} is not at least 1")
    if options.speed_ranks is None:
        sizes = [2**i for i in range(options.ranks.bit_length()) if 2**i <= options.ranks]
        options.speed_ranks = sizes if experiment.scaling else [options.ranks]
    unknown = set(options.methods or ()) - set(experiment.methods)
    if unknown:
        known = ", ".join(experiment.methods)
        parser.error(f"--methods {' '.join(sorted(unknown))}: not among {known}")
    # jobs run in the checkout's root
    options.output = options.output.absolute()
    options.data = None if options.data is None else options.data.absolute()
    return options
