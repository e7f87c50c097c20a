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

V1_MOST = 4096
"""Rows above which a loop over them is left out."""
V4_PAIRS = 1 << 31
"""Pairs of rows above which comparing them all is left out on a CPU."""
_CHUNK = 1 << 24
"""Pairs that are compared at a time."""


@dataclass
class Contestant:
    """One way to the sum.

    Attributes:
        name: as the table has it.
        counted: bytes were counted; else they are what a ring sends.
        table: length and width.
        sum: numbers of rows, ascending, and their sums, of the last step.
        sent: bytes that this rank sent in the last step.
        laps: seconds of the last step's stages; none on a GPU.
        seconds, bytes, stages: of the steps that count.
    """

    name: str
    table: tuple[int, int]
    counted: bool = False
    sum: tuple[Tensor, Tensor] = field(default_factory=lambda: (torch.empty(0), torch.empty(0)))
    sent: int = 0
    laps: dict[str, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)

    def step(self, rows: Tensor, values: Tensor) -> None:
        """Sum int64[R] rows, each perhaps several times, with [R, width] values. Collective."""
        raise NotImplementedError

    def begin(self) -> None:
        """The first stage begins."""
        self.laps, self._last = {}, time.perf_counter()

    def lap(self, stage: str) -> None:
        """A stage has ended."""
        now = time.perf_counter()
        self.laps[stage], self._last = now - self._last, now

    def coalesced(self, rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Equal rows added up, by torch."""
        found = torch.sparse_coo_tensor(rows[None], values, self.table, check_invariants=False).coalesce()
        return found.indices()[0], found.values()

    def found(self) -> tuple[Tensor, Tensor]:
        """The sum, for a comparison; outside the timed region."""
        return self.sum

    def forget(self) -> None:
        """Free the sum: all of them together may not fit into memory."""
        self.sum = torch.empty(0), torch.empty(0)

    def close(self) -> None:
        """Free what is held. Collective."""


class OkTopkRows(Contestant):
    """`oktopk.rows.RowSparseAllreduce`; stages are told apart by its two calls of `coalesce`."""

    def __init__(self, name: str, table: tuple[int, int], comm: Any, device: torch.device) -> None:
        super().__init__(name, table, counted=True)
        self._reducer = RowSparseAllreduce(comm, *table, average=False, device=device.type)
        if device.type == "cpu":
            kernels: Any = _LappedKernels(self._reducer.kernels, self)
            self._reducer.kernels = kernels

    def step(self, rows: Tensor, values: Tensor) -> None:
        self.begin()
        if rows.device.type == "cpu":
            report = self._reducer.step(rows.numpy(), values.numpy())
            self.lap("gather")
        else:
            import cupy

            report = self._reducer.step(cupy.from_dlpack(rows), cupy.from_dlpack(values))
        self.sent = report.bytes

    def found(self) -> tuple[Tensor, Tensor]:
        assert self._reducer.sum is not None
        return torch.as_tensor(self._reducer.sum.rows).long(), torch.as_tensor(self._reducer.sum.values)

    def forget(self) -> None:
        self._reducer.sum = None

    def close(self) -> None:
        self._reducer.close()


class _LappedKernels:
    """Kernels whose `coalesce` ends stages of a contestant: called for its own rows first, then for the owner's sums."""

    def __init__(self, kernels: Any, contestant: OkTopkRows) -> None:
        self._kernels, self._contestant = kernels, contestant

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def coalesce(self, rows: Any, values: Any, scale: float) -> Any:
        first = "coalesce" not in self._contestant.laps
        if not first:
            self._contestant.lap("exchange")
        result = self._kernels.coalesce(rows, values, scale)
        self._contestant.lap("coalesce" if first else "sum")
        return result


class Dense(Contestant):
    """Scatter into a whole table, and sum it: over MPI on a CPU, by NCCL on a GPU."""

    def __init__(self, table: tuple[int, int], comm: MPI.Intracomm, device: torch.device) -> None:
        super().__init__("dense", table)
        self._table, self._comm = torch.zeros(table, device=device), comm
        self.sent = ring_traffic(self._table.numel(), comm.size, 1).bytes

    def step(self, rows: Tensor, values: Tensor) -> None:
        self.begin()
        self._table.zero_().index_add_(0, rows, values)
        self.lap("scatter")
        if self._table.is_cuda:
            dist.all_reduce(self._table)
        else:
            self._comm.Allreduce(MPI.IN_PLACE, self._table.numpy())
        self.lap("allreduce")

    def found(self) -> tuple[Tensor, Tensor]:
        rows = (self._table != 0).any(dim=1).nonzero()[:, 0]
        return rows, self._table[rows]


def gathered_by_mpi(comm: MPI.Intracomm, own: Tensor) -> Tensor:
    """The ranks' tensors one after the other, by MPI's Allgatherv. Collective."""
    lengths = comm.allgather(len(own))
    everyones = own.new_empty(sum(lengths), *own.shape[1:])
    counts = [length * own[:1].numel() for length in lengths]
    comm.Allgatherv(own.numpy(), [everyones.numpy(), counts])
    return everyones


def gathered_by_torch(own: Tensor) -> Tensor:
    """The same by torch's all_gather, whose tensors are of one length: padded. Collective."""
    lengths = [torch.zeros(1, dtype=torch.int64, device=own.device) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.full_like(lengths[0], len(own)))
    counts = [int(length) for length in lengths]
    padded = own.new_zeros(max(counts), *own.shape[1:])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


class TwoAllgathers(Contestant):
    """Gather everyone's rows, then their values, and add up all of them on every rank: as Horovod does, row by row as they come.

    Args:
        first: coalesce them before they are sent, which Horovod leaves to its caller.
    """

    def __init__(
        self, name: str, table: tuple[int, int], gather: Callable[[Tensor], Tensor], *, first: bool = False
    ) -> None:
        super().__init__(name, table)
        self._gather, self._first = gather, first

    def step(self, rows: Tensor, values: Tensor) -> None:
        self.begin()
        if self._first:
            rows, values = self.coalesced(rows, values)
            self.lap("coalesce")
        everyones = self._gather(rows), self._gather(values)
        self.lap("gather")
        self.sum = self.coalesced(*everyones)
        self.lap("sum")
        self.sent = (dist.get_world_size() - 1) * (rows.nbytes + values.nbytes)


def match_in_a_loop(union: Tensor, rows: Tensor) -> Tensor:
    """Where each of int64[m] rows stands in int64[u], the union: v1, a search of the union per row."""
    return torch.cat([(union == row).nonzero()[0] for row in rows])


def match_all_pairs(union: Tensor, rows: Tensor) -> Tensor:
    """The same: v4, all pairs compared, in chunks."""
    most = max(1, _CHUNK // len(union))
    return torch.cat([(union == chunk[:, None]).nonzero()[:, 1] for chunk in rows.split(most)])


def match_sorted(union: Tensor, rows: Tensor) -> Tensor:
    """The same: v6, a binary search in the sorted union."""
    return torch.searchsorted(union, rows)


class Union(Contestant):
    """Gather everyone's rows, and sum the values of all of their union, zeros where a rank has none."""

    def __init__(self, name: str, table: tuple[int, int], match: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(name, table)
        self._match = match

    def step(self, rows: Tensor, values: Tensor) -> None:
        self.begin()
        rows, values = self.coalesced(rows, values)
        self.lap("coalesce")
        union = torch.unique(gathered_by_torch(rows))
        self.lap("union")
        places = self._match(union, rows)
        self.lap("match")
        filled = values.new_zeros(len(union), values.shape[1]).index_copy_(0, places, values)
        self.lap("scatter")
        dist.all_reduce(filled)
        self.lap("allreduce")
        self.sum, ranks = (union, filled), dist.get_world_size()
        self.sent = (ranks - 1) * rows.nbytes + ring_traffic(filled.numel(), ranks, 1).bytes


class GlooSparse(Contestant):
    """`torch.distributed.all_reduce` of a sparse tensor, which gloo alone takes."""

    def step(self, rows: Tensor, values: Tensor) -> None:
        self.begin()
        rows, values = self.coalesced(rows, values)
        self.lap("coalesce")
        tensor = torch.sparse_coo_tensor(
            rows[None], values, self.table, is_coalesced=True, check_invariants=False
        )
        dist.all_reduce(tensor)
        found = tensor.coalesce()
        self.sum = found.indices()[0], found.values()
        self.lap("allreduce")
        self.sent = (dist.get_world_size() - 1) * (rows.nbytes + values.nbytes)


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
    found: list[Contestant] = []
    for name, group in {"oktopk-rows": None, "oktopk-rows-mpi": comm}.items():
        try:
            found.append(OkTopkRows(name, table, group, device))
        except ValueError as error:  # on every rank alike
            left_out[name] = str(error)
    size = 4 * table[0] * table[1]
    if free is not None and 2 * size * sharers > free:  # itself, and what the library takes
        left_out["dense"] = (
            f"the table has {size / 2**30:.1f} GiB on each of {sharers} ranks, and {free / 2**30:.1f} GiB are free"
        )
    else:
        found.append(Dense(table, comm, device))
    if options.touched > V1_MOST:
        left_out["union-v1"] = f"a loop over {options.touched:,} rows, more than {V1_MOST:,}"
    else:
        found.append(Union("union-v1", table, match_in_a_loop))
    pairs = options.touched * min(options.touched * comm.size, table[0])
    if not cuda and pairs > V4_PAIRS:
        left_out["union-v4"] = f"compares up to {pairs:,} pairs a step, more than {V4_PAIRS:,}"
    else:
        found.append(Union("union-v4", table, match_all_pairs))
    found.append(Union("union-v6", table, match_sorted))
    found.append(TwoAllgathers("two-allgathers", table, gathered_by_torch))
    found.append(TwoAllgathers("two-allgathers-coalesced", table, gathered_by_torch, first=True))
    if cuda:
        left_out |= dict.fromkeys(("two-allgathers-mpi", "gloo-sparse"), "is for --device cpu")
    else:
        found += [
            TwoAllgathers("two-allgathers-mpi", table, partial(gathered_by_mpi, comm)),
            GlooSparse("gloo-sparse", table),
        ]
    return found, left_out
