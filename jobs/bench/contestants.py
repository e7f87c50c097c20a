"""Who takes part in a run, from a method's name to the reducer that is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from jobs.bench.device import Device
from jobs.bench.document import HOST_ROWS, NCCL_ROWS, BenchError
from jobs.bench.libraries import ALGORITHMS, MpiAllreduce, NcclAllreduce, torch_problem
from jobs.bench.measure import Contestant, Reducer
from jobs.bench.options import OVER_MPI, Options
from jobs.cluster.agreement import require
from oktopk import METHODS, GradientAllreduce


def contestant(name: str) -> Contestant:
    """Who takes part under a name of KNOWN."""
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
    everyone: Sequence[Contestant], device: Device, comm: MPI.Intracomm
) -> tuple[list[Contestant], dict[str, str]]:
    """Those who can take part here, and why the others cannot: name -> reason. Collective.

    Raises:
        BenchError: a row needs something that is not installed, or nobody is left; on every rank alike.
    """
    left_out: dict[str, str] = {}
    sharers = comm.allreduce(device.sharers, MPI.MAX)
    wanted = [one for one in everyone if one.name in NCCL_ROWS]
    if wanted and sharers == 1:
        require(comm, torch_problem, BenchError)
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
