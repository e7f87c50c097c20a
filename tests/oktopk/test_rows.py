"""Tables reduced row by row, step after step: nothing lost, all or nothing, and bad input told by every rank alike."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.element_types import ELEMENT_TYPES
from collectives.errors import NoPeerMemoryError
from oktopk import MissingRanksError, NonFiniteGradientError
from oktopk.rows import RowSparseAllreduce
from tests.devices import get, on_gpus, put
from tests.rows import touched, widened

pytestmark = [pytest.mark.mpi, pytest.mark.host_cuda(ranks=3)]

LENGTH, WIDTH = 60, 7


def table(comm: MPI.Intracomm, **settings: Any) -> RowSparseAllreduce:
    return RowSparseAllreduce(comm, LENGTH, WIDTH, **settings)


def same_sums(one: RowSparseAllreduce, other: RowSparseAllreduce) -> bool:
    """Whether the rows and the bits of the last sums are equal."""
    assert one.sum is not None and other.sum is not None
    pairs = (one.sum.rows, other.sum.rows), (one.sum.values, other.sum.values)
    return all(get(mine).tobytes() == get(theirs).tobytes() for mine, theirs in pairs)


def gradient(rank: int, step: int, kind: str = "float32", skewed: bool = False) -> tuple[Any, Any]:
    rows = touched(1000 * step + rank, LENGTH, 30, WIDTH, kind, skewed)
    return rows.rows, rows.values


def dense(rows: Any, values: Any, kind: str = "float32") -> NDArray[np.float64]:
    """float64[LENGTH, WIDTH] of rows that come several times perhaps."""
    whole = np.zeros((LENGTH, WIDTH))
    np.add.at(whole, rows, widened(values, kind).astype(np.float64))
    return whole


@pytest.mark.parametrize("average", [True, False])
def test_the_sum_is_that_of_all_ranks(average: bool, comm: MPI.Intracomm) -> None:
    reducer = table(comm, average=average)
    for step in range(3):
        report = reducer.step(*gradient(comm.rank, step))
        gradients = [dense(*gradient(rank, step)) for rank in range(comm.size)]
        expected = np.mean(gradients, axis=0) if average else np.sum(gradients, axis=0)
        assert reducer.sum is not None
        summed = dense(reducer.sum.rows, reducer.sum.values)
        assert np.allclose(summed, expected, rtol=1e-5, atol=1e-4)
        assert report.summed == len(reducer.sum) == np.count_nonzero(expected.any(axis=1))
        assert report.touched == report.sent == len(np.unique(gradient(comm.rank, step)[0]))
        assert (report.step, report.skipped) == (step, False)
        bits = comm.allgather((reducer.sum.rows.tobytes(), reducer.sum.values.tobytes()))
        assert len(set(bits)) == 1


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_gradient_that_is_not_finite_changes_nothing(nonfinite: str, comm: MPI.Intracomm) -> None:
    last = comm.size - 1
    reducer = table(comm, nonfinite=nonfinite)
    reducer.step(*gradient(comm.rank, 0))
    rows, values = gradient(comm.rank, 1)
    if comm.rank == last:
        values[3, 2] = np.nan
    if nonfinite == "raise":
        with pytest.raises(NonFiniteGradientError) as error:
            reducer.step(rows, values)
        assert error.value.ranks == [last]
    else:
        assert reducer.step(rows, values).skipped
    assert reducer.sum is None
    values[...] = 3e38  # the sum of which overflows
    rows[...] = 5
    if nonfinite == "raise":
        with pytest.raises(NonFiniteGradientError):
            reducer.step(rows, values)
    else:
        assert reducer.step(rows, values).skipped
    assert not reducer.step(*gradient(comm.rank, 2)).skipped


BAD: dict[str, tuple[Any, Any, str]] = {
    "beyond the table": (np.array([3, LENGTH]), np.zeros((2, WIDTH), np.float32), "row 60 is not in"),
    "negative": (np.array([-1, 3]), np.zeros((2, WIDTH), np.float32), "row -1 is not in"),
    "fewer values": (np.array([1, 3]), np.zeros((1, WIDTH), np.float32), "2 row ids and 1 row"),
    "another width": (np.array([1]), np.zeros((1, WIDTH + 1), np.float32), "values are float32"),
    "another type": (np.array([1]), np.zeros((1, WIDTH)), "values are float64"),
    "no whole numbers": (np.array([1.0]), np.zeros((1, WIDTH), np.float32), "rows are float64"),
    "a list": ([1], [[1.0]], "rows are a list"),
    "no values": (np.array([1]), None, "values are a NoneType"),
    "strided": (np.array([1, 2]), np.zeros((4, WIDTH), np.float32)[::2], "not C-contiguous"),
}


ON_GPU = [
    pytest.param("cuda", bad, marks=on_gpus) for bad in ("beyond the table", "negative", "fewer values")
]


@pytest.mark.parametrize(("device", "bad"), [*(("cpu", bad) for bad in BAD), *ON_GPU], indirect=["device"])
def test_bad_rows_on_one_rank_are_one_error_on_all(device: str, bad: str, comm: MPI.Intracomm) -> None:
    rows, values, text = BAD[bad]
    last = comm.size - 1
    good = [put(device, array) for array in gradient(comm.rank, 1)]
    reducer = table(comm, device=device, peer_memory=device == "cuda" or None)
    for _ in range(2):  # before and after there are windows
        with pytest.raises(ValueError, match=f"(rank {last}|all ranks): .*{text}"):
            reducer.step(*((put(device, rows), put(device, values)) if comm.rank == last else good))
        assert not reducer.step(*good).skipped


def test_row_ids_may_lie_apart(device: str, comm: MPI.Intracomm) -> None:
    rows, values = gradient(comm.rank, 1)
    pairs = put(device, np.stack([rows, rows[::-1]], axis=1))
    host = table(comm)
    reducer = table(comm, device=device)
    host.step(rows, values)
    reducer.step(pairs[:, 0], put(device, values))
    assert same_sums(host, reducer)


def test_without_memory_on_one_rank_all_are_told(
    device: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, values = (put(device, array) for array in gradient(comm.rank, 1))
    last = comm.size - 1

    def none_left(*arguments: Any) -> None:
        raise MemoryError

    reducer = table(comm, device=device)
    reducer.step(rows, values)
    with monkeypatch.context() as patch:
        if comm.rank == last:
            patch.setattr(reducer.windows or reducer.kernels, "coalesce", none_left)
        with pytest.raises(ValueError, match=f"(rank {last}|all ranks): no memory to add up 30 rows"):
            reducer.step(rows, values)
    assert not reducer.step(rows, values).skipped


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("peer_memory", [False, True])
def test_a_gpu_gives_the_bits_of_the_host(
    kind: str, peer_memory: bool, cuda: str, comm: MPI.Intracomm
) -> None:
    host = table(comm, element_type=kind)
    gpu = table(comm, device=cuda, peer_memory=peer_memory, element_type=kind)
    assert (gpu.p2p_unavailable_reason == "") == peer_memory
    for step in range(4):
        rows, values = gradient(comm.rank, step, kind, skewed=step == 2)
        if step == 3:
            rows, values = rows[: 30 * (comm.rank == 0)], values[: 30 * (comm.rank == 0)]
        all_read_all = gpu.windows is not None and gpu.windows.all_read_all
        reports = [host.step(rows, values), gpu.step(put(cuda, rows), put(cuda, values))]
        if not peer_memory:
            assert reports[0].messages == reports[1].messages and reports[0].bytes == reports[1].bytes
        if all_read_all:
            row_bytes = 4 + WIDTH * ELEMENT_TYPES[kind].nbytes
            assert reports[1].bytes == (comm.size - 1) * reports[1].sent * row_bytes
        else:
            assert comm.allreduce(reports[0].bytes) == comm.allreduce(reports[1].bytes)
        assert same_sums(host, gpu)
    bad = gradient(comm.rank, 5, kind)[1]
    bad[2, 1] = 0x7FC0 if kind == "bfloat16" else np.nan
    with pytest.raises(NonFiniteGradientError):
        gpu.step(put(cuda, gradient(comm.rank, 5, kind)[0]), put(cuda, bad))
    with pytest.raises(ValueError, match="is not in"):
        gpu.step(put(cuda, np.array([LENGTH])), put(cuda, bad[:1]))


@pytest.mark.parametrize("pairs", [False, True], ids=["all", "two by two"])
def test_windows_grow_by_agreement_and_are_read_before_they_are_written_again(
    pairs: bool, cuda: str, comm: MPI.Intracomm
) -> None:
    together: Any = comm.Split(comm.rank // 2 if pairs else 0)  # two ranks sum alike, and publish once a step
    counts = [3, 30, 4, 60, 60, 7, 200, 150]
    host = table(together)
    gpu = table(together, device=cuda, peer_memory=True)
    for step, most in enumerate(counts):
        count = most if together.rank == step % together.size else min(most, 5)
        each = touched(50 * step + together.rank, LENGTH, count, WIDTH, "float32")
        values = each.values.copy()
        if step in (2, 5):  # nothing of it is read
            values[0] = np.inf
            with pytest.raises(NonFiniteGradientError):
                gpu.step(put(cuda, each.rows), put(cuda, values))
            continue
        host.step(each.rows, values)
        gpu.step(put(cuda, each.rows), put(cuda, values))
        assert same_sums(host, gpu)
    together.Free()


@pytest.mark.mpi(min_size=3)
def test_all_read_all_rows_after_a_step_that_this_suits(cuda: str, comm: MPI.Intracomm) -> None:
    host = table(comm)
    gpu = table(comm, device=cuda, peer_memory=True)
    assert gpu.windows is not None
    size, block = comm.size, np.arange(4)
    equal = block
    apart = block + 4 * comm.rank
    as_many = block + 4 * (comm.rank % (size - 1))  # u = (P-1)/P·R: as many bytes either way
    one_less = as_many - (comm.rank == size - 2)  # one row more is that of two ranks
    read_all = False
    none = block[:0]
    steps = [(equal, False), (none, False), (as_many, True), (none, True), (apart, True), (one_less, False)]
    for rows, then in [*steps, (as_many, True), (equal, False)]:
        values = gradient(comm.rank, 0)[1][: len(rows)]
        reports = [host.step(rows, values), gpu.step(put(cuda, rows), put(cuda, values))]
        assert same_sums(host, gpu)
        if read_all:
            assert reports[1].bytes == (size - 1) * len(rows) * (4 + 4 * WIDTH)
        else:
            assert comm.allreduce(reports[0].bytes) == comm.allreduce(reports[1].bytes)
        read_all = then
        assert gpu.windows.all_read_all is read_all


def test_ranks_without_rows_need_no_windows(cuda: str, comm: MPI.Intracomm) -> None:
    host = table(comm)
    gpu = table(comm, device=cuda, peer_memory=True)
    bad = gradient(comm.rank, 0)[1]
    bad[0] = np.nan
    with pytest.raises(NonFiniteGradientError):
        gpu.step(put(cuda, gradient(comm.rank, 0)[0]), put(cuda, bad))
    for ranks_with_rows in (0, 1, 0):
        rows, values = gradient(comm.rank, 0)
        count = len(rows) * (comm.rank < ranks_with_rows)
        host.step(rows[:count], values[:count])
        gpu.step(put(cuda, rows[:count]), put(cuda, values[:count]))
        assert same_sums(host, gpu)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("windows_before", [False, True])
def test_without_memory_for_windows_rows_travel_as_messages(
    windows_before: bool, cuda: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collectives import symmetric_memory

    def none_left(*arguments: Any) -> None:
        raise NoPeerMemoryError("no peer memory: rank 0: out of memory")

    host = table(comm)
    gpu = table(comm, device=cuda, peer_memory=True)
    if windows_before:  # too small for the rows that come
        rows, values = np.arange(3) + 3 * comm.rank, gradient(comm.rank, 7)[1][:3]
        for reducer, place in ((host, "cpu"), (gpu, cuda)):
            reducer.step(put(place, rows), put(place, values))
    monkeypatch.setattr(symmetric_memory, "SymmetricMemory", none_left)
    for step in range(3):
        rows, values = gradient(comm.rank, step)
        assert gpu.windows is not None
        by_owner = comm.size > 2 and not gpu.windows.all_read_all
        # in the step before the ranks' rows were apart, so that more than 2 ranks are to read all, too
        assert by_owner == (comm.size > 2 and not (windows_before and step == 0))
        reports = [host.step(rows, values), gpu.step(put(cuda, rows), put(cuda, values))]
        sent = reports[1].sent * (4 + 4 * WIDTH)
        if by_owner or comm.size == 2:
            assert reports[0].messages == reports[1].messages
        else:
            assert (reports[1].messages, reports[1].bytes) == (2 * (comm.size - 1), (comm.size - 1) * sent)
        assert same_sums(host, gpu)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_not_come_is_named_by_all(
    device: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    def late() -> None:
        if comm.rank == 0:
            time.sleep(limit + 0.7)

    come = late
    if device == "cpu":  # kernels have no such clock
        monkeypatch.setattr("collectives.limit.ANSWER", 10.0)
        come = partial(request.getfixturevalue("after_the_others"), 0)
    # kernels on the host are further apart
    peer_memory, limit = (True, 2.0) if device == "cuda" else (None, 0.5)
    reducer = table(comm, device=device, peer_memory=peer_memory, timeout=limit)
    rows, values = (put(device, array) for array in gradient(comm.rank, 0))
    reducer.step(rows, values)
    comm.Barrier()
    come()
    with pytest.raises(MissingRanksError, match=rf"step 1: rank\(s\) 0 did not come within {limit:g} s"):
        reducer.step(rows, values)
    with pytest.raises(MissingRanksError):  # nothing goes on after that
        reducer.step(rows, values)
    reducer.close()
    comm.Barrier()
