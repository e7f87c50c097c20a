"""Who takes part in a run, from a method's name to the reducer that is measured; and the runs of the table of GPUs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from mpi4py import MPI

from jobs.bench.device import Device
from jobs.bench.document import HOST_ROWS, NCCL_ROWS, BenchError
from jobs.bench.libraries import ALGORITHMS, MpiAllreduce, NcclAllreduce, require_nccl
from jobs.bench.measure import Contestant, Reducer
from jobs.bench.options import OVER_MPI, Options
from oktopk import METHODS, GradientAllreduce


def contestants(options: Options, ranks: int) -> list[Contestant]:
    """All that the options name; on the options' device or not."""
    return variants(ranks) if options.ablate else [_contestant(name) for name in options.methods]


def variants(ranks: int) -> list[Contestant]:
    """Ok-Topk as it is, and with one idea taken away at a time."""
    settings: dict[str, dict[str, object]] = {
        "full": {},
        "uniform regions": {"balanced_regions": False},
        "no rotation": {"rotate": False},
        "bucket of 1": {"bucket_rounds": 1},
        f"bucket of {max(1, ranks - 1)}, all": {"bucket_rounds": max(1, ranks - 1)},
        "balance at 1.0": {"balance_trigger": 1.0},
        "balance off": {"balance_trigger": math.inf},
        "uniform, balance at 1.0": {"balanced_regions": False, "balance_trigger": 1.0},
        "uniform, balance off": {"balanced_regions": False, "balance_trigger": math.inf},
        "neither, no rotation": {"balanced_regions": False, "balance_trigger": math.inf, "rotate": False},
    }
    return [Contestant(name=name, method="oktopk", settings=changes) for name, changes in settings.items()]


def _contestant(name: str) -> Contestant:
    method = "oktopk" if name == OVER_MPI or name in HOST_ROWS else name
    return Contestant(
        name=name,
        method=method,
        settings=dict(HOST_ROWS.get(name, {})),
        arguments={"peer_memory": False} if name == OVER_MPI else {},
        sparse=method in METHODS and METHODS[method].sparse,
        counted=name not in ALGORITHMS and name not in NCCL_ROWS,
    )


def takes_part(
    everyone: list[Contestant], device: Device, comm: MPI.Intracomm
) -> tuple[list[Contestant], dict[str, str]]:
    """Those who can take part here, and why the others cannot: name -> reason. Collective.

    Raises:
        BenchError: a row needs something that is not installed, or nobody is left; on every rank alike.
    """
    left_out: dict[str, str] = {}
    sharers = comm.allreduce(device.sharers, MPI.MAX)
    wanted = [one for one in everyone if one.name in NCCL_ROWS]
    if wanted and sharers == 1:
        require_nccl(comm)
    for one in wanted:
        if sharers > 1:
            left_out[one.name] = f"NCCL takes one rank per GPU, and here {sharers} share one"
    present = [one for one in everyone if one.name not in left_out]
    if not present:
        raise BenchError("; ".join(f"{name} is left out: {reason}" for name, reason in left_out.items()))
    return present, left_out


def make_reducer(
    contestant: Contestant, options: Options, length: int, device: Device, comm: MPI.Intracomm
) -> Reducer:
    """What is measured under a name. Collective.

    Raises:
        BenchError, ValueError: it cannot be made; on every rank alike.
    """
    if contestant.method in ALGORITHMS:
        return MpiAllreduce(comm, length, contestant.method)
    if contestant.method in NCCL_ROWS:
        return NcclAllreduce(comm, length, contestant.method)
    settings: dict[str, Any] = {**options.settings, **contestant.settings, "density": options.density}
    if not METHODS[contestant.method].coded:
        settings.pop("wire", None)
    arguments = dict(contestant.arguments)
    if settings.get("levels") == "hosts" and comm.allreduce(device.sharers, MPI.MAX) > 1:
        arguments.setdefault("peer_memory", True)  # else ranks that share a GPU are refused
    return GradientAllreduce(
        comm,
        length,
        contestant.method,
        device=device.name,
        gradient_type=options.gradient_type,
        **arguments,
        **settings,
    )


class Cell(NamedTuple):
    """One row of the table.

    Attributes:
        length: n.
        threshold_interval: as in training with a model of this length.
        steps: measured; a multiple of the interval, so that exact steps have their share in the mean.
    """

    length: int
    density: float
    threshold_interval: int
    steps: int


CELLS = (
    Cell(14_728_266, 0.02, 32, 256),
    Cell(14_728_266, 0.01, 32, 256),
    Cell(27_569_568, 0.02, 32, 256),
    Cell(133_547_324, 0.01, 128, 256),
    Cell(133_547_324, 0.001, 128, 256),
)
"""VGG-16, VGG-16, LSTM, BERT-base, BERT-base: lengths and intervals as in the paper's experiments."""

TYPES = ("float32", "bfloat16")


def chosen(options: Options, cells: tuple[Cell, ...] = CELLS) -> list[Options]:
    """The options of each cell that was asked for, in the order in which they run.

    Raises:
        BenchError: a row's number is out of range.
    """
    for number in options.rows:
        if number > len(cells):
            raise BenchError(f"--rows {number} is not in [1, {len(cells)}]")
    kinds = (options.gradient_type,) if options.gradient_type else TYPES
    return [
        replace(
            options,
            lengths=(cell.length,),
            density=cell.density,
            steps=cell.steps,
            dense_steps=cell.steps,
            warmup=round(2 / cell.density),  # error feedback settles
            settings={"threshold_interval": cell.threshold_interval, "boundary_interval": 64},
            gradient_type=kind,
        )
        for cell in ([cells[number - 1] for number in options.rows] or cells)
        for kind in kinds
    ]
