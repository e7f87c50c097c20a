"""What the bench's command line takes: names, defaults and the parser."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from jobs.bench.device import DEVICES
from jobs.bench.document import NCCL_ROWS, BenchError
from jobs.bench.gradients import PROFILES
from jobs.bench.mpi import ALGORITHMS
from oktopk import METHODS
from oktopk.devices import GRADIENT_TYPES

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
KNOWN = {"cpu": (*METHODS, *LIBRARY_METHODS), "cuda": (*METHODS, *OWN_ROWS, *NCCL_ROWS)}
"""device -> what `--methods` takes."""
TABLES = ("gpu",)
TABLE_METHODS = ("oktopk", *OWN_ROWS, *NCCL_ROWS)
BUDGET = 300.0


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
        description="Measure gradient allreduces on the same gradients, in one run.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--methods",
        nargs="+",
        metavar="NAME",
        help=f"of {', '.join(KNOWN['cpu'])}, default: all but the last two; "
        f"on --device cuda of {', '.join(KNOWN['cuda'])}, default: all but those that begin with oktopk-",
    )
    add("--length", type=int, metavar="N", help=f"elements of the gradient; default {VGG_LENGTH}, VGG-16's")
    add("--density", type=float, help=f"share of them that is applied; default {DENSITY}, or {SWEEP_DENSITY}")
    add("--steps", type=int, help=f"steps to measure; default {STEPS}")
    add("--warmup", type=int, metavar="STEPS", help="steps discarded first; default 2/density")
    add("--dense-steps", type=int, metavar="STEPS", help="steps to measure of dense methods; default: all")
    add("--gradients", choices=tuple(PROFILES), help="default heavy; clustered with --ablate")
    add("--replay", type=Path, metavar="DIR", help="gradients that jobs.train recorded, instead")
    add("--seed", type=int, default=1, help="of the gradients; default %(default)s")
    add("--device", choices=DEVICES, help="default cpu")
    add(
        "--gradient-type", choices=GRADIENT_TYPES["cuda"], help="what gradients are on a GPU; default float32"
    )
    add(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the reduction, such as threshold_interval=32; may be repeated",
    )
    add("--ablate", action="store_true", help="Ok-Topk with one idea taken away at a time")
    add("--ranks", metavar="P,P", help="numbers of ranks for --ablate; default 4,8, or mpiexec's")
    add(
        "--sweep-ranks", metavar="P,P,...", help="volume against the number of ranks; starts mpiexec for each"
    )
    add("--table", choices=TABLES, default="", help="every cell of a table with targets, one after another")
    add("--rows", metavar="I,I", help="of the table, from 1; default: all")
    add("--budget", type=float, metavar="SECONDS", help=f"begin no cell after; default {BUDGET:g}")
    add("--commit", default="", metavar="TEXT", help="what is measured, where this is no git checkout")
    add("--json", type=Path, metavar="FILE", help="where everything is written")
    add("--no-memory", dest="memory", action="store_false", help="do not watch allocations in the warm-up")
    add("--network", default="", metavar="TEXT", help="what joins the ranks, for the record")
    add("--quiet", action="store_true", help="no tables and no progress")
    return parser
