"""Sums of the rows that the ranks touched of a table, one way or another, on equal gradients in one run."""

from __future__ import annotations

import time
import zlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from tqdm import tqdm

from jobs.bench.device import Device
from jobs.bench.document import BenchError
from jobs.bench.gradients import RowSource
from jobs.bench.options import Options
from jobs.bench.row_contestants import Contestant, Sum, contestants
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
    place = Device(sharers)
    device = torch.device("cuda", node.rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    unit = f"{node.allgather(comm.rank)[0]}:{device.index}"
    node.Free()
    if cuda:
        from jobs.bench.gpu.device import Cuda

        torch.cuda.set_device(device)
        sharers, place = 1, Cuda()
    free = place.free_bytes()
    try:
        start_process_group(comm, device, "nccl" if cuda else "gloo", unit)
        entrants, left_out = contestants(options, comm, device, comm.bcast(free), sharers)
        touched, differing = _run(entrants, options, comm, device)
        _look_closer(entrants, options, comm, device, place)
        for one in entrants:
            one.close()
        stop_process_group()
    except (ValueError, WireError) as error:  # raised on every rank alike
        raise BenchError(str(error)) from error
    if differing:
        raise BenchError(
            f"these sums differ from those of {entrants[0].name}, or from rank to rank: {', '.join(differing)}"
        )
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
        "methods": [_summary(one, comm) for one in entrants],
    }


class _Draws:
    """What a rank touches, step by step: the same rows and values for every contestant."""

    def __init__(self, options: Options, rank: int, device: torch.device) -> None:
        self._source = RowSource(options.skew, options.table_rows, options.touched, options.seed)
        drawn = torch.Generator().manual_seed(1000 * options.seed + rank)
        self.values = torch.randn(options.touched, options.width, generator=drawn).to(device)
        self._rank = rank

    def rows(self, number: int) -> Tensor:
        return torch.from_numpy(self._source.draw(self._rank, number)).to(self.values.device)


def _run(
    entrants: list[Contestant], options: Options, comm: MPI.Intracomm, device: torch.device
) -> tuple[dict[str, float], list[str]]:
    """Means of the rows that a rank drew, of those that were distinct and of those in the sum; and whose first sums differ."""
    draws = _Draws(options, comm.rank, device)
    total, distinct, summed = options.warmup + options.steps, [], []
    differing: list[str] = []
    bar = tqdm(total=total, unit="step", disable=comm.rank != 0 or options.quiet, ncols=100)
    for number in range(total):
        rows = draws.rows(number)
        for one in entrants:
            if one.once and number != options.warmup:
                continue
            dist.barrier()  # waits asleep: MPI's would take a core from ranks that are not here yet
            began = time.perf_counter()
            sums, laps = one.step(rows, draws.values)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            if number >= options.warmup:
                one.seconds.append(seconds)
                one.bytes.append(sums[2])
                if device.type == "cpu":
                    one.stages.append(laps)
            if one is entrants[0]:
                expected = sparse(sums)
                summed.append(len(expected[0]))
            if number == options.warmup and not _agrees(sparse(sums), expected, comm):
                differing.append(one.name)
            del sums  # all of them together may not fit into memory
        distinct.append(len(torch.unique(rows)))
        bar.update()
    bar.close()
    mean = comm.allreduce(float(np.mean(distinct))) / comm.size
    return {"drawn": options.touched, "distinct": mean, "summed": float(np.mean(summed))}, differing


def _look_closer(
    entrants: list[Contestant], options: Options, comm: MPI.Intracomm, device: torch.device, place: Device
) -> None:
    """Peak memory of each contestant, and on a GPU its stages, in steps that do not count. Collective."""
    draws = _Draws(options, comm.rank, device)
    rows = draws.rows(options.warmup + options.steps)
    for one in entrants:
        if device.type == "cuda":
            one.stages.append(one.step(rows, draws.values, torch.cuda.synchronize)[1])
        if one.once:
            continue
        place.release()
        dist.barrier()
        with place.watch(traced=False) as growth:
            one.step(rows, draws.values)
            place.finish()
        if growth.resident is not None:
            one.peak = growth.resident + one.held()


def sparse(sums: Sum) -> tuple[Tensor, Tensor]:
    """Rows and their sums, also of a whole table."""
    rows, values, _ = sums
    if rows is None:
        rows = (values != 0).any(dim=1).nonzero()[:, 0]
        values = values[rows]
    return rows.long(), values


def _agrees(sums: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], comm: MPI.Intracomm) -> bool:
    """Whether a sum is what is expected, to rounding, on all ranks, and that equal bit for bit on all of them. Collective."""
    (rows, values), (expected_rows, expected_values) = sums, expected
    atol = TOLERANCE * float(expected_values.abs().max())
    digest = zlib.crc32(expected_values.cpu().numpy().data)
    return len(set(comm.allgather(digest))) == 1 and comm.allreduce(
        torch.equal(rows, expected_rows) and torch.allclose(values, expected_values, rtol=0.0, atol=atol),
        MPI.LAND,
    )


def _summary(one: Contestant, comm: MPI.Intracomm) -> dict[str, Any]:
    """Collective."""
    slowest = np.max(comm.allgather(one.seconds), axis=0)
    sent = np.mean(comm.allgather(one.bytes), axis=1)
    peaks = [peak for peak in comm.allgather(one.peak) if peak is not None]
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
        "peak": max(peaks, default=None),
        "series": slowest.tolist(),
    }
