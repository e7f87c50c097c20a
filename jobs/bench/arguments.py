"""Names, defaults and parser of the bench's command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from jobs.bench.device import DEVICES
from jobs.bench.document import HOST_ROWS, NCCL_ROWS, BenchError
from jobs.bench.gradients import PROFILES
from jobs.bench.mpi import ALGORITHMS
from jobs.bench.row_volume import SKEWS
from oktopk import METHODS
from oktopk.devices import GRADIENT_TYPES
from oktopk.settings import DENSE_ABOVE

VGG_LENGTH = 14_728_266
DENSITY = 0.01
STEPS = 64
SWEEP_LENGTH = 100_000
SWEEP_DENSITY = 0.02  # an allgather of every selection crosses dense at 1/density ranks: within a sweep to 64
ABLATION_RANKS = (4, 8)
LIBRARY_METHODS = tuple(ALGORITHMS)
OVER_MPI = "oktopk-mpi"
OWN_ROWS = (OVER_MPI, "oktopk-into-g")
"""On a GPU: Ok-Topk kept to MPI where it could do without, and Ok-Topk whose update is written into the gradient."""
KNOWN = {
    "cpu": (*METHODS, *LIBRARY_METHODS, *HOST_ROWS),
    "cuda": (*METHODS, *OWN_ROWS, *NCCL_ROWS, *HOST_ROWS),
}
"""device -> what `--methods` takes."""
TABLES: dict[str, tuple[str, ...]] = {
    "": (
        *(
            "methods",
            "length",
            "density",
            "steps",
            "warmup",
            "dense_steps",
            "gradients",
            "gradient_type",
            "settings",
        ),
        *("ablate", "sweep_ranks", "memory", "link"),
    ),
    "dense": ("gradient_type",),
    "gpu": ("rows", "budget", "gradient_type"),
    "hook": ("length", "density", "steps", "warmup", "settings"),
    "rows": ("rows", "table_rows", "width", "skew", "steps", "warmup"),
}
"""Table, "" for none -> the options that it takes besides those of every bench, by their names in the parser's result."""
TABLE_METHODS = ("oktopk", *OWN_ROWS, *NCCL_ROWS)
BUDGET = 300.0
TOUCHED, TABLE_ROWS, WIDTH, ROW_STEPS, ROW_WARMUP = 50_000, 1_000_000, 512, 10, 2
"""Of the table of rows."""


def number(kind: Callable[[str], float], least: float) -> Callable[[str], float]:
    """Reads a number of at least `least`, for a parser."""

    def read(text: str) -> float:
        if not (value := kind(text)) >= least:
            raise argparse.ArgumentTypeError(f"{text} is not at least {least}")
        return value

    read.__name__ = kind.__name__
    return read


def numbers(text: str) -> tuple[int, ...]:
    """Reads numbers of at least 1, for a parser."""
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 2,4,8") from None
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{min(found)} is not at least 1")
    return found


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # not printed from here: every rank parses, one speaks
        raise BenchError(message)


def usage() -> str:
    """The text of --help."""
    return parser().format_help()


def parser() -> argparse.ArgumentParser:
    """A parser that raises BenchError and prints nothing."""
    parser = _Parser(
        prog="mpiexec -n RANKS python -m mpi4py -m jobs.bench",
        description="Time gradient allreduces on the same gradients in one run, and count their words, messages and memory.",
        epilog="examples:\n"
        "  mpiexec -n 4 python -m mpi4py -m jobs.bench --methods oktopk,mpi --length 14728266 --density 0.01 --json bench.json\n"
        "  python -m jobs.bench --ablate --json ablation.json\n"
        "  python -m jobs.bench --sweep-ranks 2,4,8,16,32,64 --json sweep.json\n"
        "  mpiexec -n 4 python -m mpi4py -m jobs.bench --table gpu --json gpu.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--methods",
        nargs="+",
        metavar="NAME",
        help=f"Methods to measure, of {', '.join(KNOWN['cpu'])}; default: all but mpi-ring, "
        f"mpi-rabenseifner and those that begin with oktopk-. On --device cuda of {', '.join(KNOWN['cuda'])}; default: all but "
        "those that begin with oktopk-. Rows such as oktopk-hosts-int4 name levels and wire",
    )
    text = (
        f"Number of elements of the gradient, or several such as 14728266,133547324, measured one after another; default: "
        f"{VGG_LENGTH}, those of VGG-16; {SWEEP_LENGTH} with --sweep-ranks"
    )
    add("--length", type=numbers, metavar="N,N", help=text)
    text = f"Share of the entries applied per step, in (0, {DENSE_ABOVE}]; default: {DENSITY}, {SWEEP_DENSITY} with --sweep-ranks"
    add("--density", type=float, help=text)
    text = f"Number of steps to measure, at least the threshold interval; default: {STEPS}, {ROW_STEPS} with --table rows"
    add("--steps", type=number(int, 1), metavar="STEPS", help=text)
    text = f"Number of steps discarded before those, at least 0; default: 2/density, rounded up, {ROW_WARMUP} with --table rows"
    add("--warmup", type=number(int, 0), metavar="STEPS", help=text)
    text = "Number of steps to measure of dense methods, from 1 to --steps; default: --steps"
    add("--dense-steps", type=number(int, 1), metavar="STEPS", help=text)
    text = "Kind of the random gradients; default: heavy, with --ablate clustered"
    add("--gradients", choices=tuple(PROFILES), help=text)
    add("--seed", type=int, default=1, help="Seed of the random gradients; default: %(default)s")
    add("--device", choices=DEVICES, help="Device that gradients lie on; default: cpu, with --table gpu cuda")
    text = "Type of the gradients, on a CPU float32 alone; default: float32, with --table both of its types"
    add("--gradient-type", choices=GRADIENT_TYPES["cuda"], help=text)
    add(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="Setting of the reduction for all methods, such as threshold_interval=32; may be repeated",
    )
    text = "Measure Ok-Topk with each of its ideas taken away in turn; starts mpiexec on 4 and on 8 ranks, unless under one"
    add("--ablate", action="store_true", help=text)
    text = "Numbers of ranks to count words on, each at least 1; starts an mpiexec for each of them"
    add("--sweep-ranks", type=numbers, default=(), metavar="P,P,...", help=text)
    text = (
        "Table to measure: gpu, cells with target times; hook, training steps with communication hooks of DDP; "
        "rows, sums of the rows that ranks touched of a table; dense, dense allreduces from 4 KB to 512 MB; default: none"
    )
    add("--table", choices=tuple(filter(None, TABLES)), default="", help=text)
    text = "Numbers of the rows of --table gpu to measure, from 1; default: all. With --table rows: "
    text += f"how many rows a rank draws in a step, at least 1; default: {TOUCHED}"
    add("--rows", type=numbers, metavar="I,I", help=text)
    text = f"Rows of the table of --table rows, at least 1; default: {TABLE_ROWS}"
    add("--table-rows", type=number(int, 1), metavar="N", help=text)
    text = f"Elements of a row of --table rows, at least 1; default: {WIDTH}"
    add("--width", type=number(int, 1), metavar="N", help=text)
    text = "How the rows of --table rows are drawn: all alike, or row i with a chance in proportion to 1/(i + 1); "
    add("--skew", choices=SKEWS, help=text + f"default: {SKEWS[0]}")
    text = f"Start no further cell of --table gpu after so many seconds, at least 0; default: {BUDGET:g}"
    add("--budget", type=number(float, 0), metavar="SECONDS", help=text)
    text = "Commit that is measured, for the record; default: the one that git names"
    add("--commit", default="", metavar="TEXT", help=text)
    add("--json", type=Path, metavar="FILE", help="File to write all results to; default: none")
    text = "Skip the measurement of memory, which slows the last steps of the warm-up"
    add("--no-memory", dest="memory", action="store_false", help=text)
    text = "Network that joins the ranks, in words for the record"
    add("--network", default="", metavar="TEXT", help=text)
    text = (
        "Rate of the link of each host, such as 10gbit, or none where links are unshaped: the table shows floors by it, and a "
        "transfer of a step's size shows whether it holds"
    )
    add("--link", default="", metavar="RATE", help=text)
    add("--quiet", action="store_true", help="Print neither tables nor progress on the terminal")
    return parser
