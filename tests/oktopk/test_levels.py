"""Two levels: the contract with "a host" for "a rank", over hosts made of consecutive ranks by `ranks_per_host`."""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.allgatherv import allgatherv
from collectives.errors import NoPeerMemoryError
from collectives.traffic import step_limit, upper_bound
from oktopk import GradientAllreduce, MissingRanksError, NonFiniteGradientError, levels
from oktopk.buckets import BucketedAllreduce
from oktopk.elastic import redistribute
from oktopk.host_group import HostGroup
from oktopk.levels import Layout
from oktopk.methods.union import SharedSupport, union_words
from oktopk.settings import selection_cap
from tests import oracle as reference
from tests.devices import get, narrowed, on_gpus, put, use
from tests.inputs import GRADIENTS, Vector
from tests.rows import widened

pytestmark = [pytest.mark.also(ranks=8), pytest.mark.also(ranks=6), pytest.mark.host_cuda(ranks=4)]

BLOCK = 64  # so that a short vector has many blocks
LENGTH = 4011


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "BLOCK", BLOCK)


def two_levels(comm: MPI.Intracomm, device: str, ranks_per_host: int, **settings: Any) -> GradientAllreduce:
    use(device, comm)
    length = settings.pop("length", LENGTH)
    settings = {"density": 0.02, "average": False, "threshold_interval": 3, "boundary_interval": 2} | settings
    settings |= {"levels": "hosts", "ranks_per_host": ranks_per_host, "peer_memory": device == "cuda" or None}
    return GradientAllreduce(comm, length, device=device, **settings)


def of_hosts(comm: MPI.Intracomm, gradient: Vector, hosts: list[int]) -> NDArray[np.float64]:
    """float64[H, n]: the sum of each host's gradients."""
    rows: NDArray[np.float64] = np.array(comm.allgather(gradient), np.float64)
    return np.array([rows[np.array(hosts) == host].sum(axis=0) for host in range(max(hosts) + 1)])


def check_mass(
    comm: MPI.Intracomm,
    reducer: GradientAllreduce,
    gradient: Vector,
    before: NDArray[np.float64],
    near: float = 1e-5,
) -> NDArray[np.float64]:
    """float64[n], what is left of all that was put in, once it was checked that nothing is lost; all ranks have one update."""
    update = get(reducer.update)
    assert len(set(comm.allgather(update.tobytes()))) == 1
    after: NDArray[np.float64] = comm.allreduce(reducer.gathered_residual().astype(np.float64))
    put_in = comm.allreduce(gradient.astype(np.float64)) + before
    if reducer.settings.wire in ("plain", "float32"):
        assert np.array_equal(put_in, after + update)
    else:
        assert np.allclose(put_in, after + update, rtol=1e-6, atol=near)
    return after


def per_host(comm: MPI.Intracomm, value: float, hosts: list[int]) -> list[float]:
    """The sum of every rank's value, host by host."""
    values = comm.allgather(value)
    return [
        sum(v for v, at in zip(values, hosts, strict=True) if at == host) for host in range(max(hosts) + 1)
    ]


def shard_by_shard(layout: Layout) -> np.ndarray:
    """int64[n], the indices of all shards, one after another: the order in which ties are shared out."""
    whole = np.arange(layout.length, dtype=np.float32)
    return np.concatenate([layout.extract(whole, shard) for shard in range(layout.shards)]).astype(np.int64)


@pytest.mark.parametrize("hosts", [(0,), (0, 0), (0, 0, 0, 1), (0, 1, 0, 1, 1), (0, 0, 0, 1, 1, 1)])
def test_shards_tile_the_vector_and_ascend_in_it(
    hosts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "BLOCK", 4)
    for length in range(1, 60):
        layout = Layout(hosts, length)
        assert 1 <= layout.shards <= min(Counter(hosts).values())
        parts = [layout.extract(np.arange(length, dtype=np.float32), s) for s in range(layout.shards)]
        assert [len(part) for part in parts] == [layout.shard_length(s) for s in range(layout.shards)]
        assert all(len(part) and np.all(np.diff(part) > 0) for part in parts)
        assert sorted(np.concatenate(parts)) == list(range(length))
        whole = np.full(length, -1, np.float32)
        for shard, part in enumerate(parts):
            layout.insert(part, shard, whole)
            for begin in range(len(part)):
                assert np.array_equal(layout.places(shard, begin, len(part)), part[begin:])
        assert np.array_equal(whole, np.arange(length))


def _one_shard(rng: np.random.Generator, length: int, rank: int, size: int) -> Vector:
    """Large where the first of two shards lies."""
    weights = np.where(np.arange(length) // BLOCK % 2, 1, 999)
    return (rng.integers(-9, 10, length) * weights).astype(np.float32)


DRAWN = GRADIENTS | {"one shard": _one_shard}
SHAPES = (1, 0.25), (5, 0.25), (400, 0.1), (LENGTH, 0.02)
# (kind, ranks a host, half of the shapes): each kind meets one of these four, its neighbours the others
KINDS = [
    pytest.param(
        *(kind, per, half),
        marks=[]
        if (per % 2, half) == (at % 2, at // 2 % 2)
        else pytest.mark.long(
            "`make test` has each kind with one number of ranks a host and half of the shapes"
        ),
    )
    for at, kind in enumerate(DRAWN)
    for per in (2, 3)
    for half in (0, 1)
]


@pytest.mark.mpi
@pytest.mark.parametrize(("kind", "ranks_per_host", "half"), KINDS)
def test_hosts_lose_nothing_pass_no_cap_and_equal_the_oracle_where_exact(
    comm: MPI.Intracomm, device: str, ranks_per_host: int, kind: str, half: int
) -> None:
    for length, density in SHAPES[half::2]:
        reducer = two_levels(
            comm, device, ranks_per_host, length=length, density=density, threshold_interval=2
        )
        hosts = reducer.hosts
        assert hosts is not None
        order = shard_by_shard(Layout(tuple(hosts), length))
        rng = np.random.default_rng((comm.rank, length))
        before = np.zeros(length)
        residuals: NDArray[np.float64] = np.zeros((max(hosts) + 1, length))
        exact = 0
        for _ in range(5):
            gradient = DRAWN[kind](rng, length, comm.rank, comm.size)
            given = put(device, gradient)
            report = reducer.step(given)
            assert np.array_equal(get(given), gradient), "the caller's gradient was changed"
            before = check_mass(comm, reducer, gradient, before)
            update, left = get(reducer.update), of_hosts(comm, reducer.gathered_residual(), hosts)
            cap = selection_cap(report.k)
            assert report.local_nnz <= cap
            assert np.count_nonzero(update) == report.global_nnz <= cap
            between = per_host(comm, report.bytes_between, hosts)
            assert np.mean(between) <= 4 * step_limit(report.k, len(between)), (length, density, report)
            if all(comm.allgather(report.exact)):
                exact += 1
                gradients = of_hosts(comm, gradient, hosts)
                expected = reference.ok_topk(gradients[:, order], residuals[:, order], report.k)
                assert np.array_equal(update[order], expected.update), (length, density)
                assert np.array_equal(left[:, order], expected.residuals), (length, density)
            residuals = left
        assert exact >= 3
        reducer.close()


@pytest.mark.mpi(min_size=8)
def test_a_grid_of_hosts_changes_no_bit_of_whole_numbers(comm: MPI.Intracomm) -> None:
    """Two columns of two hosts, of two ranks each; through a gradient that is not finite."""
    direct, grid = (two_levels(comm, "cpu", 2, exchange=exchange) for exchange in ("direct", "grid"))
    rng, sent = np.random.default_rng(comm.rank), []
    for step in range(5):
        gradient = GRADIENTS["heavy tailed"](rng, LENGTH, comm.rank, comm.size)
        if step == 3 and comm.rank == 5:
            gradient[7] = np.nan
        reports = []
        for reducer in (direct, grid):
            with pytest.raises(NonFiniteGradientError, match="5$") if step == 3 else nullcontext():
                reports.append(reducer.step(gradient))
        assert direct.residual is not None and grid.residual is not None
        assert direct.residual.tobytes() == grid.residual.tobytes()
        assert direct.update.tobytes() == grid.update.tobytes()
        sent += [[report.bytes_between for report in reports]] * bool(reports)
    totals = comm.allreduce(np.array(sent).sum(axis=0))
    assert totals[1] > 1.1 * totals[0], "nothing went over a grid"


@pytest.mark.mpi(min_size=2)
def test_a_fast_ranks_next_gradients_reach_no_slow_ranks_sum(
    comm: MPI.Intracomm, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reducer = two_levels(comm, device, 2)
    group = reducer.group
    assert group is not None and reducer.gradient_buffer is not None
    summed = group.sum

    def late(at_once: bool) -> Any:
        time.sleep(0.05 * (comm.rank % 2))
        return summed(at_once)

    monkeypatch.setattr(group, "sum", late)
    before = np.zeros(LENGTH)
    rng = np.random.default_rng(comm.rank)
    for _ in range(4):
        gradient = rng.integers(-99, 100, LENGTH).astype(np.float32)
        reducer.gradient_buffer[:] = put(device, gradient)
        reducer.step(reducer.gradient_buffer)
        reducer.gradient_buffer[:] = 1e6  # as the next backward pass does
        before = check_mass(comm, reducer, gradient, before)


@pytest.mark.mpi
def test_a_host_stays_under_its_bound_and_near_k_on_drifting_gradients(
    comm: MPI.Intracomm, device: str
) -> None:
    length = 20_000
    reducer = two_levels(comm, device, 2, length=length, threshold_interval=32, boundary_interval=64)
    hosts = reducer.hosts
    assert hosts is not None
    rng = np.random.default_rng(comm.rank)
    scale = np.repeat(10.0 ** np.random.default_rng(1).uniform(-2, 0, 40), length // 40)
    words, deviation = [], []
    for step in range(40):
        gradient = (rng.standard_t(4, length) * scale * (1 + 0.2 * np.sin(step / 9))).astype(np.float32)
        report = reducer.step(put(device, gradient))
        words.append(np.mean(per_host(comm, report.bytes_between / 4, hosts)))
        deviation.append(abs(report.global_nnz - report.k) / report.k)
    assert np.mean(words) <= upper_bound(report.k, max(hosts) + 1)
    assert np.mean(deviation) <= 0.05


@pytest.mark.mpi
@pytest.mark.parametrize("wire", ["bfloat16", "int4"])
@pytest.mark.parametrize(
    ("device", "gradient_type"),
    [
        ("cpu", "float32"),
        *(pytest.param("cuda", kind, marks=on_gpus) for kind in ("float32", "bfloat16", "float16")),
    ],
)
def test_narrow_gradients_and_wires_that_round_lose_nothing_in_shards(
    comm: MPI.Intracomm, device: str, gradient_type: str, wire: str
) -> None:
    reducer = two_levels(comm, device, 2, wire=wire, gradient_type=gradient_type)
    rng = np.random.default_rng(comm.rank)
    before = np.zeros(LENGTH)
    rounded = 0.0
    for _ in range(6):
        drawn = narrowed(rng.standard_t(3, LENGTH).astype(np.float32), gradient_type)
        report = reducer.step(put(device, drawn))
        assert report.wire == wire
        rounded = max(rounded, *comm.allgather(report.rounded))
        before = check_mass(comm, reducer, widened(drawn, gradient_type), before)
    several = reducer.hosts is not None and max(reducer.hosts) > 0
    assert (0 < rounded <= 0.15) if several else rounded < 0.15


@pytest.mark.mpi
def test_a_dense_step_takes_in_what_the_shards_hold(comm: MPI.Intracomm, device: str) -> None:
    rng = np.random.default_rng(comm.rank)
    gradients = [rng.integers(-99, 100, LENGTH).astype(np.float32) for _ in range(2)]
    sparse = two_levels(comm, device, 2)
    sparse.step(put(device, gradients[0]))
    left = np.sum(comm.allgather(sparse.gathered_residual()), axis=0)
    assert comm.size == 1 or left.any()
    dense = two_levels(comm, device, 2, dense_warmup_steps=5)
    dense.load_state_dict(sparse.state_dict())
    report = dense.step(put(device, gradients[1]))
    assert report.method == "dense" and report.levels == "hosts"
    assert np.array_equal(get(dense.update), comm.allreduce(gradients[1]) + left)
    assert not dense.gathered_residual().any()


@pytest.mark.mpi
@pytest.mark.parametrize("ranks_per_host", [2, 3])
def test_displacements_of_shards_stay_in_the_residual_however_a_step_ends(
    comm: MPI.Intracomm, device: str, ranks_per_host: int
) -> None:
    """In steps that are dense, sparse, measured, flagged and not finite."""
    reducer = two_levels(comm, device, ranks_per_host, nonfinite="skip", dense_warmup_steps=1)
    group, last = reducer.group, comm.size - 1
    assert group is not None
    reference = put(device, np.zeros(LENGTH, np.float32))
    moved = reducer.displacement([LENGTH], "float32", reference, 0.5)
    rng = np.random.default_rng(group.layout.hosts[comm.rank])  # equal in a host
    total = np.zeros(LENGTH)
    for what in ("dense", "sparse", "measured", "flagged", "nan", "sparse", "sparse"):
        gradient = rng.integers(-99, 100, LENGTH).astype(np.float32)
        if group.shard is not None:
            moved.vector[:] = reducer._placement.own_part(put(device, gradient * group.host.size))  # type: ignore[attr-defined]
        total += comm.allreduce(gradient.astype(np.float64))
        if what == "nan":
            total[7] -= comm.bcast(gradient[7] * group.host.size)  # of shard 0, there as in the vector
            if comm.rank == 0:
                moved.vector[7] = np.nan  # type: ignore[attr-defined]
        moved.flagged = what == "flagged" and comm.rank == last
        report = reducer.step(moved, measure=what == "measured")
        assert report.skipped == (what in ("flagged", "nan"))
        assert not moved.vector.any()  # type: ignore[attr-defined]
        reducer.subtract_update(reference)
        left = comm.allreduce(reducer.gathered_residual().astype(np.float64))
        assert np.array_equal(total, left - get(reference)), what
        assert left.any() == (what != "dense")


@pytest.mark.mpi
@pytest.mark.parametrize("ranks_per_host", [2, 3])
def test_ranks_of_a_host_take_their_mean_without_a_message(
    comm: MPI.Intracomm, device: str, ranks_per_host: int
) -> None:
    reducer = two_levels(comm, device, ranks_per_host)
    hosts, buffer = np.array(reducer.hosts), reducer.gradient_buffer
    assert buffer is not None
    mine = hosts == hosts[comm.rank]
    for step in range(3):
        gradient = np.random.default_rng((comm.rank, step)).standard_normal(LENGTH).astype(np.float32)
        buffer[:] = put(device, gradient)
        rows = np.array(comm.allgather(gradient))[mine]
        flag = step == 1 and comm.rank == 1
        tokens = reducer.mean_in_host(flag, 5 + comm.rank)
        if step == 1 and mine[min(1, comm.size - 1)] and comm.size > 1:
            assert tokens is None
            continue
        assert tokens is not None and [*tokens] == [*(5 + np.flatnonzero(mine))]
        total = np.zeros(LENGTH, np.float32)
        for theirs in rows:  # in rank order
            total += theirs
        assert np.array_equal(get(buffer), total / np.float32(mine.sum()))
    assert comm.allreduce(reducer.take_traffic().bytes) == 0  # gradients and shards are read where they lie
    flat = GradientAllreduce(comm, LENGTH, device=device, levels="flat")
    with pytest.raises(RuntimeError, match="steps are flat"):
        flat.mean_in_host()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("between", ["nothing", "a mean"])
def test_what_a_slow_rank_still_copies_is_not_written_over(
    comm: MPI.Intracomm, between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reducer = two_levels(comm, "cpu", 2, method="union")
    group, whole, insert = reducer.group, np.zeros(LENGTH, np.float32), Layout.insert
    assert group is not None and reducer.gradient_buffer is not None
    reducer.gradient_buffer[:] = -1

    def late(layout: Layout, *parts: Any) -> None:
        time.sleep(0.02 * (comm.rank % 2))
        insert(layout, *parts)

    monkeypatch.setattr(Layout, "insert", late)
    for step in range(4):
        group.share_shards(np.full(group.shard_length, step, np.float32), whole)
        assert (whole == step).all()
        if between == "a mean":
            reducer.mean_in_host()
            assert (reducer.gradient_buffer == -1).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("ranks_per_host", [2, 3])
def test_entries_of_a_host_travel_as_messages_only_without_memory_for_windows(
    comm: MPI.Intracomm, cuda: str, ranks_per_host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collectives import symmetric_memory

    gathers: list[int] = []
    opened: list[int] = []

    def gather(gathered: Any, counts: Any, transport: Any, own: Any) -> None:
        gathers.append(transport.size)
        allgatherv(gathered, counts, transport, own)

    def window(transport: Any, device: Any, nbytes: int) -> Any:
        opened.append(nbytes)
        return one_window(transport, device, nbytes)

    def none_left(*arguments: Any) -> None:
        raise NoPeerMemoryError("no peer memory: rank 0: out of memory")

    one_window = symmetric_memory.SymmetricMemory
    monkeypatch.setattr("oktopk.host_group.allgatherv", gather)
    reading, sending = (two_levels(comm, cuda, ranks_per_host) for _ in range(2))
    assert reading.hosts is not None
    alone = reading.hosts.count(reading.hosts[comm.rank]) == 1
    rng = np.random.default_rng(comm.rank)
    sent = []
    for touched in (0, 7, LENGTH, 50, -1, LENGTH, LENGTH):  # -1: one shard's entries are not finite
        gradient = np.zeros(LENGTH, np.float32)
        gradient[:touched] = rng.integers(-99, 100, LENGTH)[:touched]
        if touched < 0:
            gradient[BLOCK + 1] = np.nan if comm.rank == 0 else 1.0
        for reducer, make in ((reading, window), (sending, none_left)):
            gathers.clear()
            with monkeypatch.context() as patch, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of `none_left`
                patch.setattr("collectives.symmetric_memory.SymmetricMemory", make)
                if touched < 0:
                    with pytest.raises(NonFiniteGradientError, match=r"rank\(s\) 0"):
                        reducer.step(put(cuda, gradient))
                    assert not gathers
                    continue
                report = reducer.step(put(cuda, gradient))
            sent.append((comm.allreduce(report.bytes), comm.allreduce(report.bytes_between)))
            assert bool(gathers) == (alone or (reducer is sending and report.global_nnz > 0))
        if touched < 0:
            continue
        assert sent[-1] == sent[-2]
        assert np.array_equal(get(reading.update), get(sending.update))
        assert len(set(comm.allgather(get(reading.update).tobytes()))) == 1
    assert np.array_equal(reading.gathered_residual(), sending.gathered_residual())
    assert get(reading.update).any() and len(opened) == (not alone)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("operation", ["reserve", "write"])
def test_a_rank_that_is_late_while_windows_are_opened_is_waited_for(
    comm: MPI.Intracomm, cuda: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, sending = (two_levels(comm, cuda, comm.size) for _ in range(2))
    assert late.group is not None and sending.group is not None
    sending.group._windows = None
    before = getattr(late.group._windows, operation)

    def sleep(*arguments: Any) -> Any:
        time.sleep(0.3 * (comm.rank == comm.size - 1))
        return before(*arguments)

    monkeypatch.setattr(late.group._windows, operation, sleep)
    rng = np.random.default_rng(comm.rank)
    for _ in range(2):
        gradient = rng.integers(-99, 100, LENGTH).astype(np.float32)
        for reducer in (late, sending):
            reducer.step(put(cuda, gradient))
        assert get(late.update).any() and np.array_equal(get(late.update), get(sending.update))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("operation", ["reserve", "write"])
def test_a_rank_missing_while_windows_are_opened_is_named_by_all(
    comm: MPI.Intracomm,
    cuda: str,
    operation: str,
    after_the_others: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("collectives.limit.ANSWER", 10.0)
    reducer = two_levels(comm, cuda, comm.size, timeout=0.5)
    assert reducer.group is not None
    before = getattr(reducer.group._windows, operation)
    missing = comm.size - 1

    def wait(*arguments: Any) -> Any:
        after_the_others(missing)
        return before(*arguments)

    monkeypatch.setattr(reducer.group._windows, operation, wait)
    gradient = np.random.default_rng(comm.rank).integers(-99, 100, LENGTH).astype(np.float32)
    with pytest.raises(MissingRanksError, match=rf"step 0: rank\(s\) {missing} did not come within 0.5 s"):
        reducer.step(put(cuda, gradient))
    with pytest.raises(MissingRanksError):  # nothing goes on after that
        reducer.step(put(cuda, gradient))
    reducer.close()
    comm.Barrier()


@pytest.mark.mpi
def test_measures_do_not_change_a_step_and_agree_with_the_definition(
    comm: MPI.Intracomm, device: str
) -> None:
    reducer = two_levels(comm, device, 2, threshold_interval=1)
    hosts = reducer.hosts
    assert hosts is not None
    order = shard_by_shard(Layout(tuple(hosts), LENGTH))
    rng = np.random.default_rng(comm.rank)
    before = np.zeros((max(hosts) + 1, LENGTH))
    for _ in range(3):
        gradient = rng.integers(-999, 1000, LENGTH).astype(np.float32)
        report = reducer.step(put(device, gradient), measure=True)
        gradients = of_hosts(comm, gradient, hosts)
        expected = reference.ok_topk(gradients[:, order], before[:, order], report.k)
        assert np.array_equal(get(reducer.update)[order], expected.update)
        total = (gradients + before).sum(axis=0)
        best = reference.masked(total, reference.top_k(total, report.k))
        missed = np.linalg.norm(best - get(reducer.update)) / comm.size
        assert report.measures is not None
        assert report.measures.missed == pytest.approx(missed, rel=1e-3)
        assert report.measures.gradient_norm == pytest.approx(
            np.linalg.norm(gradients.sum(axis=0)) / comm.size
        )
        union = len(np.unique(np.concatenate(expected.selected)))
        assert report.measures.fill_in == pytest.approx(union / report.k)
        before = of_hosts(comm, reducer.gathered_residual(), hosts)
        left = np.linalg.norm(before.sum(axis=0)) / comm.size
        assert report.measures.residual_norm == pytest.approx(left, rel=1e-3)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize(("wire", "nonfinite"), [("plain", "skip"), ("float32", "raise"), ("int4", "raise")])
def test_a_union_between_hosts_clears_all_of_them_and_loses_nothing(
    comm: MPI.Intracomm, device: str, wire: str, nonfinite: str
) -> None:
    reducer = two_levels(comm, device, 2, method="union", wire=wire, nonfinite=nonfinite, density=0.05)
    hosts = max(reducer.hosts) + 1
    rng, left = np.random.default_rng((comm.rank, 7)), np.zeros(LENGTH)
    for step in range(7):
        gradient = rng.integers(-99, 100, LENGTH).astype(np.float32)
        if step == 4:
            gradient[9] = np.nan if comm.rank == comm.size - 1 else 1
            if nonfinite == "skip":
                assert reducer.step(put(device, gradient)).skipped
            else:
                with pytest.raises(NonFiniteGradientError) as caught:
                    reducer.step(put(device, gradient))
                assert caught.value.ranks == [comm.size - 1]
            after = comm.allreduce(reducer.gathered_residual().astype(np.float64))
            assert np.allclose(after, left, rtol=0, atol=1e-4 if wire == "int4" else 0)
            continue
        report = reducer.step(put(device, gradient))
        # an ulp of sums of some hundreds, which residuals of opposite signs take to zero, is up to 6e-5
        left = check_mass(comm, reducer, gradient, left, near=2e-4)
        applied = get(reducer.update) != 0
        assert 0 < np.count_nonzero(applied) <= report.global_nnz
        assert report.global_nnz <= hosts * selection_cap(SharedSupport.local_k(report.k, hosts))
        assert wire == "int4" or not reducer.gathered_residual()[applied].any()
        shard_lists = 12 * comm.size * reducer.group.layout.shards  # 3 words a list
        bound = (
            hosts
            * 4
            * union_words([selection_cap(SharedSupport.local_k(report.k, hosts))] * hosts, LENGTH)[1]
        )
        assert 0 < comm.allreduce(report.bytes_between) <= bound + shard_lists


@pytest.mark.mpi
@pytest.mark.parametrize(("saved", "loaded"), [("flat", 2), (2, "flat"), (2, 1), (2, 3), (3, 2)], ids=str)
def test_the_sum_of_residuals_is_kept_on_other_hosts(comm: MPI.Intracomm, saved: Any, loaded: Any) -> None:
    def made(kind: Any) -> GradientAllreduce:
        if kind != "flat":
            return two_levels(comm, "cpu", kind)
        settings = {
            "threshold_interval": 3,
            "boundary_interval": 2,
            "average": False,
        }
        return GradientAllreduce(comm, LENGTH, density=0.02, levels="flat", **settings)  # type: ignore[arg-type]

    first, second = made(saved), made(loaded)
    rng = np.random.default_rng(comm.rank)
    for _ in range(3):
        first.step((8 * rng.integers(-99, 100, LENGTH)).astype(np.float32))
    states = comm.allgather(first.state_dict())
    if states[comm.rank]["hosts"] != second.hosts:
        with pytest.raises(ValueError, match="oktopk.elastic.redistribute"):
            second.load_state_dict(states[comm.rank])
    state = redistribute(states.__getitem__, comm.size, comm.rank, comm.size, second.hosts)
    second.load_state_dict(state)
    total = np.sum(comm.allgather(first.gathered_residual()), axis=0)
    assert np.array_equal(np.sum(comm.allgather(second.gathered_residual()), axis=0), total)
    gradient = rng.integers(-99, 100, LENGTH).astype(np.float32)
    second.step(gradient)


@pytest.mark.mpi(min_size=4)
def test_auto_takes_two_levels_where_several_hosts_have_several_ranks(comm: MPI.Intracomm) -> None:
    for method, per, taken, reason in (
        ("oktopk", 2, "hosts" if comm.size % 2 == 0 else "flat", ""),
        ("union", 2, "hosts" if comm.size % 2 == 0 else "flat", ""),
        ("oktopk", 1, "flat", "several hosts"),
        ("oktopk", 0, "flat", "several hosts"),
        ("gtopk", 2, "flat", "gtopk has flat steps only" if comm.size % 2 == 0 else "several hosts"),
    ):
        reducer = GradientAllreduce(comm, 1000, method, ranks_per_host=per)
        report = reducer.step(np.ones(1000, np.float32))
        assert (reducer.levels, report.levels) == (taken, taken)
        assert report.shards == (2 if taken == "hosts" else 1)
        assert reason in reducer.flat_reason
        # what went to other hosts is counted in flat steps, too
        alone = not per
        assert (
            comm.allreduce(report.bytes_between) == 0 if alone else comm.allreduce(report.bytes_between) > 0
        )
        reducer.close()


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("method", ["oktopk", "union"])
def test_what_one_shard_cannot_decode_is_taken_back_in_all_shards(
    comm: MPI.Intracomm, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reducer = two_levels(comm, "cpu", 2, method=method, wire="float32")
    rng = np.random.default_rng(comm.rank)
    gradients = [rng.integers(-99, 100, LENGTH).astype(np.float32) for _ in range(3)]
    reducer.step(gradients[0])
    before = reducer.gathered_residual()
    group = reducer.group
    assert group is not None
    codec = reducer._methods[method].codec
    kernels, ended, buffer = reducer._methods[method].kernels, group.end_reading, reducer.gradient_buffer
    assert buffer is not None
    undo = kernels.undo_accumulate

    def late(*given: Any) -> None:
        time.sleep(0.05)
        undo(*given)

    if group.shard == 0:
        checked = codec.check_gathered
        damage = f"float32 entries are damaged that came from rank {comm.rank}"
        monkeypatch.setattr(codec, "check_gathered", lambda: (_ for _ in ()).throw(ValueError(damage)))
    else:  # takes back late what it read of the others' gradients
        monkeypatch.setattr(kernels, "undo_accumulate", late)

    def overwrite() -> None:
        ended()
        buffer[:] = 1e6  # as soon as it may change

    monkeypatch.setattr(group, "end_reading", overwrite)
    buffer[:] = gradients[1]
    with pytest.raises(ValueError, match="damaged that came from rank"):
        reducer.step(buffer)
    if group.shard == 0:
        monkeypatch.setattr(codec, "check_gathered", checked)
    assert np.allclose(reducer.gathered_residual(), before, atol=1e-4)
    assert not get(reducer.update).any()
    assert not reducer.step(gradients[2]).skipped


@pytest.mark.mpi(min_size=4)
def test_states_of_shards_that_learned_something_else_are_refused(comm: MPI.Intracomm) -> None:
    if comm.size % 2:
        pytest.skip("a host of one rank leaves one shard")
    rng = np.random.default_rng(comm.rank)
    states = []
    for scale in (1, 30):
        reducer = two_levels(comm, "cpu", 2)
        for _ in range(3):
            reducer.step((scale * rng.standard_normal(LENGTH)).astype(np.float32))
        states.append(reducer.state_dict())
        if scale == 1:
            reducer.close()
    group = reducer.group
    assert group is not None
    mixed = states[int(group.shard == 0)]
    with pytest.raises(ValueError, match="among the ranks of host 0 ranks disagree on oktopk"):
        reducer.load_state_dict(mixed)
    reducer.load_state_dict(states[1])


@pytest.mark.mpi(min_size=2)
def test_a_host_that_cannot_share_memory_is_a_sentence_or_flat(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_file(name: str) -> int:
        raise OSError(24, "Too many open files")

    if comm.rank == 0:
        monkeypatch.setattr("os.memfd_create", no_file)
    with pytest.raises(ValueError, match="no memory that the ranks of a host share: .*Too many open files"):
        two_levels(comm, "cpu", 2)
    if comm.size % 2 == 0 and comm.size > 2:
        with pytest.warns(UserWarning, match="steps are flat") if comm.rank == 0 else nullcontext():
            reducer = GradientAllreduce(comm, 100, ranks_per_host=2)
        assert reducer.levels == "flat" and "Too many open files" in reducer.flat_reason
        reducer.close()


@pytest.mark.mpi(min_size=4)
def test_buckets_are_reduced_one_by_one_where_only_the_first_is_flat(
    comm: MPI.Intracomm, cuda: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(cuda, comm)
    groups: list[Any] = []

    def without_memory_first(*arguments: Any) -> HostGroup:
        groups.append(arguments)
        if len(groups) == 1:
            raise ValueError("no memory for the gradients of a host")
        return HostGroup(*arguments)

    monkeypatch.setattr("oktopk.construction.HostGroup", without_memory_first)
    before = threading.active_count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the first
        buckets = BucketedAllreduce(
            comm, (3000, 1000), "union", device=cuda, density=0.02, ranks_per_host=2, peer_memory=True
        )
    assert [reducer.levels for reducer in buckets.reducers] == ["flat", "hosts"]
    buckets.step([put(cuda, np.ones(length, np.float32)) for length in buckets.lengths])
    assert threading.active_count() == before + 1
    buckets.close()
