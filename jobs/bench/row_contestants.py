"""Ways to sum the rows that the ranks touched of a table: ours, and those that one finds elsewhere, in torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from jobs.bench.options import Options
from jobs.train.reduce.background import ring_traffic
from oktopk.rows import RowSparseAllreduce
from oktopk.torch.interop import memory_of

V1_MOST = 4096
"""Rows above which a loop over them is left out on a CPU, and measured in one step on a GPU."""
V4_PAIRS = 1 << 31
"""Pairs of rows above which comparing them all is left out on a CPU."""
_CHUNK = {"cpu": 1 << 24, "cuda": 1 << 28}
"""Pairs that are compared at a time, by device."""

Lap = Callable[[str], None]
"""Called with a stage's name when it has ended."""
Table = tuple[int, int]
"""Its rows, and elements of a row."""
Sum = tuple[Tensor | None, Tensor, int]
"""Row ids, ascending, or None for a whole table; their sums; bytes that this rank sent."""


@dataclass
class Contestant:
    """One way to the sum.

    Attributes:
        name: as the table has it.
        run: sums int64[R] rows, each perhaps several times, with [R, width] values. Collective.
        counted: bytes were counted; else they are what a ring sends.
        close: frees what is held. Collective.
        once: is measured in a single step, without a warm-up of its own, as it takes seconds.
        held: bytes of memory that it keeps between steps: a whole table, windows.
        seconds, bytes: of the steps that count.
        stages: seconds by stage, of the same steps on a CPU; on a GPU of one more, which waits for the GPU after each stage.
        peak: bytes by which the memory of this rank or its GPU grew in one more step, and `held`; None if unknown.
    """

    name: str
    run: Callable[[Tensor, Tensor, Lap], Sum]
    counted: bool = False
    close: Callable[[], None] = lambda: None
    once: bool = False
    held: Callable[[], int] = lambda: 0
    peak: int | None = None
    seconds: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)

    def step(
        self, rows: Tensor, values: Tensor, finish: Callable[[], None] = lambda: None
    ) -> tuple[Sum, dict[str, float]]:
        """The sum, and seconds by stage. Collective.

        finish: waits for the device at the end of each stage.
        """
        laps, last = {}, time.perf_counter()

        def lap(stage: str) -> None:
            nonlocal last
            finish()
            now = time.perf_counter()
            laps[stage], last = now - last, now

        return self.run(rows, values, lap), laps


class OkTopkRows:
    """`oktopk.rows.RowSparseAllreduce`. Its stages are told apart by its two sums: of this rank's rows, then of all ranks'."""

    def __init__(self, table: Table, comm: Any, device: torch.device) -> None:
        self._memory = memory_of(device)
        self.reducer = RowSparseAllreduce(comm, *table, average=False, device=device.type)
        for part in (self.reducer.kernels, self.reducer.windows):
            for name in ("coalesce", "merge", "sum_lists"):
                if hasattr(part, name):
                    setattr(part, name, partial(self._timed, getattr(part, name)))

    def run(self, rows: Tensor, values: Tensor, lap: Lap) -> Sum:
        self._stages, self._lap = iter(("", "coalesce", "exchange", "sum")), lap
        report = self.reducer.step(self._memory.array(rows), self._memory.array(values))
        lap("gather")
        sums, self.reducer.sum = self.reducer.sum, None
        assert sums is not None
        return torch.as_tensor(sums.rows), torch.as_tensor(sums.values), report.bytes

    def held(self) -> int:
        return self.reducer.windows.nbytes if self.reducer.windows is not None else 0

    def _timed(self, add_up: Callable[..., Any], *given: Any) -> Any:
        if before := next(self._stages):
            self._lap(before)
        result = add_up(*given)
        self._lap(next(self._stages))
        return result


def coalesced(table: Table, rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Equal rows added up, by torch."""
    summed = torch.sparse_coo_tensor(rows[None], values, table, check_invariants=False).coalesce()
    return summed.indices()[0], summed.values()


def dense(whole: Tensor, comm: MPI.Intracomm, rows: Tensor, values: Tensor, lap: Lap) -> Sum:
    """Scatter into a whole table, and sum it: over MPI on a CPU, by NCCL on a GPU."""
    whole.zero_().index_add_(0, rows, values)
    lap("scatter")
    if whole.is_cuda:
        dist.all_reduce(whole)
    else:
        comm.Allreduce(MPI.IN_PLACE, whole.numpy())
    lap("allreduce")
    return None, whole, ring_traffic(whole.numel(), comm.size, 1).bytes


def gathered_by_mpi(comm: MPI.Intracomm, local: Tensor) -> Tensor:
    """The ranks' tensors one after the other, by MPI's Allgatherv. Collective."""
    lengths = comm.allgather(len(local))
    everyones = local.new_empty(sum(lengths), *local.shape[1:])
    comm.Allgatherv(local.numpy(), [everyones.numpy(), [length * local[:1].numel() for length in lengths]])
    return everyones


def gathered_by_torch(local: Tensor) -> Tensor:
    """The same by torch's all_gather, whose tensors are of one length: padded. Collective."""
    lengths = [torch.zeros(1, dtype=torch.int64, device=local.device) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.full_like(lengths[0], len(local)))
    counts = [int(length) for length in lengths]
    padded = local.new_zeros(max(counts), *local.shape[1:])
    padded[: len(local)] = local
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def two_allgathers(
    table: Table,
    gather: Callable[[Tensor], Tensor],
    first: bool,
    rows: Tensor,
    values: Tensor,
    lap: Lap,
) -> Sum:
    """Gather everyone's rows, then their values, and add up all of them on every rank.

    first: coalesce them before they are sent, which Horovod does not.
    """
    if first:
        rows, values = coalesced(table, rows, values)
        lap("coalesce")
    everyones = gather(rows), gather(values)
    lap("gather")
    sums = coalesced(table, *everyones)
    lap("sum")
    return *sums, (dist.get_world_size() - 1) * (rows.nbytes + values.nbytes)


def match_in_a_loop(union: Tensor, rows: Tensor) -> Tensor:
    """Where each of int64[m] rows stands in int64[u], the union: v1, a search of the union per row."""
    return torch.cat([(union == row).nonzero()[0] for row in rows])


def match_all_pairs(union: Tensor, rows: Tensor) -> Tensor:
    """The same: v4, all pairs compared, in chunks."""
    most = max(1, _CHUNK[rows.device.type] // len(union))
    return torch.cat([(union == chunk[:, None]).nonzero()[:, 1] for chunk in rows.split(most)])


def match_sorted(union: Tensor, rows: Tensor) -> Tensor:
    """The same: v6, a binary search in the sorted union."""
    return torch.searchsorted(union, rows)


def sum_over_union(
    table: Table, match: Callable[[Tensor, Tensor], Tensor], rows: Tensor, values: Tensor, lap: Lap
) -> Sum:
    """Gather everyone's rows, and sum the values of all of their union, zeros where a rank has none."""
    rows, values = coalesced(table, rows, values)
    lap("coalesce")
    union = torch.unique(gathered_by_torch(rows))
    lap("union")
    places = match(union, rows)
    lap("match")
    filled = values.new_zeros(len(union), values.shape[1]).index_copy_(0, places, values)
    lap("scatter")
    dist.all_reduce(filled)
    lap("allreduce")
    ranks = dist.get_world_size()
    return union, filled, (ranks - 1) * rows.nbytes + ring_traffic(filled.numel(), ranks, 1).bytes


def gloo_sparse(table: Table, rows: Tensor, values: Tensor, lap: Lap) -> Sum:
    """`torch.distributed.all_reduce` of a sparse tensor, which gloo alone takes."""
    rows, values = coalesced(table, rows, values)
    lap("coalesce")
    tensor = torch.sparse_coo_tensor(rows[None], values, table, is_coalesced=True, check_invariants=False)
    dist.all_reduce(tensor)
    summed = tensor.coalesce()
    lap("allreduce")
    return summed.indices()[0], summed.values(), (dist.get_world_size() - 1) * (rows.nbytes + values.nbytes)


def contestants(
    options: Options, comm: MPI.Intracomm, device: torch.device, free: int | None, sharers: int
) -> tuple[list[Contestant], dict[str, str]]:
    """All that take part, and why others do not. Collective, in a process group.

    Args:
        free: bytes of memory, equal on all ranks; None if unknown.
        sharers: ranks that share it.
    """
    table, cuda = (options.table_rows, options.width), device.type == "cuda"
    left_out: dict[str, str] = {}
    entrants: list[Contestant] = []
    for name, group in {"oktopk-rows": None, "oktopk-rows-mpi": comm}.items():
        try:
            ours = OkTopkRows(table, group, device)
        except ValueError as error:  # on every rank alike
            left_out[name] = str(error)
        else:
            entrants.append(Contestant(name, ours.run, True, ours.reducer.close, held=ours.held))
    size = 4 * table[0] * table[1]
    if free is not None and 2 * size * sharers > free:  # itself, and what the library takes
        have = f"{size / 2**30:.1f} GiB on each of {sharers} ranks, and {free / 2**30:.1f} GiB are free"
        left_out["dense"] = f"the table has {have}"
    else:
        whole = torch.zeros(table, device=device)
        entrants.append(Contestant("dense", partial(dense, whole, comm), held=lambda: whole.nbytes))
    matches = {"union-v1": match_in_a_loop, "union-v4": match_all_pairs, "union-v6": match_sorted}
    pairs = options.touched * min(options.touched * comm.size, table[0])
    loops = options.touched > V1_MOST
    if loops and not cuda:
        left_out["union-v1"] = f"a loop over {options.touched:,} rows, more than {V1_MOST:,}"
    if not cuda and pairs > V4_PAIRS:
        left_out["union-v4"] = f"compares up to {pairs:,} pairs a step, more than {V4_PAIRS:,}"
    ways: dict[str, Any] = {name: partial(sum_over_union, table, match) for name, match in matches.items()}
    ways["two-allgathers"] = partial(two_allgathers, table, gathered_by_torch, False)
    ways["two-allgathers-coalesced"] = partial(two_allgathers, table, gathered_by_torch, True)
    if cuda:
        left_out |= dict.fromkeys(("two-allgathers-mpi", "gloo-sparse"), "is for --device cpu")
    else:
        ways["two-allgathers-mpi"] = partial(two_allgathers, table, partial(gathered_by_mpi, comm), False)
        ways["gloo-sparse"] = partial(gloo_sparse, table)
    entrants += [
        Contestant(name, way, once=loops and name == "union-v1")
        for name, way in ways.items()
        if name not in left_out
    ]
    return entrants, left_out
