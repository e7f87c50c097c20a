"""The demo: train the same network with each method on several ranks, then compare.

    python -m jobs.demo

Writes a run file of each method, the page that compares them and the CSV files into demo/, which it may replace.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jobs.launch import run_job
from jobs.report.write import PAGE, report
from jobs.run.file import RunFileError
from oktopk.launch import LaunchError, available_cores, end_on_sigterm

CONFIG = Path(__file__).parent / "configs" / "digits.toml"
METHODS = ("dense", "oktopk")


def training_arguments(options: argparse.Namespace, method: str) -> list[str]:
    """What follows `python -m mpi4py` to train with one method."""
    settings: dict[str, object] = {
        "reduction.method": method,
        "reduction.density": options.density,
        "model.width": options.width,
        "run.file": str(options.output / f"{method}.h5"),
        "run.overwrite": True,
        "checkpoint.enabled": False,
    }
    if options.data is not None:
        settings.update({"data.name": "prepared", "data.path": str(options.data)})
    if options.steps is not None:
        settings["training.steps"] = options.steps
    # A JSON string or number is a TOML one, whatever characters a path has.
    overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]
    return ["-m", "jobs.train", str(CONFIG), "--set", *overrides]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; paths made absolute, because jobs run in the checkout's root."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.demo",
        description="Train VGG-16 with each method on several ranks of this machine, and compare the methods on one page.",
        epilog="example:\n  python -m jobs.demo --ranks 4 --output demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=int, default=4, help="Number of ranks, at least 1; default: %(default)s"
    )
    parser.add_argument(
        "--width",
        type=float,
        default=0.25,
        help="Factor on the channels of VGG-16, in (0, 8]; default: %(default)s",
    )
    parser.add_argument(
        "--density",
        type=float,
        default=0.02,
        help="Share of the gradient's entries applied per step, in (0, 1]; default: %(default)s",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE.h5",
        help="Images written by data.prepare; default: the digits, which need no file",
    )
    parser.add_argument("--steps", type=int, help=f"Steps of each run; default: those of {CONFIG.name}")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo"),
        metavar="DIR",
        help="Folder of the run files and the page; default: %(default)s",
    )
    options = parser.parse_args(argv)
    options.output = options.output.absolute()
    options.data = None if options.data is None else options.data.absolute()
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: that of the first job that failed, 2 where nothing could be started."""
    options = parse(argv)
    end_on_sigterm()
    began = time.monotonic()
    paths = [options.output / f"{method}.h5" for method in METHODS]
    try:
        for number, method in enumerate(METHODS, start=1):
            print(
                f"[{number}/{len(METHODS)}] {method} on {options.ranks} ranks and {available_cores()} cores",
                flush=True,
            )
            status = run_job(options.ranks, training_arguments(options, method))
            if status:
                print(f"jobs.demo: training with {method} ended with status {status}", file=sys.stderr)
                return status
        table = report(paths, options.output)
    except (LaunchError, RunFileError) as error:
        print(f"jobs.demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"\n{table}\n")
    print(f"page: {options.output / PAGE}; all of it took {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
