"""The demo: train the same network with each method on several ranks, then compare.

    python -m jobs.demo

Trains with each method on this host, and shortly over links of 1 Gb/s where this system can shape some. Writes run files, the
page that compares them and the CSV files into demo/, which it may replace.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from data.command import command_parser, show
from jobs.launch import run_job
from jobs.report.groups import Group, group_runs
from jobs.report.summary import read_runs
from jobs.report.write import PAGE, report
from jobs.run.file import RunFileError
from oktopk.launch import LaunchError, available_cores, end_on_sigterm, find_mpiexec

CONFIG = Path(__file__).parent / "configs" / "digits.toml"
METHODS = ("dense", "oktopk")
STEPS = 300
EVALUATE_EVERY = 50
MEASURE_EVERY = 20  # steps between measurements of xi
LINK_SCRIPT = Path(__file__).parent / "bench" / "net.sh"
# exact thresholds are computed once in the steps that count, regions not at all
LINK_STEPS = 40
LINK_PATIENCE = 60.0  # seconds for one method, or LINK_SHARE of the time that the methods took on this host
LINK_SHARE = 0.5


def training_arguments(
    options: argparse.Namespace, method: str, path: Path, settings: Mapping[str, object]
) -> list[str]:
    """Arguments of `jobs.train` for one method; settings: "section.key" -> value."""
    every: dict[str, object] = {
        "reduction.method": method,
        "reduction.density": options.density,
        "model.width": options.width,
        "run.file": str(path),
        "run.overwrite": True,
        "checkpoint.enabled": False,
        **settings,
    }
    if options.data is not None:
        every.update({"data.name": "prepared", "data.path": str(options.data)})
    # A JSON string or number is a TOML one, whatever characters a path has.
    overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in every.items()]
    return [str(CONFIG), "--set", *overrides]


def train(options: argparse.Namespace) -> int:
    """Train with each method on this host; returns the status of the first job that failed."""
    for method in METHODS:
        show(f"{method} on {options.ranks} ranks and {available_cores()} cores", flush=True)
        settings = {
            "training.steps": options.steps,
            "training.eval_every": EVALUATE_EVERY,
            "run.measure_every": 0 if method == "dense" else MEASURE_EVERY,
        }
        arguments = training_arguments(options, method, options.output / f"{method}.h5", settings)
        status = run_job(options.ranks, ["-m", "jobs.train", *arguments])
        if status:
            show(f"jobs.demo: training with {method} ended with status {status}", file=sys.stderr)
            return status
    return 0


def train_over_links(options: argparse.Namespace, patience: float) -> tuple[list[Path], str]:
    """Train shortly with each method, every rank on a host of its own, between links of 1 Gb/s.

    Args:
        patience: seconds for one method.

    Returns:
        The run files, or none and why: nothing raises.
    """
    if not options.links:
        return [], "the demo was started with --no-links"
    if options.ranks < 2:
        return [], "one rank sends nothing"
    paths: list[Path] = []
    for method in METHODS:
        show(f"{method} over links of 1 Gb/s", flush=True)
        paths.append(options.output / f"{method}-1gbit.h5")
        settings = {"training.steps": LINK_STEPS, "training.eval_every": LINK_STEPS, "training.device": "cpu"}
        try:
            arguments = training_arguments(options, method, paths[-1], settings)
            problem = _over_links(options.ranks, arguments, patience)
            if not problem:
                read_runs(paths[-1:])
        except (OSError, LaunchError, RunFileError) as error:
            problem = str(error)
        if problem:
            problem = f"training with {method}: {problem}"
            show(f"  not possible here: {problem}", flush=True)
            return [], problem
    return paths, ""


def _over_links(ranks: int, arguments: Sequence[str], patience: float) -> str:
    """One job over shaped links; returns what went wrong, "" for nothing."""
    count = str(ranks)
    command = ["bash", str(LINK_SCRIPT), "--hosts", count, "--ranks", count, "--rate", "1gbit"]
    command += ["--python", sys.executable, "--mpiexec", os.path.abspath(find_mpiexec())]
    try:
        # when the script is killed, the kernel ends everything that it started
        job = subprocess.run(
            [*command, "--module", "jobs.train", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=patience,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"more than {patience:.0f} s"
    lines = [line.strip() for line in job.stderr.replace("\r", "\n").splitlines() if line.strip()]
    # a launcher adds lines of its own below
    own = [line for line in lines if line.startswith(("bench-net:", "jobs.train:"))] or lines
    return f"status {job.returncode}: {(own or ['no message'])[-1][:300]}" if job.returncode else ""


def in_short(groups: Sequence[Group], where: str, only: str = "") -> list[str]:
    """What Ok-Topk came to beside the dense allreduce, a sentence for each figure that both have.

    Args:
        where: the ranks exchanged, of the seconds.
        only: this figure.
    """
    dense, ours = (next((g for g in groups if g.method == method), None) for method in METHODS)
    if dense is None or ours is None:
        return []
    sentences = {
        "words": "Ok-Topk sends {:,.0f} words a rank and step, dense {:,.0f}.",
        "held_out_accuracy": "Ok-Topk gets {:.1%} of the held-out images right, dense {:.1%}; one seed.",
        "step_seconds": f"A step takes {{:.1f}} ms with Ok-Topk {where}, dense {{:.1f}} ms.",
    }
    lines = []
    for figure, sentence in sentences.items():
        own, other = ours.mean(figure), dense.mean(figure)
        scale = 1e3 if figure == "step_seconds" else 1.0
        if only in ("", figure) and own is not None and other is not None:
            lines.append(sentence.format(scale * own, scale * other))
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; paths made absolute, because jobs run in the checkout's root."""
    title = (
        "Train VGG-16 with each method on several ranks of this machine, and compare the methods on one page."
    )
    parser = command_parser("jobs.demo", title, "--ranks 4 --output demo")
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="Number of ranks, at least 1; default: %(default)s")
    text = "Factor on the channels of VGG-16, in (0, 8]; default: %(default)s"
    add("--width", type=float, default=0.1875, help=text)
    text = "Do not train over links of 1 Gb/s"
    add("--no-links", dest="links", action="store_false", help=text)
    text = "Share of the gradient's entries applied per step, in (0, 1]; default: %(default)s"
    add("--density", type=float, default=0.02, help=text)
    text = "Images written by data.prepare; default: the digits, which need no file"
    add("--data", type=Path, metavar="FILE.h5", help=text)
    add("--steps", type=int, default=STEPS, help="Steps of each run; default: %(default)s")
    text = "Folder of the run files and the page; default: %(default)s"
    add("--output", type=Path, default=Path("demo"), metavar="DIR", help=text)
    options = parser.parse_args(argv)
    options.output = options.output.absolute()
    options.data = None if options.data is None else options.data.absolute()
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: that of the first job that failed, 2 where nothing could be started."""
    options = parse(argv)
    end_on_sigterm()
    began = time.monotonic()
    try:
        if status := train(options):
            return status
        took = time.monotonic() - began
        slow, problem = train_over_links(options, max(LINK_PATIENCE, LINK_SHARE * took))
        trained = [options.output / f"{method}.h5" for method in METHODS]
        notes = in_short(group_runs(read_runs(trained)), "here, in one host's memory")
        notes += in_short(group_runs(read_runs(slow)), "over links of 1 Gb/s", "step_seconds") if slow else []
        notes += [f"A step at 1 Gb/s was not measured: {problem}."] if problem else []
        table = report(
            trained,
            options.output,
            slow=slow,
            title="Ok-Topk beside a dense allreduce",
            notes_besides=notes,
        )
    except (LaunchError, RunFileError) as error:
        show(f"jobs.demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    show("\n".join(["", str(table), *notes, ""]))
    show(f"page: {options.output / PAGE}; all of it took {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
