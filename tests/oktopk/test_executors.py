"""Every way to run a step does what messages of MPI between hosts do: its bits, its words, its states, its errors."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.sparse import ENTRY
from oktopk import METHODS, GradientAllreduce, NonFiniteGradientError, StepReport
from oktopk.cpu.adamw import HostAdamW
from oktopk.cpu.kernels import BLOCK
from oktopk.cpu.kernels import accumulate_select as select
from oktopk.displacement import adamw_terms
from oktopk.thresholds import NOTHING
from tests.devices import get, on_gpus, put, use
from tests.fake_device import StagedBackend
from tests.inputs import GRADIENTS

pytestmark = [pytest.mark.mpi, pytest.mark.host_cuda(ranks=3)]

LENGTH, DENSITY = 5003, 0.02
STEPS, MEASURED, SWAPPED = 8, 1, 4
BROKEN = 3, 5  # a step whose thresholds are planned to be exact, and one that reuses them

# What executors and transports do differently: lists whose lengths are not known (gtopk), persistent rounds (dense), regions,
# balancing, rounds in flight, coded entries, two levels, a grid (of 4 ranks and more).
CASES: list[tuple[str, dict[str, Any]]] = [
    *((method, {}) for method in METHODS),
    ("oktopk", {"bucket_rounds": 1, "balance_trigger": 1.0}),
    ("oktopk", {"wire": "float32"}),
    ("oktopk", {"wire": "int8", "bucket_rounds": 1}),
    ("union", {"wire": "int8", "bucket_rounds": 1}),
    ("oktopk", {"levels": "hosts", "ranks_per_host": 2}),
    ("oktopk", {"exchange": "grid", "wire": "int8"}),
]
PEERS: list[tuple[str, dict[str, Any]]] = [
    ("dense", {}),
    ("oktopk", {}),
    ("oktopk", {"balance_trigger": 1.0}),
]


class Way:
    """How reducers are made and fed; on the host over MPI.

    Attributes:
        over: the communicator.
        device: as `GradientAllreduce` takes it.
        settings: that every reducer gets.
        per_rank: whether a rank counts what it counts on the host; else the ranks do together.
    """

    def __init__(self, over: Any, device: str = "cpu", per_rank: bool = True, **settings: Any) -> None:
        self.over, self.device, self.per_rank, self.settings = over, device, per_rank, settings

    def reducer(self, method: str, settings: dict[str, Any]) -> GradientAllreduce:
        usual = {"density": DENSITY, "threshold_interval": 3, "boundary_interval": 2, "average": False}
        chosen = usual | self.settings | settings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that messages are staged
            return GradientAllreduce(self.over, LENGTH, method, device=self.device, **chosen)

    def step(
        self, reducer: GradientAllreduce, gradient: NDArray[np.float32], measure: bool = False
    ) -> StepReport:
        return reducer.step(put(self.device, gradient), measure=measure)

    def vectors(self, reducer: GradientAllreduce) -> list[bytes]:
        """Update and residual."""
        held = reducer.update, reducer.residual
        return [b"" if vector is None else get(vector).tobytes() for vector in held]


class StagedWay(Way):
    """Staged through pinned memory of a device that is a double."""

    def __init__(self, over: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(over)
        self._monkeypatch, self._backend = monkeypatch, StagedBackend()

    def reducer(self, method: str, settings: dict[str, Any]) -> GradientAllreduce:
        with self._monkeypatch.context() as patch:
            patch.setattr("oktopk.construction.make_backend", lambda *_, **__: self._backend)
            return super().reducer(method, settings)

    def vectors(self, reducer: GradientAllreduce) -> list[bytes]:
        self._backend.stream.run()
        return super().vectors(reducer)


def _way(
    name: str, comm: MPI.Intracomm, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Way:
    if name == "host":
        return Way(comm)
    if name == "staged":
        return StagedWay(comm, monkeypatch)
    if name == "gloo":
        return Way(request.getfixturevalue("group"))
    use("cuda", comm)
    if name == "cuda, staged":
        monkeypatch.setenv("OKTOPK_CUDA_AWARE_MPI", "0")
    if "peers" in name:
        over = request.getfixturevalue("group") if "gloo" in name else comm
        return Way(over, "cuda", per_rank=False, peer_memory=True)
    over = request.getfixturevalue("nccl_group") if "nccl" in name else comm
    return Way(over, "cuda", peer_memory=False)


WAYS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "staged": [case for case in CASES if "levels" not in case[1]],
    "gloo": CASES,
    # Gaussiank's fit sums in another order on a GPU; two levels there are in test_levels
    "cuda": [case for case in CASES if case[0] != "gaussiank" and "levels" not in case[1]],
    "cuda, staged": [case for case in CASES if case[0] != "gaussiank" and "levels" not in case[1]],
    "cuda, nccl": [
        CASES[0],
        *(case for case in CASES if (case[0] in ("gtopk", "topkdsa") or case[1]) and "levels" not in case[1]),
        ("oktopk", {"levels": "hosts", "ranks_per_host": 1, "peer_memory": None}),
    ],
    "cuda, peers": PEERS,
    "cuda, peers of gloo": PEERS[1:2],
}


# which of its cases `make test` has of a way: of messages between GPUs each one either staged or not, of others between
# hosts each one either staged or over gloo
SHARED = {"staged": 0, "gloo": 1, "cuda": 0, "cuda, staged": 1}


def marks(name: str, at: int) -> list[pytest.MarkDecorator]:
    """Of the case at this place of a way, or of all cases where two ways share them."""
    found = [on_gpus] if "cuda" in name else []
    if SHARED.get(name, at % 2) != at % 2:
        found.append(pytest.mark.long("`make test` has each case in one of two ways"))
    return found


def counted(report: StepReport, way: Way) -> dict[str, Any]:
    """What is counted and measured on every way alike."""
    found = {**dataclasses.asdict(report), "seconds": None, "spans": None}
    if found["measures"]:
        found["measures"]["seconds"] = None
    if way.device == "cuda":
        found |= dict.fromkeys(("control_words", "control_messages", "bytes_between"))
        # sums over blocks in any order
        found |= {"rounding": None, "rounded": round(report.rounded, 9)}
    if not way.per_rank:
        found |= dict.fromkeys(("words", "messages", "bytes"))
    if report.method == "gtopk":  # a message of unknown length, which some libraries announce
        found |= dict.fromkeys(("messages", "control_words", "control_messages"))
    return found


def gradient_of(comm: MPI.Intracomm, step: int) -> NDArray[np.float32]:
    """Whole numbers, so that sums are exact in any order; every second step in one region for the most part."""
    gradient = GRADIENTS["heavy tailed"](
        np.random.default_rng((comm.rank, step)), LENGTH, comm.rank, comm.size
    )
    if step % 2:
        gradient[: LENGTH // 20] *= 50
    return gradient + np.float32(0)  # without zeros below zero, whose sign depends on the order


@pytest.mark.parametrize(
    ("name", "method", "settings"),
    [
        pytest.param(
            *(name, *case),
            marks=marks(name, CASES.index(case) if name in SHARED else at),
            id=f"{name}-{case[0]}-{case[1]}",
        )
        for name, cases in WAYS.items()
        for at, case in enumerate(cases)
    ],
)
@pytest.mark.host_cuda(ranks=1)
def test_every_way_gives_the_bits_and_words_of_messages_between_hosts(
    comm: MPI.Intracomm,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    method: str,
    settings: dict[str, Any],
) -> None:
    """Through a gradient that is not finite, and from the other one's state on."""
    if "nccl" in name and comm.size == 1:
        pytest.skip("nothing is sent")
    plain, way = Way(comm), _way(name, comm, request, monkeypatch)
    expected, found = plain.reducer(method, settings), way.reducer(method, settings)
    if way.settings.get("peer_memory") and method == "oktopk":
        assert found.p2p_unavailable_reason == ""
    last = comm.size - 1
    for step in range(STEPS):
        if step == SWAPPED:
            states = expected.state_dict(), found.state_dict()
            for reducer in (expected, found):
                reducer.close()
            expected, found = plain.reducer(method, settings), way.reducer(method, settings)
            expected.load_state_dict(states[1])
            found.load_state_dict(states[0])
        gradient = gradient_of(comm, step)
        if step in BROKEN:
            if comm.rank == last:
                gradient[[5, 4097]] = np.nan
            for each, reducer in ((plain, expected), (way, found)):
                before = each.vectors(reducer)[1]
                with pytest.raises(NonFiniteGradientError, match=rf"step {step}: .*rank\(s\) {last}$"):
                    each.step(reducer, gradient)
                assert not get(reducer.update).any()
                kept = each.vectors(reducer)[1]
                if "int8" in settings.values():  # values with fractions
                    rounding = 1e-6 * np.nanmax(np.abs(gradient))
                    was, now = (np.frombuffer(vector, np.float32) for vector in (before, kept))
                    assert np.allclose(now, was, rtol=0, atol=rounding)
                else:
                    assert kept == before
        else:
            measure = step == MEASURED and name == "gloo"
            reports = [plain.step(expected, gradient, measure), way.step(found, gradient, measure)]
            one, other = (repr(counted(report, way)) for report in reports)
            assert one == other, step
            assert len(set(comm.allreduce(np.array([report.words for report in reports])))) == 1 or (
                method == "dense" and not way.per_rank  # which sends otherwise through peer memory
            )
        assert plain.vectors(expected) == way.vectors(found), step


@pytest.fixture
def way(request: pytest.FixtureRequest, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Way:
    return _way(request.param, comm, request, monkeypatch)


def on_ways(other: str) -> pytest.MarkDecorator:
    """Ok-Topk on each, and another method on the host."""
    on_gpu = [pytest.param(name, "oktopk", marks=on_gpus) for name in ("cuda", "cuda, peers")]
    cases = [("host", "oktopk"), ("host", other), *on_gpu]
    return pytest.mark.parametrize(("way", "method"), cases, indirect=["way"])


def add_to_residual(reducer: GradientAllreduce, vector: NDArray[np.float32]) -> None:
    state = reducer.state_dict()
    assert state["residual"] is not None  # a step has left something behind
    state["residual"] = state["residual"] + vector
    reducer.load_state_dict(state)


@on_ways("gaussiank")
@pytest.mark.host_cuda(ranks=1)
def test_displacements_give_the_bits_of_their_vectors(comm: MPI.Intracomm, way: Way, method: str) -> None:
    """In steps that are dense, measured, flagged, not finite and without a part; where nothing is applied they stay."""
    plain = Way(comm)
    settings = {"dense_warmup_steps": 1, "threshold_interval": 1, "nonfinite": "skip", "average": True}
    expected, found = plain.reducer(method, settings), way.reducer(method, settings)
    sizes, share, factors = [1000, 3, LENGTH - 1003], 1 / 3, [1.0, 0.5, 0.999]
    rng, last = np.random.default_rng(comm.rank), comm.rank == comm.size - 1
    reference = np.random.default_rng(9).standard_normal(LENGTH, np.float32)
    held = put(way.device, reference.copy())
    moved = found.displacement(sizes, "float32", held, share)
    shown = reference.copy()
    for step, what in enumerate(
        ["dense", "sparse", "measured", "flagged", "absent", "nan", "sparse", "sparse"]
    ):
        parameters = shown + (rng.standard_normal(LENGTH) ** 3).astype(np.float32)
        absent = ((1000, 1003),) if what == "absent" and comm.rank == 0 else ()
        for begin, end in absent:
            parameters[begin:end] = shown[begin:end]
        gradient = shown - parameters
        if what == "nan" and last:
            parameters[7] = np.nan
        parts = [put(way.device, part.copy()) for part in np.split(parameters, [1000, 1003])]
        addresses = [part.ctypes.data if way.device == "cpu" else part.data.ptr for part in parts]
        moved.set_pointers([0 if absent and at == 1 else address for at, address in enumerate(addresses)])
        moved.flagged = what == "flagged" and last
        told = {"measure": what == "measured", "absent": absent, "token": 5}
        report, fails = found.step(moved, **told), what in ("flagged", "nan")
        vector = gradient.copy()
        vector[: 8 * (fails and last)] = np.nan
        assert expected.step(vector, **told).skipped == report.skipped == fails, step
        if fails:
            gradient[7] *= not (what == "nan" and last)
            add_to_residual(expected, gradient)
        else:
            found.subtract_update(held)
            reference -= expected.update
            reference *= np.repeat(np.array(factors, np.float32), sizes)
        moved.set_pointers(addresses)
        if step % 2:
            moved.set_share(share := share / 2)
        moved.show(found.residual, None if fails else factors)
        shown = reference - np.float32(share) * expected.residual
        assert np.array_equal(get(held), reference), step
        assert np.array_equal(get(found.residual), expected.residual), step
        assert np.array_equal(np.concatenate([get(part) for part in parts]), shown), step
        assert report.global_nnz or fails or what == "dense"
    assert expected.residual.any()


@on_ways("gtopk")
@pytest.mark.host_cuda(ranks=1)
def test_adamws_steps_give_the_bits_of_their_vectors(comm: MPI.Intracomm, way: Way, method: str) -> None:
    """In steps that are dense, measured, replayed, not finite and without a part; the terms of a step are its own."""
    plain = Way(comm)
    settings = {"dense_warmup_steps": 1, "threshold_interval": 3, "nonfinite": "skip", "average": True}
    expected, found = plain.reducer(method, settings), way.reducer(method, settings)
    sizes = [1000, 3, LENGTH - 1003]
    moved, alone = found.adamw_displacement(sizes, "float32"), HostAdamW(sizes, "float32")
    rng, last = np.random.default_rng(comm.rank), comm.rank == comm.size - 1
    cut = [1000, 1003]
    moments = [[np.zeros(size, np.float32) for size in sizes] for _ in range(2)]
    on_device = [[put(way.device, part.copy()) for part in each] for each in moments]
    entries = np.empty(LENGTH + BLOCK, ENTRY)

    def addresses(arrays: Any) -> NDArray[np.int64]:
        pointers = [
            [a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr for a in each] for each in arrays
        ]
        return np.array(pointers)

    for step, what in enumerate(
        ["dense", "sparse", "measured", "absent", "sparse", "sparse", "sparse", "sparse", "nan"], 1
    ):
        parts = np.split((rng.standard_normal(LENGTH) ** 3).astype(np.float32), cut)
        if what == "nan" and last:
            parts[0][7] = np.nan
        given = [put(way.device, part.copy()) for part in parts]
        absent = ((1000, 1003),) if what == "absent" and comm.rank == 0 else ()
        there = np.array([1, not absent, 1])
        terms = np.array([adamw_terms(0.01 / step, (0.9, 0.99), 1e-8, step)] * 3, np.float32)
        for displacement, arrays in ((alone, [parts, *moments]), (moved, [given, *on_device])):
            displacement.set_step(addresses(arrays) * there, terms)
        vector = np.zeros(LENGTH, np.float32)
        bad = select(alone, vector, NOTHING, entries).nonfinite
        told = {"measure": what == "measured", "absent": absent, "token": 5}
        report = found.step(moved, **told)
        before = vector.copy()
        vector[: 8 * bool(bad)] = np.nan
        assert expected.step(vector, **told).skipped == report.skipped == (what == "nan"), step
        if what == "nan":
            add_to_residual(expected, before)
        assert np.array_equal(get(found.residual), expected.residual), step
        assert np.array_equal(get(found.update), expected.update), step
        for mine, theirs in zip(on_device, moments, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                assert np.array_equal(get(one), other, equal_nan=True), step
    assert expected.residual.any()


def test_displacements_need_a_residual_and_steps_that_are_waited_for(comm: MPI.Intracomm) -> None:
    array = np.zeros(LENGTH, np.float32)
    for method, settings, message in (
        ("dense", {}, "a displacement needs a residual"),
        ("oktopk", {"deferred": True}, "not for deferred steps"),
    ):
        with pytest.raises(ValueError, match=message):
            Way(comm).reducer(method, settings).displacement([LENGTH], "float32", array, 0.5)
        with pytest.raises(ValueError, match=message):
            Way(comm).reducer(method, settings).adamw_displacement([LENGTH], "float32")
