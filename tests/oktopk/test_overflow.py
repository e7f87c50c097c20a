"""Finite gradients whose sum over the ranks is not: a non-finite step, found and agreed on by all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from oktopk import METHODS, GradientAllreduce, NonFiniteGradientError
from tests.devices import get, need_gpus, on_gpus, put, use
from tests.peers import may_defer

pytestmark = pytest.mark.host_cuda(ranks=3)

LENGTH, DENSITY = 1000, 0.02
HUGE = np.float32(3e38)  # twice this is Inf in float32
TOLERANCE = 1e-6 * float(HUGE)  # of what was added and taken back where HUGE was

# where the ranks' gradients are huge: in one region, at both ends, in more places than the 20 that a step keeps
PLACES = {
    "first": np.array([7]),
    "last": np.array([993]),
    "ends": np.array([0, 999]),
    "many": np.arange(0, LENGTH, 25),
}
# the 20 entries that a step keeps: those at both ends may overflow, and a regular step's count stays what it was
KEPT = np.array([0, 7, 993, 999, *range(101, 901, 50)])
# settings, and the first of two overflowing steps
STEPS: dict[str, tuple[dict[str, Any], int]] = {
    "exact": ({"threshold_interval": 1}, 1),
    "regular": ({"threshold_interval": 100}, 2),
    "first": ({}, 0),
    "warmup": ({"dense_warmup_steps": 4}, 2),
    "after warmup": ({"dense_warmup_steps": 1}, 2),
}
# how a reducer is made: of each method by messages, and of the others what they do by another path
BY_MESSAGES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {"peer_memory": False}) for name in METHODS},
    "two levels": ("oktopk", {"levels": "hosts", "ranks_per_host": 2}),
}
PEERS = {f"{name}, peers": (name, {"peer_memory": True}) for name in ("dense", "oktopk")}
WAYS = BY_MESSAGES | PEERS
ON = [("cpu", name) for name in BY_MESSAGES] + [("cuda", name) for name in WAYS]


def marks(device: str) -> list[pytest.MarkDecorator]:
    return [] if device == "cpu" else [on_gpus]


each_way = pytest.mark.parametrize(
    ("device", "way"), [pytest.param(device, way, marks=marks(device)) for device, way in ON]
)


class Run:
    """A reducer that gives sums, and what was put in and came out of it in all finite steps."""

    def __init__(self, comm: MPI.Intracomm, device: str, way: str, **settings: Any) -> None:
        method, path = WAYS[way]
        if device == "cuda":
            need_gpus(path.get("ranks_per_host", 1))
        use(device, comm)
        self.comm, self.device = comm, device
        # of a union's entries a rank chooses a P-th
        density = DENSITY * (comm.size if method == "union" else 1)
        chosen: dict[str, Any] = {"density": density, "average": False} | path | settings
        self.reducer = GradientAllreduce(comm, LENGTH, method, device=device, **chosen)
        self.rng = np.random.default_rng((comm.rank, 19))
        self.put_in, self.came_out = np.zeros(LENGTH), np.zeros(LENGTH)

    def gradient(self) -> NDArray[np.float32]:
        gradient = self.rng.integers(-9, 10, LENGTH).astype(np.float32)
        gradient[KEPT] = self.rng.integers(1000, 1010, len(KEPT))
        return gradient

    def state(self) -> NDArray[np.float64]:
        """The residual."""
        return self.reducer.gathered_residual().astype(np.float64)

    def update(self) -> NDArray[np.float32]:
        """Of all ranks, checked to be one."""
        update = get(self.reducer.update)
        assert len(set(self.comm.allgather(update.tobytes()))) == 1, "the ranks disagree on the update"
        return update

    def finite_step(self) -> None:
        gradient = self.gradient()
        report = self.reducer.step(put(self.device, gradient))
        assert not report.skipped
        update = self.update()
        assert np.isfinite(update).all() and update.any()
        self.put_in += gradient
        self.came_out += update

    def overflowing_step(self, gradient: NDArray[np.float32], places: NDArray[np.int64], step: int) -> None:
        """Skipped or raised, as the settings say; the state is as before."""
        before = self.state()
        if self.reducer.settings.nonfinite == "skip":
            report = self.reducer.step(put(self.device, gradient))
            assert report.skipped and report.global_nnz == 0
        else:
            with pytest.raises(
                NonFiniteGradientError, match=rf"^step {step}: the sum over the ranks is not finite$"
            ) as caught:
                self.reducer.step(put(self.device, gradient))
            assert caught.value.ranks == []
            assert caught.value.step == step
        assert not self.update().any()
        after = self.state()
        if self.reducer.settings.nonfinite == "skip":
            places = places[:0]  # what was skipped is exact everywhere
        assert np.allclose(after[places], before[places], rtol=0, atol=TOLERANCE)
        before[places] = after[places]
        assert np.array_equal(after, before)

    def check_mass(self, places: NDArray[np.int64]) -> None:
        """Nothing was lost of the finite steps, but in places where HUGE was added and taken back."""
        put_in = self.comm.allreduce(self.put_in)
        left = self.comm.allreduce(self.state())
        elsewhere = np.setdiff1d(np.arange(LENGTH), places)
        assert np.array_equal(put_in[elsewhere], (self.came_out + left)[elsewhere])
        assert np.isfinite(self.state()).all()


def overflow(run: Run, places: NDArray[np.int64], first: int, value: np.float32) -> None:
    """Steps around two whose sum overflows in these places; closes the reducer."""
    for _ in range(first):
        run.finite_step()
    for step in (first, first + 1):  # twice: the first one leaves nothing behind
        gradient = run.gradient()
        gradient[places] = value
        if run.comm.rank > 1:
            gradient[places] = 1  # two ranks suffice
        run.overflowing_step(gradient, places, step)
    for _ in range(2):
        run.finite_step()
    run.check_mass(places)
    run.reducer.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("device", "way", "kind", "nonfinite", "half"),
    [
        # what is done about it is one code for all: Ok-Topk's ways meet every kind of step, other ways two kinds each, with one
        # of the two outcomes and two of the four places; the other outcome and places are long
        pytest.param(
            *(
                device,
                way,
                kind,
                ("raise", "skip")[(number + at + other) % 2],
                (number // 2 + at + other) % 2,
            ),
            marks=[
                *marks(device),
                *[pytest.mark.long("`make test` has the other outcome, at the other places")] * other,
            ],
        )
        for device, way in ON
        for number in [[*WAYS].index(way)]
        for at, kind in enumerate(STEPS)
        for other in (0, 1)
        if way in ("oktopk", "two levels", "oktopk, peers") or (number + at) % len(STEPS) < 2
    ],
)
def test_a_sum_that_overflows_is_a_nonfinite_step_on_all_ranks(
    comm: MPI.Intracomm, device: str, way: str, nonfinite: str, kind: str, half: int
) -> None:
    settings, first = STEPS[kind]
    for number, places in enumerate([*PLACES.values()][half::2]):
        run = Run(comm, device, way, nonfinite=nonfinite, **settings)
        overflow(run, places, first, HUGE if number % 2 else -HUGE)


@pytest.mark.mpi(min_size=2)
@on_gpus
@pytest.mark.parametrize("interval", [2, 100], ids=["exact", "regular"])
def test_a_deferred_step_whose_sum_overflows_is_taken_back_by_the_kernels(
    comm: MPI.Intracomm, interval: int
) -> None:
    settings = {"deferred": True, "nonfinite": "skip", "threshold_interval": interval}
    for where in ("first", "last", "ends"):  # more would be given up for a selection above 2k
        places = PLACES[where]
        run = Run(comm, "cuda", "oktopk, peers", **settings)
        for _ in range(2):
            run.finite_step()
        before = run.state()
        may_defer(run.reducer)  # so few entries rarely fit eight times in a row
        gradient = run.gradient()
        gradient[places] = HUGE
        report = run.reducer.step(put("cuda", gradient))
        deferred = not report.complete
        run.reducer.complete()
        assert deferred and report.skipped and report.complete
        assert not run.update().any()
        after = run.state()
        assert np.array_equal(after, before)
        run.finite_step()
        run.check_mass(places)
        run.reducer.close()


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("device", "way", "settings"),
    [
        pytest.param(device, way, settings, marks=marks(device), id=f"{device}-{way}-{settings}")
        for device, way in ON
        for settings in ({}, {"wire": "int8"})
        if "wire" not in settings or way in ("oktopk", "union", "two levels")
    ],
)
def test_a_skipped_step_leaves_the_residual_bit_for_bit(
    comm: MPI.Intracomm, device: str, way: str, settings: dict[str, Any]
) -> None:
    """NaN on one rank, and elements beside which those of the residual round to zero on all of them."""
    run = Run(comm, device, way, nonfinite="skip", **settings)
    reducer = run.reducer

    def residual() -> bytes:
        return b"" if reducer.residual is None else get(reducer.residual).tobytes()

    for large in (0, 0, 1e12, 3e38, 0, 3e38):
        gradient = run.rng.standard_normal(LENGTH).astype(np.float32)
        if large:
            gradient[::3] = large
            gradient[[5, 9]] = np.nan if comm.rank == comm.size - 1 else gradient[[5, 9]]
        before = residual()
        assert reducer.step(put(device, gradient)).skipped == bool(large)
        assert (residual() == before) == bool(large) or not before  # a rank may have no shard


@pytest.mark.mpi
@each_way
def test_a_huge_sum_that_is_finite_is_applied(comm: MPI.Intracomm, device: str, way: str) -> None:
    run = Run(comm, device, way)
    for step in range(3):
        gradient = np.zeros(LENGTH, np.float32)
        gradient[PLACES["ends"]] = HUGE if comm.rank == step % comm.size else 0
        report = run.reducer.step(put(device, gradient))
        assert not report.skipped
        assert (run.update()[PLACES["ends"]] == HUGE).all()


@pytest.mark.mpi(min_size=4)
@each_way
@pytest.mark.also(ranks=8)
def test_inf_of_both_signs_never_meets_unseen(comm: MPI.Intracomm, device: str, way: str) -> None:
    run = Run(comm, device, way, nonfinite="skip")
    places = PLACES["first"]
    for pairs in (2, 1):  # ++--, where partial sums give NaN in some orders, and +-+-
        gradient = run.gradient()
        gradient[places] = HUGE if comm.rank // pairs % 2 else -HUGE
        report = run.reducer.step(put(device, gradient))
        assert len(set(comm.allgather(report.skipped))) == 1
        assert np.isfinite(run.update()).all()
        assert np.isfinite(run.state()).all()
    run.finite_step()
