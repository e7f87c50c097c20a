"""Steps among peers, deferred or waited for; where there are GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.cuda.layouts import BAD_REGIONS, BAD_SELECTION, BAD_THRESHOLD, PROCEED
from oktopk import GradientAllreduce
from tests.devices import asynchronous, get, gpus, narrowed, on_gpus, on_real_gpus, put
from tests.inputs import GRADIENTS, kinds_with, shapes_of
from tests.oracle import top_k
from tests.peers import among_peers, may_defer, noted_outcomes, on_both, step_alike

pytestmark = [pytest.mark.mpi, on_gpus, pytest.mark.host_cuda(ranks=3)]
LENGTH, DENSITY = 40_009, 0.05  # by few entries thresholds do not settle


def cubes(comm: MPI.Intracomm, length: int) -> Callable[[], NDArray[np.float32]]:
    """Whole numbers with a heavy tail, so that sums are exact and thresholds settle."""
    rng = np.random.default_rng(comm.rank)
    return lambda: np.rint(1024 * rng.standard_normal(length) ** 3).astype(np.float32)


def deferring(comm: MPI.Intracomm, length: int = LENGTH, **settings: Any) -> GradientAllreduce:
    """Among peers, whose steps are deferred where they may be."""
    return among_peers(comm, length, **{"density": DENSITY, "deferred": True, "average": False} | settings)


@pytest.fixture
def outcomes(cuda: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool]]:
    """As `noted_outcomes`."""
    return noted_outcomes(monkeypatch)


@pytest.mark.mpi(min_size=4)  # on fewer no region can get more than three times its share
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.host_cuda(ranks=4)
def test_regions_that_got_too_much_are_renewed_at_once(
    cuda: str, outcomes: list[tuple[Any, bool]], comm: MPI.Intracomm, deferred: bool, resumed: bool
) -> None:
    """Large entries move from one end to the other, where one region holds nearly everything."""
    settings = {"density": 0.05, "threshold_interval": 1000, "boundary_interval": 1000, "deferred": deferred}
    length = 40_000
    reducer = deferring(comm, length, **settings)
    rng = np.random.default_rng(comm.rank)
    for step in range(24):
        gradient = rng.integers(-99, 100, length).astype(np.float32)
        gradient[slice(-length // 8, None) if step >= 12 else slice(length // 8)] *= 100
        if step == 12:
            may_defer(reducer)
            outcomes.clear()
        report = reducer.step(put(cuda, gradient))
        assert step != 12 or report.complete != deferred
        if resumed and step == 12:
            state = reducer.state_dict()
            reducer.close()
            reducer = deferring(comm, length, **settings)
            reducer.load_state_dict(state)
    reducer.complete()
    stops = [outcome.stop for outcome, _ in outcomes]
    assert stops.index(BAD_REGIONS) == 0 and stops.count(BAD_REGIONS) == 1
    assert stops.count(BAD_SELECTION) < 4


def until_deferred(cuda: str, reducer: GradientAllreduce, draw: Callable[[], NDArray[Any]]) -> None:
    for _ in range(60):
        if not reducer.step(put(cuda, draw())).complete:
            return
    raise AssertionError("60 steps, and the host looked at each")


@pytest.mark.parametrize(
    "gradient_type",
    [
        "float32",
        pytest.param(
            "bfloat16", marks=pytest.mark.long("`make test` has it in pieces, test_gradient_tensors.py")
        ),
    ],
)
def test_deferred_steps_give_the_bits_of_those_that_are_waited_for(
    cuda: str, comm: MPI.Intracomm, gradient_type: str
) -> None:
    """From one step that stopped to the next, if any does."""
    settings: dict[str, Any] = {"density": 0.1, "threshold_interval": 8, "gradient_type": gradient_type}
    deferred, waited = (deferring(comm, deferred=late, **settings) for late in (True, False))
    rng = np.random.default_rng(comm.rank)
    late, stopped = 0, 0
    for _ in range(27):
        gradient = (rng.standard_normal(LENGTH) ** 3).astype(np.float32)
        on_device = put(cuda, narrowed(gradient, gradient_type))
        first, second = deferred.step(on_device), waited.step(on_device)
        late += not first.complete
        deferred.complete()
        if not first.global_nnz:
            stopped += 1
            # on the rank that selected too much, or for all
            assert comm.allreduce(second.local_exact or second.global_exact)
            waited.load_state_dict(deferred.state_dict())
            continue
        assert np.array_equal(get(deferred.update), get(waited.update))
        assert np.array_equal(get(deferred.residual), get(waited.residual))
        names = "exact local_nnz global_nnz words messages control_words global_threshold"
        for name in names.split():
            assert getattr(first, name) == getattr(second, name), name
    assert late > 8 > 3 > stopped


@pytest.mark.parametrize(("kind", "third"), kinds_with({"0": 0, "1": 1, "2": 2}))
def test_deferred_steps_lose_nothing_and_agree(cuda: str, comm: MPI.Intracomm, kind: str, third: str) -> None:
    """Whether they stop or not; what stops applies nothing. All are deferred that may be. A third of the shapes at a time."""
    for length, density in shapes_of(kind, int(third), 3):
        reducer = deferring(comm, length, density=density, threshold_interval=6, boundary_interval=4)
        rng = np.random.default_rng((comm.rank, length))
        before = np.zeros(length, np.float64)
        reports, updates, late = [], [], 0
        for _ in range(10):
            may_defer(reducer)
            gradient = GRADIENTS[kind](rng, length, comm.rank, comm.size)
            reports.append(reducer.step(put(cuda, gradient)))
            late += not reports[-1].complete
            update, after = get(reducer.update), get(reducer.residual)
            assert len(set(comm.allgather(update.tobytes()))) == 1
            put_in = comm.allreduce(gradient + before)
            assert np.array_equal(put_in, comm.allreduce(after.astype(np.float64)) + update), (
                length,
                density,
            )
            before = after.astype(np.float64)
            updates.append(np.count_nonzero(update))
        reducer.complete()
        assert [report.global_nnz for report in reports] == updates
        # all but the first one, and those behind a stop that renew regions
        assert late >= 5 or reports[0].method == "dense"
        reducer.close()


@pytest.mark.parametrize("deferred", [False, True])
def test_a_selection_over_the_cap_is_cut_to_the_top_k(
    cuda: str, outcomes: list[tuple[Any, bool]], comm: MPI.Intracomm, deferred: bool
) -> None:
    """What a rank selects by an old threshold lies between 5k/4 and 2k; it sends its exact top k."""
    last = comm.rank == comm.size - 1
    reducer = deferring(comm, deferred=deferred, threshold_interval=1000, boundary_interval=1000)
    draw = cubes(comm, LENGTH)
    for _ in range(9):
        reducer.step(put(cuda, draw()))
    may_defer(reducer)
    outcomes.clear()
    for _ in range(3):
        reducer.complete()
        accumulated = get(reducer.residual) + (gradient := draw())
        local = reducer._methods["oktopk"].selection  # type: ignore[attr-defined]
        k = reducer._method_at(0)[1]
        if last:
            largest = np.sort(np.abs(accumulated))[::-1]
            local.bits = int(largest[8 * k // 5].view(np.uint32))
        report = reducer.step(put(cuda, gradient))
        assert report.complete != deferred
        reducer.complete()
        assert report.local_exact or not last
        assert report.global_nnz
        if last:
            kept = np.count_nonzero(np.abs(accumulated) >= report.local_threshold)
            assert report.local_nnz == k
            assert np.count_nonzero(np.abs(accumulated) > report.local_threshold) < k <= kept
    assert [outcome.stop for outcome, _ in outcomes] == [PROCEED] * 3


def test_a_deferred_step_names_its_threshold_exactly_where_that_is_due(
    cuda: str, comm: MPI.Intracomm
) -> None:
    """After fewer than k/2 on one rank alone: there in the same launch, and nobody waits."""
    last = comm.rank == comm.size - 1
    reducer = deferring(comm, threshold_interval=1000, boundary_interval=1000)
    draw = cubes(comm, LENGTH)
    for _ in range(4):
        reducer.step(put(cuda, draw()))
    reducer.complete()
    local = reducer._methods["oktopk"].selection  # type: ignore[attr-defined]
    k = reducer._method_at(0)[1]
    for candidates, exact in ((3 * k // 2, True), (3 * k // 5, False), (3 * k // 2, True)):
        accumulated = get(reducer.residual) + (gradient := draw())
        lowest = int(np.sort(np.abs(accumulated))[::-1][candidates - 1].view(np.uint32))
        if last:
            local.needs_exact = True
            local.lower_threshold = lambda lowest=lowest: lowest
        may_defer(reducer)
        report = reducer.step(put(cuda, gradient))
        assert not report.complete
        reducer.complete()
        assert report.global_nnz
        if not last:
            continue
        assert report.local_exact == exact
        # too few to name it: still due
        assert local.needs_exact != exact
        reached = np.count_nonzero(np.abs(accumulated) >= report.local_threshold)
        assert report.local_nnz == (k if exact else reached)
        assert not exact or np.count_nonzero(np.abs(accumulated) > report.local_threshold) < k


def test_regions_are_renewed_by_the_last_selections_and_nobody_waits(cuda: str, comm: MPI.Intracomm) -> None:
    every = 4
    reducer = deferring(comm, threshold_interval=6, boundary_interval=every)
    draw = cubes(comm, LENGTH)
    weights = np.linspace(0.1, 3, LENGTH, dtype=np.float32)  # so that regions move
    renewed, proposed = 0, LENGTH * np.arange(1, comm.size) // comm.size
    for step in range(22):
        may_defer(reducer)
        method: Any = reducer._methods.get("oktopk")
        before = None if method is None else method.boundaries
        accumulated = get(reducer.residual) + (
            gradient := np.rint(draw() * weights[:: 1 if step % 9 < 5 else -1])
        )
        report = reducer.step(put(cuda, gradient))
        boundaries = reducer._methods["oktopk"].boundaries
        assert boundaries is not None
        if step % every == 0 or step in (1, 2):
            cuts = comm.allreduce(proposed) // comm.size
            assert boundaries.tolist() == [0, *cuts, LENGTH]
            renewed += not report.complete and boundaries is not before
        else:
            assert boundaries is before
        reducer.complete()
        if report.global_nnz:
            selected = top_k(accumulated, report.local_nnz)
            assert np.abs(accumulated[selected]).min() >= report.local_threshold
            proposed = selected[len(selected) * np.arange(1, comm.size) // comm.size]
    assert renewed > 3 or comm.size == 1


@pytest.mark.mpi(min_size=2)
def test_a_rank_without_a_gradient_keeps_nobody_from_deferring(
    cuda: str, outcomes: list[tuple[Any, bool]], comm: MPI.Intracomm
) -> None:
    """It selects all that is not zero, fewer than k/2; one whose threshold was too high makes the next steps waited for."""
    reducer = deferring(comm, threshold_interval=8)
    draw, late = cubes(comm, LENGTH), 0
    for _ in range(24):
        late += not reducer.step(put(cuda, draw() if comm.rank else np.zeros(LENGTH, np.float32))).complete
    assert late > 5
    may_defer(reducer)
    if comm.rank:
        accumulated = np.sort(np.abs(get(reducer.residual)))
        # a threshold a little below it selects fewer than k/2, too
        lowest = accumulated[-reducer._method_at(0)[1] // 16]
        reducer._methods["oktopk"].selection.bits = int(lowest.view(np.uint32))  # type: ignore[attr-defined]
        reducer._methods["oktopk"].selection.needs_exact = False  # type: ignore[attr-defined]
    reducer.step(put(cuda, np.zeros(LENGTH, np.float32)))
    reducer.complete()
    assert [outcome.few for outcome, _ in outcomes[-2:]] == [False, True]
    assert reducer._trust == 0


def few_magnitudes(comm: MPI.Intracomm, length: int, k: int) -> Callable[[], NDArray[np.float32]]:
    """Alike on all ranks: 0.7 k entries around 1044, then 0.5 k of 1024, then ones; a ladder between has no rung near k."""
    rng = np.random.default_rng(5)
    places = rng.permutation(length)
    magnitudes = np.ones(length, np.float32)
    magnitudes[places[: 6 * k // 5]] = 1024.0
    magnitudes[places[: 7 * k // 10]] = 1040.0 + rng.integers(0, 8, 7 * k // 10)
    return lambda: magnitudes * np.where(rng.random(length) < 0.5, -1, 1).astype(np.float32)


def expect_sums_of(reducer: GradientAllreduce, magnitude: float) -> None:
    """The next global threshold to be tried."""
    threshold = reducer._methods["oktopk"].threshold  # type: ignore[attr-defined]
    threshold.bits, threshold.trend = int(np.float32(magnitude).view(np.uint32)), 0


def select_from(reducer: GradientAllreduce, magnitude: float) -> None:
    """This rank's next selection is what the next gradient holds from this magnitude on."""
    local = reducer._methods["oktopk"].selection  # type: ignore[attr-defined]
    local.bits, local.needs_exact = int(np.float32(magnitude).view(np.uint32)), False
    assert reducer.residual is not None
    reducer.residual.fill(0)


@pytest.mark.parametrize(("factor", "goes_on"), [(0.98, True), (1.02, True), (0.5, True), (2.0, False)])
def test_a_global_threshold_that_missed_is_moved_unless_by_far(
    cuda: str, outcomes: list[tuple[Any, bool]], comm: MPI.Intracomm, factor: float, goes_on: bool
) -> None:
    """What is kept is between k/2 and the cap, or nothing is."""
    if comm.size == 1:
        pytest.skip("one rank's sums are its selection: none is left to choose from")
    reducer = deferring(comm, threshold_interval=1000, boundary_interval=1000)
    draw = few_magnitudes(comm, LENGTH, reducer._method_at(0)[1])
    for _ in range(4):
        reducer.step(put(cuda, draw()))
    reducer.complete()
    select_from(reducer, 1000.0)
    expect_sums_of(reducer, 1030.0 * comm.size * factor)
    may_defer(reducer)
    outcomes.clear()
    report = reducer.step(put(cuda, draw()))
    assert not report.complete
    reducer.complete()
    assert (outcomes[0][0].stop == PROCEED) == goes_on == bool(report.global_nnz)
    assert not goes_on or report.k / 2 <= report.global_nnz <= 5 * report.k / 4


@pytest.mark.parametrize("factor", [0.98, 1.02, 0.5, 2.0])
def test_kernels_compute_an_exact_threshold_where_the_host_waits(
    cuda: str, monkeypatch: pytest.MonkeyPatch, comm: MPI.Intracomm, factor: float
) -> None:
    on_cpu, among = on_both(
        comm, LENGTH, density=DENSITY, average=False, threshold_interval=1000, boundary_interval=1000
    )
    draw = few_magnitudes(comm, LENGTH, among._method_at(0)[1])
    for _ in range(4):
        step_alike(comm, on_cpu, among, draw())
    outcomes = noted_outcomes(monkeypatch)
    for reducer in (among, on_cpu):
        select_from(reducer, 1000.0)
        expect_sums_of(reducer, 1030.0 * comm.size * factor)
    assert step_alike(comm, on_cpu, among, draw()).global_exact
    # where the ladder lies above all sums that there are, the kernels give up again
    named = [outcome.stop for outcome, selected in outcomes if not selected]
    assert named == [BAD_THRESHOLD if factor == 2.0 else PROCEED]
    # only where no rung would have served a deferred step
    assert (among._trust == 0) == (factor == 2.0)


@pytest.mark.parametrize("factor", [0.01, 0.3])
def test_a_rank_whose_gradient_dwindles_selects_k_again_at_once(
    cuda: str, comm: MPI.Intracomm, factor: float
) -> None:
    last = comm.rank == comm.size - 1
    reducer = deferring(comm, threshold_interval=1000, boundary_interval=1000)
    draw = cubes(comm, LENGTH)
    until_deferred(cuda, reducer, draw)
    reports = []
    for step in range(6):
        reducer.complete()
        if last and step == 1:
            residual = reducer.residual
            assert residual is not None
            residual *= np.float32(factor)
        gradient = draw() * np.float32(factor if last and step else 1)
        reports.append(reducer.step(put(cuda, gradient)))
    reducer.complete()
    dwindled = reports[1:]
    assert not last or dwindled[0].local_nnz < dwindled[0].k / 2
    assert all(report.local_nnz >= report.k / 2 for report in dwindled[1:])
    assert not last or dwindled[1].local_exact


@pytest.mark.parametrize("resumed", [False, True])
def test_after_a_step_that_stopped_the_host_waits_for_eight(
    cuda: str, comm: MPI.Intracomm, resumed: bool
) -> None:
    """Where one rank selects far more than the cap; a state knows of it."""
    last = comm.rank == comm.size - 1
    reducer = deferring(comm, threshold_interval=16)
    draw = cubes(comm, LENGTH)
    for _ in range(4):
        reducer.step(put(cuda, draw()))
    reports, left = [], []
    for step in range(10):
        if step < 2:
            may_defer(reducer)
        reports.append(reducer.step(put(cuda, draw() * np.float32(4096 if step == 1 and last else 1))))
        assert reports[-1].complete == (step > 1), step
        left.append(get(reducer.residual))
        if step == 1 and resumed:
            state = reducer.state_dict()
            reducer.close()
            reducer = deferring(comm, threshold_interval=16)
            reducer.load_state_dict(state)
    reducer.complete()
    until_deferred(cuda, reducer, draw)
    known = 3 if comm.size == 1 else 10  # a rank alone may select too little, and stop again
    assert [report.global_nnz > 0 for report in reports[:known]] == [step != 1 for step in range(known)]
    assert not any(report.skipped for report in reports)
    assert not last or np.abs(left[1]).max() > 50 * np.abs(left[0]).max()  # it is all there


def test_ranks_that_stopped_go_on_together(cuda: str, comm: MPI.Intracomm) -> None:
    """However far their hosts and GPUs are apart: nobody waits for the device in between."""
    reducer = deferring(comm, threshold_interval=1000, boundary_interval=1000)
    draw = cubes(comm, LENGTH)
    for _ in range(4):
        reducer.step(put(cuda, draw()))
    gradients = [put(cuda, draw()) for _ in range(4)]
    stopped = 0
    for number in range(12):
        late, loud = number % comm.size == comm.rank, (number + 1) % comm.size == comm.rank
        gradient = gradients[number % 4] * np.float32(2.0**12 if loud else 1)
        if late and asynchronous():
            import torch

            torch.cuda._sleep(200_000)
        may_defer(reducer)
        report = reducer.step(gradient)
        reducer.step(gradients[(number + 1) % 4])
        stopped += not report.global_nnz
    updates = comm.allgather(get(reducer.update).tobytes())
    assert len(set(updates)) == 1
    assert stopped > 3 or comm.size == 1


def test_a_reloaded_reducer_continues_deferred_steps_bit_for_bit(cuda: str, comm: MPI.Intracomm) -> None:
    settings = {"threshold_interval": 8, "boundary_interval": 8}
    undisturbed, resumed = (deferring(comm, **settings) for _ in range(2))
    draw = cubes(comm, LENGTH)
    for _ in range(18):
        undisturbed.step(put(cuda, draw()))
    until_deferred(cuda, resumed, draw)  # what is open is forgotten
    resumed.writable_update[:] = 7
    resumed.load_state_dict(undisturbed.state_dict())
    for step in range(8):
        if step == 4:
            undisturbed.writable_update[:] = 7
            undisturbed.forget_support()
        gradient = put(cuda, draw())
        undisturbed.step(gradient)
        resumed.step(gradient)
        assert np.array_equal(get(undisturbed.update), get(resumed.update))


@on_real_gpus
def test_the_host_does_not_wait_for_a_deferred_step(cuda: str, comm: MPI.Intracomm) -> None:
    import torch

    reducer = deferring(comm, threshold_interval=32)
    draw = cubes(comm, LENGTH)
    until_deferred(cuda, reducer, draw)
    gradient = put(cuda, draw())
    reducer.step(gradient)
    reducer.complete()
    reducer.backend.wait()
    comm.Barrier()
    torch.cuda._sleep(1_000_000_000)  # some half a second
    slept = torch.cuda.Event()
    slept.record()
    report = reducer.step(gradient)
    assert not slept.query()
    reducer.complete()
    assert slept.query()
    assert report.complete


@on_real_gpus
@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_a_network_trains_to_the_same_bits_whenever_the_host_looks(
    cuda: str, comm: MPI.Intracomm, clip_norm: float
) -> None:
    import torch
    from torch import nn

    from oktopk import DistributedOptimizer

    if comm.size == 1:
        pytest.skip("the ladder misses where this rank alone selected too little")
    if gpus() < comm.size:
        pytest.skip("needs a GPU a rank")
    import cupy

    torch.cuda.set_device(cupy.cuda.Device().id)
    ends = []
    for looks in (True, False):
        torch.manual_seed(3)
        network = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 10)).to(cuda)
        inner = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9, fused=True)
        settings = {"density": 0.05, "boundary_interval": 4, "deferred": True}
        optimizer = DistributedOptimizer(inner, comm, clip_norm=clip_norm, **settings)
        torch.manual_seed(comm.rank)
        reports, late = [], 0
        for _ in range(60):
            x = torch.randn(128, 64, device=cuda)
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), x[:, :10].argmax(1)).backward()
            optimizer.step()
            reports.append(optimizer.report)
            late += not reports[-1].complete
            if looks:
                optimizer.complete()
                torch.cuda.synchronize()
        optimizer.complete()
        assert late > 0
        assert np.median([report.global_nnz / report.k for report in reports]) > 0.9
        ends.append(torch.cat([p.detach().reshape(-1) for p in network.parameters()]))
        optimizer.close()
    assert torch.equal(*ends)
