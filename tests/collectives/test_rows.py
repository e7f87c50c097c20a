"""Sums of rows: right, the same bits on all ranks, counted, and stopped by a flag."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.cpu.rows import HostRowKernels
from collectives.element_types import ELEMENT_TYPES
from collectives.errors import FlaggedRanksError
from collectives.mpi import MpiTransport
from collectives.rows import balanced_boundaries, row_sparse_allreduce
from collectives.table_rows import Rows, row_type
from tests.rows import narrowed, touched, widened

pytestmark = pytest.mark.also(ranks=8)

KERNELS = HostRowKernels()
TYPES = list(ELEMENT_TYPES)


def sums_of(lists: list[Rows], kind: str, scale: float = 1.0) -> Rows:
    """The lists one after the other, equal rows added up in float32 from left to right, row by row."""
    sums_by_row: dict[int, NDArray[np.float32]] = {}
    for each in lists:
        for row, value in zip(each.rows.tolist(), widened(each.values, kind), strict=True):
            sums_by_row[row] = sums_by_row[row] + value if row in sums_by_row else value.copy()
    rows = np.array(sorted(sums_by_row), np.int64)
    width = lists[0].values.shape[1]
    sums = np.array([sums_by_row[row] for row in rows.tolist()], np.float32).reshape(len(rows), width)
    with np.errstate(over="ignore", invalid="ignore"):
        return Rows(rows, narrowed(sums * np.float32(scale), kind))


@pytest.mark.parametrize("kind", TYPES)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 60), width=st.integers(1, 40))
def test_equal_rows_are_added_in_their_order_and_rounded_once(
    kind: str, seed: int, count: int, width: int
) -> None:
    given_rows = touched(seed, 20, count, width, kind)
    sums, nonfinite = KERNELS.coalesce(given_rows.rows, given_rows.values, 20, 0.5)
    expected = sums_of([given_rows], kind, 0.5)
    assert sums.rows.tolist() == expected.rows.tolist()
    assert sums.values.tobytes() == expected.values.tobytes()
    assert not nonfinite


@pytest.mark.parametrize("kind", TYPES)
def test_elements_that_are_not_finite_are_counted(kind: str) -> None:
    values = np.array([[1, np.inf], [np.nan, 2], [3, -np.inf], [0, 0]], np.float32)
    rows = np.array([5, 2, 5, 1], np.int32)
    sums, nonfinite = KERNELS.coalesce(rows, narrowed(values, kind), 6, 1.0)
    assert sums.rows.tolist() == [1, 2, 5]
    assert nonfinite == 2
    assert np.isnan(widened(sums.values, kind)).tolist() == [[False, False], [True, False], [False, True]]
    large = narrowed(np.full((2, 3), 60000.0 if kind == "float16" else 3e38, np.float32), kind)
    assert KERNELS.coalesce(np.array([4, 4], np.int32), large, 6, 1.0)[1] == 3


def test_blocks_of_halves_are_the_bits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = touched(7, 50, 300, 16, "bfloat16")
    whole, _ = KERNELS.coalesce(rows.rows, rows.values, 50, 1.0)
    monkeypatch.setattr("collectives.cpu.rows._BLOCK", 64)
    parts, _ = KERNELS.coalesce(rows.rows, rows.values, 50, 1.0)
    assert parts.values.tobytes() == whole.values.tobytes()


def everyones(comm: MPI.Intracomm, shape: str, kind: str, length: int, width: int) -> list[Rows]:
    """What each rank touched, the same on all ranks; rows of one rank are coalesced."""
    counts = {
        "some": [40 + 5 * rank for rank in range(comm.size)],
        "none on most ranks": [30 * (rank == comm.size - 1) for rank in range(comm.size)],
        "none": [0] * comm.size,
        "all the same": [25] * comm.size,
        "one row": [1] * comm.size,
        "skewed": [60] * comm.size,
    }[shape]
    made = []
    for rank, count in enumerate(counts):
        seed = 3 if shape == "all the same" else 3 + rank
        rows = touched(seed, 1 if shape == "one row" else length, count, width, kind, shape == "skewed")
        made.append(KERNELS.coalesce(rows.rows, rows.values, length, 1.0)[0])
    return made


@pytest.mark.mpi
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", ["some", "none on most ranks", "none", "all the same", "one row", "skewed"])
def test_sums_over_the_ranks_are_those_of_one_process_bit_for_bit(
    shape: str, kind: str, comm: MPI.Intracomm, transport: MpiTransport
) -> None:
    length, width = 97, 5
    lists = everyones(comm, shape, kind, length, width)
    local = lists[comm.rank]
    before = local.rows.copy(), local.values.copy()
    transport.take_traffic()
    sums = row_sparse_allreduce(local, length, transport, KERNELS, scale=1.0 / comm.size)
    sent = transport.take_traffic()
    expected = sums_of(lists, kind, 1.0 / comm.size)
    assert sums.rows.tolist() == expected.rows.tolist()
    assert sums.values.tobytes() == expected.values.tobytes()
    assert sums.rows.dtype == np.int32 and sums.values.shape == expected.values.shape
    assert np.array_equal(local.rows, before[0]) and np.array_equal(local.values, before[1])
    # conservation of bytes: what all ranks send is what all ranks get
    row_bytes = local.rows.itemsize + width * local.values.itemsize
    total = comm.allreduce(sent.bytes)
    gathered = (comm.size - 1) * len(sums) * row_bytes
    assert total - gathered <= sum(map(len, lists)) * row_bytes
    assert total >= gathered


@pytest.mark.mpi
@pytest.mark.parametrize("who", ["all", "every second rank", "one rank", "each in its own range", "skewed"])
def test_volume_is_that_of_the_rows_outside_and_the_sums(
    who: str, comm: MPI.Intracomm, transport: MpiTransport
) -> None:
    length, width, kind = 20_000, 8, "float32"
    touches = {"every second rank": lambda rank: rank % 2 == 0, "one rank": lambda rank: rank == 0}
    lists = []
    for rank in range(comm.size):
        count = 900 if touches.get(who, lambda rank: True)(rank) else 0
        rows = touched(rank, length, count, width, kind, who == "skewed")
        if who == "each in its own range":
            rows = Rows((rows.rows + rank * length) // comm.size, rows.values)
        lists.append(KERNELS.coalesce(rows.rows, rows.values, length, 1.0)[0])
    transport.take_traffic()
    sums = row_sparse_allreduce(lists[comm.rank], length, transport, KERNELS)
    sent = comm.allgather(transport.take_traffic().bytes)
    local = np.mean([len(rows) for rows in lists])
    mean = (local + len(sums)) * (comm.size - 1) / comm.size * (4 + 4 * width)
    assert np.mean(sent) <= 1.05 * mean
    if who == "one rank":  # nobody else has anything to send to the owners
        assert max(sent) <= (1 + comm.size) * mean
    else:
        assert max(sent) <= (1.6 if who == "every second rank" else 1.3) * mean


@given(lists=st.lists(st.lists(st.integers(0, 999), max_size=60, unique=True), min_size=1, max_size=9))
def test_boundaries_ascend_and_balance_whatever_ranks_touch(lists: list[list[int]]) -> None:
    size = len(lists)
    points = np.zeros((size, 17), np.int64)
    for rank, rows in enumerate(map(sorted, lists)):
        points[rank, 0] = len(rows)
        if rows:
            points[rank, 1:] = np.array(rows)[(np.arange(16) * size + rank) * len(rows) // (16 * size)]
    boundaries = balanced_boundaries(points, 1000)
    assert boundaries[0] == 0 and boundaries[-1] == 1000 and len(boundaries) == size + 1
    assert (np.diff(boundaries) >= 0).all()
    every = np.concatenate([np.array(rows, np.int64) for rows in lists])
    if len(every):
        # a row that all have cannot be cut, nor what lies between two points of a rank
        counts = np.histogram(every, np.append(boundaries, 1000))[0][:size]
        slack = size + sum(-(-len(rows) // 16) for rows in lists)
        assert counts.max() <= len(every) / size + 2 * slack


@pytest.mark.mpi
def test_a_flag_and_a_sum_that_overflows_stop_every_rank(
    comm: MPI.Intracomm, transport: MpiTransport
) -> None:
    rows = Rows(np.array([3], np.int32), np.full((1, 2), 3e38, np.float32))
    transport.take_traffic()
    with pytest.raises(FlaggedRanksError) as error:
        row_sparse_allreduce(rows, 10, transport, KERNELS, flag=comm.rank == comm.size - 1)
    assert error.value.ranks == [comm.size - 1]
    assert not transport.take_traffic().bytes
    if comm.size > 1:
        with pytest.raises(FlaggedRanksError) as error:
            row_sparse_allreduce(rows, 10, transport, KERNELS)
        assert error.value.ranks == []
    again = row_sparse_allreduce(Rows(rows.rows, rows.values / 1e30), 10, transport, KERNELS)
    assert again.rows.tolist() == [3]


def test_row_ids_of_a_long_table_have_64_bits() -> None:
    assert row_type(2**31 - 1) == np.int32
    assert row_type(2**31) == np.int64
    rows = np.array([2**40, 5, 2**40], np.int64)
    sums, _ = KERNELS.coalesce(rows, np.ones((3, 1), np.float32), 2**40 + 1, 1.0)
    assert sums.rows.tolist() == [5, 2**40] and sums.values.tolist() == [[1.0], [2.0]]
