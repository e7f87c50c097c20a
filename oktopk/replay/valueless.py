"""Arrays, kernels and a transport without values: a step's code runs on them and is recorded.

A rank's record has an entry for each message, wait, control exchange and kernel, in the order of
the code. Where the code asks for what depends on data (how many entries a rank selected, how many
distinct ones a sum has), a `Workload` answers with what is expected. It is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.cpu import kernels as host_kernels
from collectives.cpu.kernels import CountedSums
from collectives.dense_allreduce import DenseAllreduce
from collectives.sparse import ENTRY, Vector
from collectives.traffic import Traffic
from collectives.transport import Transport
from oktopk.cpu.accumulate import BLOCK, Packing
from oktopk.cpu.histograms import LEVELS

SEND, RECEIVE, WAIT, COMPUTE, ALLGATHER, ALLTOALL, ALLREDUCE = range(7)
CONTROL = (ALLGATHER, ALLTOALL, ALLREDUCE)

WORK = ("select", "sum", "code", "entries", "vector", "peer")
"""Kinds of kernels, by what they read.

Gradients that are selected from, lists that are summed, entries that are coded, entries that are
written to a vector or taken from it, vectors in one stream, and elements that lie in the memory of
another rank of the host.
"""

HIGH, LOW = 2, 1
"""First digits of the two magnitudes that values have here."""


class Group(NamedTuple):
    """Ranks that exchange with each other: every stride-th of all, or those that are named.

    Attributes:
        stride, size: rank r has the place (r // stride) % size among them, unless they are named.
        members: their numbers by place; empty where that rule holds.
    """

    stride: int
    size: int
    members: tuple[int, ...] = ()

    @classmethod
    def of(cls, members: Sequence[int]) -> Group:
        """The group of these ranks, by their rule where one holds."""
        size = len(members)
        stride = members[1] - members[0] if size > 1 else 1
        rule = cls(stride, size)
        numbered = [(rule.place(rank), rule.rank(place, members[0])) for place, rank in enumerate(members)]
        return rule if numbered == [*enumerate(members)] else cls(1, size, tuple(members))

    def place(self, rank: int) -> int:
        """The place of one of its ranks."""
        return self.members.index(rank) if self.members else rank // self.stride % self.size

    def rank(self, place: int, rank: int) -> int:
        """The rank at a place of the group that a rank is in."""
        if self.members:
            return self.members[place]
        return rank + (place - self.place(rank)) * self.stride


class Op(NamedTuple):
    """One entry of a record.

    Attributes:
        kind: SEND, RECEIVE, WAIT, COMPUTE, or a control exchange.
        peer: the other rank's place in the group, of a message; the index in WORK, of COMPUTE; else
            0.
        amount: bytes of a message, elements of COMPUTE, or bytes of a row of a control exchange.
        group: the ranks that a message or control exchange is among.
        waits: of WAIT, the places in the record of the messages that it waits for.
    """

    kind: int
    peer: int
    amount: int
    group: Group = Group(1, 1)
    waits: tuple[int, ...] = ()


@dataclass
class Workload:
    """What a step is expected to find in its data, the same on every rank.

    Attributes:
        selected: entries that a rank selects.
        kept: entries that a rank keeps of its region.
    """

    selected: int
    kept: int


def independent(lists: NDArray[np.int64], span: int) -> int:
    """Distinct ones among the entries of lists, where ranks choose independently of each other.

    Args:
        lists: int64[lists], entries of each.
        span: elements that they lie in.
    """
    shares = np.minimum(lists / max(span, 1), 1)
    return round(span * (1 - float(np.prod(1 - shares))))


class Extent:
    """An array that has a length and no values.

    Attributes:
        size: elements; itemsize: bytes of each.
    """

    __slots__ = ("itemsize", "size")

    def __init__(self, size: int, itemsize: int = ENTRY.itemsize) -> None:
        self.size, self.itemsize = size, itemsize

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> Extent:
        start, stop = part.start, part.stop
        size = self.size
        start = 0 if start is None else min(start, size)
        stop = size if stop is None else min(stop, size)
        return Extent(max(0, stop - start), self.itemsize)

    def __setitem__(self, part: slice, value: object) -> None:
        """Nothing: there are no values."""

    def fill(self, value: object) -> None:
        """Nothing: there are no values."""

    def __itruediv__(self, value: object) -> Extent:
        return self

    @property
    def nbytes(self) -> int:
        """Bytes that it would have."""
        return self.size * self.itemsize


class ValuelessWorkspace:
    """As `collectives.workspace.Workspace`."""

    def entries(self, name: str, count: int) -> Extent:
        return Extent(count)


@dataclass
class Record:
    """What one rank does in a step.

    Attributes:
        ops: in the order of the code.
    """

    ops: list[Op] = field(default_factory=list)

    def compute(self, work: str, amount: int) -> None:
        """Add a kernel, unless it has nothing to do."""
        if amount:
            self.ops.append(Op(COMPUTE, WORK.index(work), amount))

    def add(self, op: Op) -> int:
        """Add an entry; returns its place."""
        self.ops.append(op)
        return len(self.ops) - 1


class ValuelessKernels:
    """The kernels of host and gradients, which record how much they would read.

    Args:
        record: of the rank.
        workload: what they find.
    """

    ASYNCHRONOUS = False
    BLOCK, LEVELS = BLOCK, LEVELS
    CANDIDATE_STEP, CANDIDATE_REACH = host_kernels.CANDIDATE_STEP, host_kernels.CANDIDATE_REACH

    def __init__(self, record: Record, workload: Workload) -> None:
        self._record, self._workload = record, workload

    def _read(self, work: str, *arrays: Extent) -> None:
        self._record.compute(work, max(len(each) for each in arrays))

    # of lists

    def sum_sorted_lists(
        self, pool: Extent, begins: Any, ends: Any, lower: int, upper: int, bits: int, out: Extent
    ) -> tuple[int, int]:
        lists = ends - begins
        self._record.compute("sum", int(lists.sum()))
        return min(independent(lists, upper - lower), len(out)), 0

    def counted_sums(
        self, pool: Extent, begins: Any, ends: Any, lower: int, upper: int, *more: Any
    ) -> CountedSums:
        bits, offsets, out = more
        nnz, _ = self.sum_sorted_lists(pool, begins, ends, lower, upper, bits, out)
        counts = np.full(len(offsets) + 1, min(nnz, self._workload.kept), np.int64)
        counts[-1] = 0
        return CountedSums(counts, lambda bits, count: Extent(count))

    def region_offsets(self, entries: Extent, boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
        """A region has as many of a rank's entries as it has elements, as balanced ones are expected to."""
        elements = boundaries - boundaries[0]
        return np.rint(len(entries) * (elements / max(int(elements[-1]), 1))).astype(np.int64)

    def equal_count_splits(self, entries: Extent, length: int, parts: int) -> NDArray[np.int64]:
        return length * np.arange(1, parts, dtype=np.int64) // parts

    def _levels(self, values: Extent) -> tuple[int, int]:
        """How many values have the larger of two magnitudes, and how many the smaller."""
        high = min(len(values), self._workload.kept)
        return high, len(values) - high

    def magnitude_histogram(self, values: Extent, level: int, prefix: int) -> NDArray[np.int64]:
        self._read("sum", values)
        high, low = self._levels(values)
        counts = np.zeros(1 << LEVELS[level][1], np.int64)
        if level == 0:
            counts[HIGH], counts[LOW] = high, low
        else:
            above = sum(width for _, width in LEVELS[1:level])
            counts[0] = {HIGH: high, LOW: low}.get(prefix >> above, 0)
        return counts

    def top_histogram(self, values: Extent, k: int) -> NDArray[np.int64]:
        self._read("vector", values)
        counts = np.zeros(1 << LEVELS[0][1], np.int64)
        selected = min(len(values), self._workload.selected)
        counts[HIGH], counts[LOW] = selected, len(values) - selected
        return counts

    def count_at_least(self, values: Extent, thresholds: NDArray[np.int32]) -> NDArray[np.int64]:
        self._read("sum", values)
        return np.array([self._reaching(values, int(bits)) for bits in thresholds], np.int64)

    def _reaching(self, values: Extent, bits: int) -> int:
        high, low = self._levels(values)
        shift = LEVELS[0][0]
        return (high if bits <= HIGH << shift else 0) + (low if bits <= LOW << shift else 0)

    def take_at_least(self, values: Extent, bits: int, ties: int, out: Extent) -> int:
        self._read("sum", values)
        above = self._reaching(values, bits + 1)
        return min(above + min(ties, self._reaching(values, bits) - above), len(out))

    def split_at_least(self, values: Extent, bits: int, ties: int, *out: Extent) -> tuple[int, int]:
        count = self.take_at_least(values, bits, ties, out[0])
        return count, len(values) - count

    # of gradients

    def accumulate_select(
        self, gradient: object, residual: Extent, bits: int, buffer: Extent, boundaries: Any = None
    ) -> Packing:
        self._read("select", residual)
        selected = self._workload.selected
        packed = Extent(selected)
        offsets = None if boundaries is None else self.region_offsets(packed, boundaries)
        return Packing(selected, 0, offsets)

    def accumulate_moments(self, gradient: object, residual: Extent) -> tuple[float, float, int]:
        self._read("select", residual)
        return 0.0, float(len(residual)), 0

    def select_at_least(self, residual: Extent, bits: int, ties: int, out: Extent) -> int:
        self._read("select", residual)
        return self._workload.selected

    def accumulate(self, gradient: object, residual: Extent, out: Extent) -> int:
        self._read("vector", out)
        return 0

    def add_values(self, kept: Extent, incoming: Extent) -> None:
        self._read("vector", kept)

    def scale_values(self, values: Extent, scale: float) -> NDArray[np.uint32]:
        self._read("vector", values)
        return np.zeros(1, np.uint32)

    def count_nonfinite(self, values: Extent) -> int:
        self._read("sum", values)
        return 0

    def clear_common(self, vector: Any, selected: Any, update: Any, errors_stay: bool) -> None:
        self._read("entries", selected, update)

    def add_common(self, vector: Extent, errors: Extent, update: Extent) -> None:
        self._read("entries", errors, update)

    def write_block(self, entries: Extent, lower: int, block: Extent) -> None:
        self._read("vector", block)

    def write_block_scaled(self, block: Extent, scale: float, out: Extent) -> None:
        self._read("vector", out)

    def write_scaled(self, vector: Extent, entries: Extent, scale: float) -> None:
        self._read("entries", entries)

    def clear_support(self, vector: Extent, entries: Extent) -> None:
        self._read("entries", entries)

    add_entries = write_scaled

    def take_values(self, vector: Extent, support: Extent, out: Extent) -> None:
        self._read("entries", support)

    def to_whole_indices(self, entries: Extent, block: int, shards: int, shard: int) -> None:
        self._read("entries", entries)

    # of wires

    def codec_report(self, ranks: int) -> NDArray[np.float64]:
        return np.zeros((ranks, 5))

    def encode_entries(self, entries: Extent, *wire: object) -> None:
        self._read("code", entries)

    encode_values = encode_entries

    def decode_entries(self, wire: Extent, layout: object, out: Extent, report: object) -> None:
        self._read("code", out)

    def decode_values(self, wire: Any, layout: Any, out: Any, add: bool, report: Any) -> None:
        self._read("code", out)

    def cut_values(self, kept: Extent, decoded: Extent) -> None:
        self._read("vector", kept)

    def wait(self) -> None:
        """Nothing runs."""


class ValuelessTransport(Transport):
    """One rank's connection to a group of ranks. Others are taken to send what this rank sends.

    Args:
        rank: this rank's, of all ranks.
        group: that it is in.
        record, kernels: of the rank.
        ranks_per_host: consecutive ones share a host.

    Attributes:
        silent: the place of a rank that has nothing to send; None: all have.
        like: the connection of the rank that the others send as; None: this one.
        rows: of the last alltoall, as this rank has sent them.
    """

    library = "none"
    silent: int | None = None
    like: Any = None
    rows: NDArray[np.int64]

    def __init__(
        self,
        rank: int,
        group: Group,
        record: Record,
        kernels: ValuelessKernels,
        ranks_per_host: int = 1,
    ) -> None:
        self.rank, self.size = group.place(rank), group.size
        self.kernels = kernels
        self.workspace: Any = ValuelessWorkspace()
        self.traffic = Traffic()
        self.hosts = [group.rank(place, rank) // ranks_per_host for place in range(self.size)]
        self.ranks = list(range(self.size))
        self.shared: dict[Any, Any] = {}
        self._record, self._group = record, group

    def close(self) -> None:
        """Nothing is held."""

    def dense_allreduce(self, vector: Vector, timeout: float) -> DenseAllreduce:
        return DenseAllreduce(vector, self)

    def allocate(self, length: int) -> Any:
        return Extent(length, 4)

    def send(self, array: Any, dest: int, even_if_empty: bool = False) -> list[Any]:
        if not array.size and not even_if_empty:
            return []
        return [self._record.add(Op(SEND, dest, array.nbytes, self._group))]

    def receive(self, array: Any, source: int) -> list[Any]:
        if not array.size:
            return []
        return [self._record.add(Op(RECEIVE, source, array.nbytes, self._group))]

    def receive_counted(self, array: Any, source: int) -> int:
        """A list of as many entries as this rank would send."""
        count = min(len(array), self.kernels._workload.selected)
        self.wait([self._record.add(Op(RECEIVE, source, count * array.itemsize, self._group))])
        return count

    def wait(self, requests: list[Any]) -> None:
        if requests:
            self._record.add(Op(WAIT, 0, 0, waits=tuple(requests)))

    def _control(self, kind: int, nbytes: int) -> None:
        if self.size > 1:
            self._record.add(Op(kind, 0, nbytes, self._group))

    def alltoall_control(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        self._control(ALLTOALL, rows[0].nbytes)
        self.rows = rows
        received = np.repeat((self.like or self).rows[self.rank : self.rank + 1], self.size, axis=0)
        if self.silent is not None:
            received[self.silent] = 0
        return received

    def allgather_control(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        self._control(ALLGATHER, row.nbytes)
        return np.broadcast_to(row, (self.size, *row.shape))

    def allreduce_control(self, array: NDArray[np.int64]) -> NDArray[np.int64]:
        self._control(ALLREDUCE, array.nbytes)
        return array * self.size

    def any_control(self, flag: bool) -> bool:
        self._control(ALLREDUCE, 8)
        return flag

    def _outside(self, *arguments: object) -> Any:
        raise RuntimeError("a step does not call this")

    barrier: Any = _outside
    allgather_objects: Any = _outside
    allreduce_or: Any = _outside
    broadcast: Any = _outside
    ranks_on_this_host: Any = _outside
    group_by_host: Any = _outside
    split: Any = _outside


class ValuelessBackend:
    """As `oktopk.backend.Backend`, of extents."""

    nvtx = stream = None

    def __init__(self, kernels: ValuelessKernels) -> None:
        self.kernels = kernels

    def zeros(self, length: int) -> Extent:
        return Extent(length, 4)

    def sparse_update(self, vector: Extent) -> None:
        """Kernels write updates."""

    def entry_windows(self, host: Transport) -> None:
        """Entries of a host travel as messages."""

    def wait(self) -> None:
        """Nothing runs."""
