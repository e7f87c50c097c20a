"""Sums of the rows that ranks touched of a table, by `oktopk.rows` and by the ways beside this file, on equal rows in one run.

    python -m jobs.launch -n 2 -m docs.results.rows.measure --skew uniform --steps 5 --warmup 1 --json FILE

Contestants take turns, one step each. A step's time is that of the slowest rank. The first sums that count are
compared with Ok-Topk's, to rounding. Prints the table, which `python -m jobs.report FILE -o DIR` prints again.
"""

import argparse
import re
import time
import zlib
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from docs.results.hook import process_group
from docs.results.rows.volume import SKEWS, RowSource
from docs.results.rows.ways import dense, ways
from jobs.bench.device import Device
from jobs.bench.document import BenchError
from jobs.bench.options import Options
from jobs.bench.run import run_all
from jobs.restart.signals import leave
from oktopk.rows import RowSparseAllreduce
from oktopk.torch.interop import memory_of


class OkTopkRows:
    """`RowSparseAllreduce`. Its stages are told apart by its two sums: of this rank's rows, then of all ranks'."""

    def __init__(self, table, device, comm):
        self.memory = memory_of(device)
        self.reducer = RowSparseAllreduce(comm, *table, average=False, device=device.type)
        for part in (self.reducer.kernels, self.reducer.windows):
            for name in ("coalesce", "merge", "sum_lists"):
                if hasattr(part, name):
                    setattr(part, name, partial(self.timed, getattr(part, name)))

    def __call__(self, rows, values, lap):
        """The sum, with the bytes that were counted."""
        self.stages, self.lap = iter(("", "coalesce", "exchange", "sum")), lap
        report = self.reducer.step(self.memory.array(rows), self.memory.array(values))
        lap("gather")
        sums, self.reducer.sum = self.reducer.sum, None
        return torch.as_tensor(sums.rows), torch.as_tensor(sums.values), report.bytes

    def timed(self, add_up, *arguments):
        """One of its sums, between the stages that it ends and is."""
        if before := next(self.stages):
            self.lap(before)
        result = add_up(*arguments)
        self.lap(next(self.stages))
        return result


def step(way, rows, values, finish=lambda: None):
    """The sum of a way, and seconds by stage; `finish` waits for the device at the end of each."""
    laps, last = {}, [time.perf_counter()]

    def lap(stage):
        finish()
        last.append(time.perf_counter())
        laps[stage] = last[-1] - last[-2]

    return way(rows, values, lap), laps


def agrees(sums, expected, comm):
    """Whether rows and sums are those expected, to rounding, and these have equal bits on all ranks."""
    (rows, values, _), (expected_rows, expected_values, _) = sums, expected
    if rows is None:
        rows = (values != 0).any(dim=1).nonzero()[:, 0]
        values = values[rows]
    near = torch.allclose(values, expected_values, rtol=0.0, atol=1e-5 * float(expected_values.abs().max()))
    digests = set(comm.allgather(zlib.crc32(expected_values.cpu().numpy().data)))
    return len(digests) == 1 and comm.allreduce(
        torch.equal(rows.long(), expected_rows.long()) and near, MPI.LAND
    )


def summary(contestant, comm):
    """Times, stages, bytes and peak memory of one as they stand in the document."""
    slowest = np.max(comm.allgather(contestant["seconds"]), axis=0)
    sent = np.mean(comm.allgather(contestant["bytes"]), axis=1)
    stages = {
        stage: comm.allreduce(float(np.median([laps[stage] for laps in contestant["stages"]]))) / comm.size
        for stage in contestant["stages"][0]
    }
    peaks = [peak for peak in comm.allgather(contestant["peak"]) if peak is not None]
    return {
        "name": contestant["name"],
        "seconds": {"mean": float(np.mean(slowest)), "median": float(np.median(slowest))},
        "stages": stages,
        "bytes": {"mean": float(np.mean(sent)), "busiest": float(np.max(sent))},
        "counted": contestant["name"].startswith("oktopk"),
        "peak": max(peaks, default=None),
        "series": slowest.tolist(),
    }


def measure(options, comm):
    """The run as it stands in the document. Raises BenchError: sums differ; on every rank alike."""
    table, cuda = (options.table_rows, options.width), options.device == "cuda"
    with process_group(options.device, comm) as device:
        place = Device()
        if cuda:
            from jobs.bench.gpu.device import Cuda  # CuPy

            place = Cuda()
        ours = {
            "oktopk-rows": OkTopkRows(table, device, None),
            "oktopk-rows-mpi": OkTopkRows(table, device, comm),
        }
        whole = torch.zeros(() if "dense" in options.without else table, device=device)
        every = {**ours, "dense": partial(dense, whole, comm), **ways(table, comm, cuda)}
        every = {name: way for name, way in every.items() if name not in options.without}
        found = [{"name": name, "seconds": [], "bytes": [], "stages": [], "peak": None} for name in every]
        source = RowSource(options.skew, options.table_rows, options.rows, options.seed)
        drawn = torch.Generator().manual_seed(1000 * options.seed + comm.rank)
        values = torch.randn(options.rows, options.width, generator=drawn).to(device)
        differing, distinct, summed = [], [], []
        for number in range(options.warmup + options.steps):
            rows = torch.from_numpy(source.draw(comm.rank, number)).to(device)
            for one in found:
                dist.barrier()  # waits asleep: MPI's would take a core from ranks that are not here yet
                began = time.perf_counter()
                sums, laps = step(every[one["name"]], rows, values)
                place.finish()
                seconds = time.perf_counter() - began
                if one is found[0]:
                    expected = sums
                    summed.append(len(sums[0]))
                if number == options.warmup and not agrees(sums, expected, comm):
                    differing.append(one["name"])
                if number >= options.warmup:
                    one["seconds"].append(seconds)
                    one["bytes"].append(sums[2])
                    one["stages"].append(laps)
                del sums  # all of them together may not fit into memory
            distinct.append(len(torch.unique(rows)))
        del expected
        for one in found:  # steps that do not count
            if cuda:
                one["stages"] = [step(every[one["name"]], rows, values, place.finish)[1]]
            place.release()
            dist.barrier()
            grown = growth(place, partial(step, every[one["name"]], rows, values))
            windows = one["name"] in ours and ours[one["name"]].reducer.windows
            held = whole.nbytes if one["name"] == "dense" else windows.nbytes if windows else 0
            one["peak"] = None if grown is None else grown + held
        for one in ours.values():
            one.reducer.close()
    if differing:
        raise BenchError(
            f"these sums differ from those of oktopk-rows, or from rank to rank: {', '.join(differing)}"
        )
    touched = {"drawn": options.rows, "distinct": comm.allreduce(float(np.mean(distinct))) / comm.size}
    return {
        "ranks": comm.size,
        "table": {"rows": table[0], "width": table[1], "bytes": 4 * table[0] * table[1]},
        "touched": touched | {"summed": float(np.mean(summed))},
        "skew": options.skew,
        "seed": options.seed,
        "device": options.device,
        "backend": "nccl" if cuda else "gloo",
        "threads": torch.get_num_threads(),
        "left_out": dict.fromkeys(options.without, "--without"),
        "network": "",
        "course": {"warmup": options.warmup, "steps": options.steps},
        "methods": [summary(one, comm) for one in found],
    }


def growth(place, run):
    """Bytes by which a step grows the process at its peak, or takes of a GPU that no other rank has; None where not known."""

    def resident():
        found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return 1024 * int(found[1]) if found else None

    host, before = place.name == "cpu", place.free_bytes()
    if host:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the largest resident set counts from here
        before = resident()
    run()
    place.finish()
    if not host:
        return max(0, before - place.free_bytes()) if place.sharers == 1 else None
    return None if before is None else max(0, resident() - before)


def main(comm=MPI.COMM_WORLD):
    """Measure as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jobs.launch -n RANKS -m docs.results.rows.measure")
    for name, default, what in (
        ("rows", 50_000, "rows that a rank draws in a step"),
        ("table-rows", 1_000_000, "rows of the table"),
        ("width", 512, "elements of a row"),
        ("steps", 10, "steps to measure"),
        ("warmup", 2, "steps before those"),
        ("seed", 1, "of rows and values"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what}; default: %(default)s")
    parser.add_argument("--skew", choices=SKEWS, default=SKEWS[0], help="alike, or row i by 1/(i + 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    known = ["dense", *ways((0, 0), comm, cuda=False)]
    parser.add_argument("--without", nargs="+", default=[], choices=known, help="contestants to leave out")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--commit", default="", help="commit that is measured, where git names none")
    told = parser.parse_args()
    options = Options(
        device=told.device, json=told.json, commit=told.commit, module="docs.results.rows.measure"
    )
    return run_all(lambda: ("rows table", [partial(measure, told, comm)]), options, comm)


if __name__ == "__main__":
    leave(main())
