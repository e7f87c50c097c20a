"""The table of gpu.md: a step of Ok-Topk beside NCCL's dense allreduce, five lengths and densities in two types of gradients.

    python -m jobs.launch -n 4 -m docs.results.gpu_table --json FILE
    python -m jobs.launch -n 2 -m docs.results.gpu_table --rows 4 --gradient-type float32 --quiet --json FILE

--rows 1,4 and --gradient-type choose cells. Besides it takes --seed, --network, --json, --commit and --quiet, as jobs.bench. The
file is written after each cell.
"""

import sys
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from mpi4py import MPI

from jobs.bench.document import NCCL_ROWS, BenchError
from jobs.bench.options import OVER_MPI, Parser, numbers, parse
from jobs.bench.run import measure_run, run_all
from jobs.cluster.agreement import say
from jobs.restart.signals import leave

TYPES = ("float32", "bfloat16")


class Cell(NamedTuple):
    """A row: n, and an interval and steps such that exact ones have their share in the mean."""

    length: int
    density: float
    threshold_interval: int
    steps: int = 256


CELLS = (
    Cell(14_728_266, 0.02, 32),
    Cell(14_728_266, 0.01, 32),
    Cell(27_569_568, 0.02, 32),
    Cell(133_547_324, 0.01, 128),
    Cell(133_547_324, 0.001, 128),
)
"""VGG-16, VGG-16, LSTM, BERT-base, BERT-base: lengths and intervals as in the paper's experiments."""


def cells(words, own=CELLS):
    """The bench's options of each cell that was asked for, in the order in which they run. Raises BenchError."""
    parser = Parser(prog="docs.results.gpu_table", allow_abbrev=False, add_help=False)
    parser.add_argument("--rows", type=numbers, default=range(1, len(own) + 1))
    parser.add_argument("--gradient-type", choices=TYPES)
    for option in ("--seed", "--network", "--json", "--commit"):
        parser.add_argument(option)
    parser.add_argument("--quiet", action="store_true")
    given = vars(parser.parse_args(words))
    rows, kind = given.pop("rows"), given.pop("gradient_type")
    if max(rows) > len(own):
        raise BenchError(f"--rows {max(rows)} is not in [1, {len(own)}]")
    common = [
        "--device",
        "cuda",
        "--methods",
        "oktopk",
        OVER_MPI,
        *NCCL_ROWS,
        "--set",
        "boundary_interval=64",
    ]
    common += ["--quiet"] * given.pop("quiet")
    for name, value in given.items():
        common += [f"--{name}={value}"] * (value is not None)
    found = []
    for cell in (own[number - 1] for number in rows):
        measured = [f"--length={cell.length}", f"--density={cell.density}", f"--steps={cell.steps}"]
        measured += ["--set", f"threshold_interval={cell.threshold_interval}"]
        found += [
            parse([*common, *measured, f"--gradient-type={each}"]) for each in TYPES if kind in (None, each)
        ]
    return [replace(options, module=parser.prog) for options in found]


def main(words, comm=MPI.COMM_WORLD):
    """Measure as the command line says; returns the exit status."""
    if {"-h", "--help"} & {*words}:
        say(comm, __doc__)
        return 0
    try:
        options = cells(words)
    except BenchError as error:
        say(comm, f"docs.results.gpu_table: {error}")
        return 2
    measures = [partial(measure_run, own, comm) for own in options]
    return run_all(lambda: ("gpu table", measures), options[0], comm)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
