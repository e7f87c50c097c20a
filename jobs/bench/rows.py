"""Sums of the rows that the ranks touched of a table, one way or another, on equal gradients in one run."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from tqdm import tqdm

from jobs.bench.device import Device
from jobs.bench.document import BenchError
from jobs.bench.options import Options
from jobs.bench.row_contestants import Contestant, contestants
from jobs.bench.row_volume import RowSource
from jobs.train.reduce.background import WireError, start_process_group, stop_process_group

TOLERANCE = 1e-5
"""Part of the largest element by which sums in another order may differ."""


def measure_rows(options: Options, comm: MPI.Intracomm) -> dict[str, Any]:
    """The run as it stands in the document, on rank 0. Collective.

    Contestants take turns. A step's time is that of the slowest rank.

    Raises:
        BenchError: it cannot be done, or contestants disagree on a sum; on every rank alike.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    cuda, sharers = options.device == "cuda", node.size
    device = torch.device("cuda", node.rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    unit = f"{node.allgather(comm.rank)[0]}:{device.index}"
    node.Free()
    if cuda:
        torch.cuda.set_device(device)
        sharers = 1
    free = torch.cuda.mem_get_info()[0] if cuda else Device().free_bytes()
    try:
        start_process_group(comm, device, "nccl" if cuda else "gloo", unit)
        found, left_out = contestants(options, comm, device, comm.bcast(free), sharers)
        touched = _run(found, options, comm, device)
        for one in found:
            one.close()
        stop_process_group()
    except (ValueError, WireError) as error:  # raised on every rank alike
        raise BenchError(str(error)) from error
    return {
        "ranks": comm.size,
        "table": {
            "rows": options.table_rows,
            "width": options.width,
            "bytes": 4 * options.table_rows * options.width,
        },
        "touched": touched,
        "skew": options.skew,
        "seed": options.seed,
        "device": options.device,
        "backend": "nccl" if cuda else "gloo",
        "threads": torch.get_num_threads(),
        "left_out": left_out,
        "network": options.network,
        "course": {"warmup": options.warmup, "steps": options.steps},
        "methods": [_summary(one, comm) for one in found],
    }


def _run(
    found: list[Contestant], options: Options, comm: MPI.Intracomm, device: torch.device
) -> dict[str, float]:
    """Rows drawn a rank, how many of them are distinct on average, and rows of the sum, on average."""
    source = RowSource(options.skew, options.table_rows, options.touched, options.seed)
    drawn = torch.Generator().manual_seed(1000 * options.seed + comm.rank)
    values = torch.randn(options.touched, options.width, generator=drawn).to(device)
    total, own, summed = options.warmup + options.steps, [], []
    bar = tqdm(total=total, unit="step", disable=comm.rank != 0 or options.quiet, ncols=100)
    for number in range(total):
        rows = torch.from_numpy(source.draw(comm.rank, number)).to(device)
        for one in found:
            dist.barrier()  # waits asleep: MPI's would take a core from ranks that are not here yet
            began = time.perf_counter()
            one.step(rows, values)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            if number >= options.warmup:
                one.seconds.append(seconds)
                one.bytes.append(one.sent)
                one.stages.append(one.laps)
        if number >= options.warmup:
            own.append(len(torch.unique(rows)))
            summed.append(len(found[-1].found()[0]))
        if number == options.warmup:
            _compare(found, comm)
        bar.update()
    bar.close()
    distinct = comm.allreduce(float(np.mean(own))) / comm.size
    return {"drawn": options.touched, "distinct": distinct, "summed": float(np.mean(summed))}


def _compare(found: list[Contestant], comm: MPI.Intracomm) -> None:
    """Refuse contestants whose last sum is not rank 0's of the last contestant, to rounding. Collective."""
    rows, values = comm.bcast(tuple(part.cpu() for part in found[-1].found()))
    atol = TOLERANCE * float(values.abs().max())
    wrong = []
    for one in found:
        its_rows, its_values = (part.cpu() for part in one.found())
        if not (torch.equal(its_rows, rows) and torch.allclose(its_values, values, rtol=0.0, atol=atol)):
            wrong.append(one.name)
    differing = dict.fromkeys(name for names in comm.allgather(wrong) for name in names)
    if differing:
        raise BenchError(
            f"these sums differ from those of {found[-1].name} on rank 0: {', '.join(differing)}"
        )


def _summary(one: Contestant, comm: MPI.Intracomm) -> dict[str, Any]:
    """Collective."""
    slowest = np.max(comm.allgather(one.seconds), axis=0)
    sent = np.mean(comm.allgather(one.bytes), axis=1)
    stages = {
        stage: comm.allreduce(float(np.median([laps[stage] for laps in one.stages]))) / comm.size
        for stage in one.stages[0]
    }
    return {
        "name": one.name,
        "seconds": {"mean": float(np.mean(slowest)), "median": float(np.median(slowest))},
        "stages": stages,
        "bytes": {"mean": float(np.mean(sent)), "busiest": float(np.max(sent))},
        "counted": one.counted,
        "series": slowest.tolist(),
    }
