"""Deferred steps: what the host learns a step later, and what becomes of those that the device cannot end by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import nn

from collectives.sparse import ENTRY, SparseVector
from collectives.transport import FlaggedRanksError
from oktopk import METHODS, DistributedOptimizer, GradientAllreduce, NonFiniteGradientError, StepReport
from oktopk.methods.base import Deferred, Method, Plan, Reduction
from tests.devices import DEVICES, get, gpus, put, use
from tests.fake_peers import FakePeers
from tests.inputs import GRADIENTS, SHAPES

pytestmark = pytest.mark.mpi
on_a_gpu = pytest.mark.skipif(not gpus(), reason="no GPU")

LENGTH = 64
TRUSTED = 8


class Late(Method):
    """Sums densely, and tells how it went when it is asked; as the script says, one word a step after the first ones."""

    name = "late"
    script: ClassVar[list[str]] = []
    plans: ClassVar[list[Plan]] = []

    def reduce(
        self,
        gradient: NDArray[np.float32],
        residual: NDArray[np.float32] | None,
        out: NDArray[np.float32],
        plan: Plan,
    ) -> Reduction | Deferred:
        self.plans.append(plan)
        plan.clear_out()
        outcome = self.script[len(self.plans) - 1]
        if outcome == "done":
            self.transport.comm.Allreduce(gradient, out)
            self.transport.traffic.words += 7
        everything = np.zeros(self.length, ENTRY)
        everything["index"], everything["value"] = np.arange(self.length), out
        update = SparseVector(everything, self.length)
        reduction = Reduction(update, update, (), exact=False, local_nnz=3, global_nnz=5, finish=lambda: None)

        def settle() -> Reduction | None:
            if outcome == "flagged":
                raise FlaggedRanksError([0])
            return reduction if outcome == "done" else None

        return Deferred(settle) if plan.deferrable else reduction


@pytest.fixture
def late(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Callable[..., GradientAllreduce]:
    def make(script: str, **settings: Any) -> GradientAllreduce:
        monkeypatch.setitem(METHODS, "late", Late)
        monkeypatch.setattr(Late, "plans", [])
        monkeypatch.setattr(Late, "script", [*["done"] * TRUSTED, *script.split()])
        chosen: dict[str, Any] = {"average": False, "deferred": True} | settings
        reducer = GradientAllreduce(comm, LENGTH, "late", **chosen)
        assert all(reducer.step(GRADIENT).complete for _ in range(TRUSTED))
        return reducer

    return make


GRADIENT = np.ones(LENGTH, np.float32)


def known(*reports: StepReport) -> list[bool]:
    return [report.complete for report in reports]


def test_a_report_is_complete_when_the_next_step_begins(late: Callable[..., GradientAllreduce]) -> None:
    reducer = late("done done done")
    first = reducer.step(GRADIENT)
    assert known(first) == [False] and (first.step, first.k, first.global_nnz) == (TRUSTED, 1, 0)
    assert (reducer.update == reducer.transport.size).all()
    second = reducer.step(GRADIENT)
    assert known(first, second) == [True, False]
    assert (first.local_nnz, first.global_nnz, first.words) == (3, 5, 7)
    reducer.complete()
    reducer.complete()
    assert known(second) == [True] and (second.step, second.words, second.skipped) == (TRUSTED + 1, 7, False)


def test_a_state_knows_how_the_last_step_went(late: Callable[..., GradientAllreduce]) -> None:
    reducer = late("done stopped")
    reducer.step(GRADIENT)
    assert reducer.state_dict()["unaided"] == TRUSTED
    report = reducer.step(GRADIENT)
    assert reducer.state_dict()["unaided"] == 0
    assert report.complete


@pytest.mark.parametrize("resumed", [False, True])
def test_after_a_step_that_stopped_the_host_waits_for_some(
    late: Callable[..., GradientAllreduce], comm: MPI.Intracomm, resumed: bool
) -> None:
    reducer = late(" ".join(["done", "stopped", *["done"] * (TRUSTED + 2)]))
    reports = []
    for step in range(TRUSTED + 4):
        reports.append(reducer.step(GRADIENT))
        assert reducer.update.any() == (step != 1)
        if resumed and step == 1:
            state = reducer.state_dict()
            reducer = GradientAllreduce(comm, LENGTH, "late", average=False, deferred=True)
            reducer.load_state_dict(state)
    waited = [False] * TRUSTED
    assert [plan.deferrable for plan in Late.plans] == [*waited, True, True, *waited, True, True]
    stopped = reports[1]
    assert stopped.complete and not stopped.skipped and (stopped.global_nnz, stopped.words) == (0, 0)
    assert known(*reports) == [True] * (TRUSTED + 3) + [False]


def test_a_gradient_that_is_not_finite_raises_before_the_next_one_is_taken(
    late: Callable[..., GradientAllreduce],
) -> None:
    reducer = late("done flagged done")
    reducer.step(GRADIENT)
    reducer.step(GRADIENT)
    with pytest.raises(NonFiniteGradientError, match=r"step 9: .* rank\(s\) 0$"):
        reducer.step(GRADIENT)
    assert reducer.steps == len(Late.plans) == 10
    report = reducer.step(GRADIENT)
    assert report.step == 10 and Late.plans[10].exact and Late.plans[10].new_boundaries


def test_a_skipped_step_is_known_as_such_a_step_later(late: Callable[..., GradientAllreduce]) -> None:
    reducer = late("done flagged done", nonfinite="skip")
    reducer.step(GRADIENT)
    report = reducer.step(GRADIENT)
    assert (report.skipped, report.complete) == (False, False)
    reducer.step(GRADIENT)
    assert (report.skipped, report.complete) == (True, True)
    assert Late.plans[10].exact and Late.plans[10].support.nnz == 0


def test_a_state_may_be_loaded_over_a_step_whose_end_is_not_known(
    late: Callable[..., GradientAllreduce],
) -> None:
    reducer = late("done done done")
    state = reducer.state_dict()
    assert known(reducer.step(GRADIENT)) == [False]
    reducer.load_state_dict(state)
    assert reducer.step(GRADIENT).step == TRUSTED
    assert Late.plans[TRUSTED + 1].support is None  # of the update nothing is known


def test_a_state_of_older_steps_is_waited_for(late: Callable[..., GradientAllreduce]) -> None:
    reducer = late("done done")
    state = reducer.state_dict()
    del state["unaided"]
    reducer.load_state_dict(state)
    assert known(reducer.step(GRADIENT)) == [True]


@pytest.mark.parametrize("outcome", ["done", "stopped"])
def test_an_update_that_was_written_to_is_cleared_as_a_whole(
    late: Callable[..., GradientAllreduce], outcome: str
) -> None:
    reducer = late(f"{outcome} done")
    reducer.step(GRADIENT)
    reducer.forget_support()
    reducer.step(GRADIENT)
    assert Late.plans[TRUSTED + 1].support is None


@pytest.mark.parametrize(
    "settings", [{"deferred": False}, {"momentum_correction": 0.5}, {"dense_warmup_steps": 10}], ids=str
)
def test_other_steps_are_known_at_once(
    late: Callable[..., GradientAllreduce], settings: dict[str, Any]
) -> None:
    reducer = late("done done", **settings)
    for _ in range(2):
        assert reducer.step(GRADIENT).complete
    assert not any(plan.deferrable for plan in Late.plans)


def test_the_host_defers_nothing(comm: MPI.Intracomm) -> None:
    reducer = GradientAllreduce(comm, 1000, "oktopk", deferred=True)
    rng = np.random.default_rng(comm.rank)
    for _ in range(3):
        report = reducer.step(rng.standard_normal(1000).astype(np.float32))
        assert report.complete and report.global_nnz > 0


def cubes(comm: MPI.Intracomm, length: int) -> Callable[[], NDArray[np.float32]]:
    """Whole numbers with a heavy tail, so that sums are exact and thresholds settle."""
    rng = np.random.default_rng(comm.rank)
    return lambda: np.rint(1024 * rng.standard_normal(length) ** 3).astype(np.float32)


def narrowed(gradient: NDArray[np.float32], gradient_type: str) -> NDArray[Any]:
    """As it is given: bfloat16 by its bits."""
    if gradient_type == "float32":
        return gradient
    return (gradient.view(np.uint32) >> 16).astype(np.uint16)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where there are peers: on the host by make-believe."""
    use(request.param, comm)
    if request.param == "cpu":
        monkeypatch.setattr("oktopk.host_kernels.peer_step", FakePeers)
    return str(request.param)


def among_peers(device: str, comm: MPI.Intracomm, length: int, **settings: Any) -> GradientAllreduce:
    chosen: dict[str, Any] = {"density": 0.02, "deferred": True, "average": False} | settings
    if chosen.get("gradient_type", "float32") != "float32" and device == "cpu":
        pytest.skip("the host takes float32 alone")
    reducer = GradientAllreduce(comm, length, "oktopk", device=device, peer_memory=True, **chosen)
    assert reducer.without_peers == "" or device == "cpu"
    return reducer


class Watched(FakePeers):
    """Notes where steps ended."""

    ends: ClassVar[list[str]] = []

    def outcome(self, exact: bool) -> Any:
        found = super().outcome(exact)
        self.ends.append(found.stopped_at)
        return found


@pytest.mark.parametrize("settings", [{}, {"balance_trigger": 1.0}, {"momentum_correction": 0.5}], ids=str)
@pytest.mark.parametrize("kind", GRADIENTS)
def test_peers_by_make_believe_give_the_bits_of_messages(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, Any]
) -> None:
    for length, density in SHAPES:
        chosen: dict[str, Any] = {"density": density, "average": False, "threshold_interval": 4} | settings
        by_messages = GradientAllreduce(comm, length, "oktopk", **chosen)
        among = GradientAllreduce(comm, length, "oktopk", **chosen)
        with monkeypatch.context() as patch:
            patch.setattr("oktopk.host_kernels.peer_step", Watched)
            among._instance("oktopk")
        alike = True  # regions: among peers they are renewed where a step stopped
        rng = np.random.default_rng((comm.rank, length))
        for _ in range(10):
            gradient = GRADIENTS[kind](rng, length, comm.rank, comm.size)
            first, second = among.step(gradient), by_messages.step(gradient)
            assert (first.local_nnz, first.global_nnz) == (second.local_nnz, second.global_nnz)
            assert np.array_equal(among.update, by_messages.update)
            assert np.array_equal(among.residual, by_messages.residual)  # type: ignore[arg-type]
            words = comm.allreduce(np.array([first.words, second.words]))
            assert not alike or words[0] == words[1]
            alike = alike and Watched.ends[-1:] != ["selection"]
        if first.method == "oktopk":
            peers = [reducer._methods["oktopk"]._peers for reducer in (among, by_messages)]  # type: ignore[attr-defined]
            assert isinstance(peers[0], FakePeers) and peers[1] is None
        among.close()
        by_messages.close()


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("resumed", [False, True])
def test_regions_that_got_too_much_are_renewed_at_once(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, deferred: bool, resumed: bool
) -> None:
    """Large entries move from one end to the other, where one region holds nearly everything."""
    if comm.size < 4:
        pytest.skip("no region can get more than three times its share")
    monkeypatch.setattr("oktopk.host_kernels.peer_step", Watched)
    settings = {"density": 0.05, "threshold_interval": 1000, "boundary_interval": 1000, "deferred": deferred}
    length = 40_000
    reducer = GradientAllreduce(comm, length, "oktopk", **settings)
    rng = np.random.default_rng(comm.rank)
    for step in range(24):
        gradient = rng.integers(-99, 100, length).astype(np.float32)
        gradient[slice(-length // 8, None) if step >= 12 else slice(length // 8)] *= 100
        if step == 12:
            reducer.complete()
            Watched.ends.clear()
            reducer._unaided = TRUSTED
        report = reducer.step(gradient)
        assert step != 12 or report.complete != deferred
        if resumed and step == 12:
            state = reducer.state_dict()
            reducer.close()
            reducer = GradientAllreduce(comm, length, "oktopk", **settings)
            reducer.load_state_dict(state)
    reducer.complete()
    assert Watched.ends[0] == "selection"
    assert Watched.ends[1:].count("selection") < 4
    reducer.close()


def until_deferred(device: str, reducer: GradientAllreduce, draw: Callable[[], NDArray[Any]]) -> None:
    for _ in range(60):
        if not reducer.step(put(device, draw())).complete:
            return
    raise AssertionError("60 steps, and the host looked at each")


@pytest.mark.parametrize("gradient_type", ["float32", "bfloat16"])
def test_deferred_steps_give_the_bits_of_those_that_are_waited_for(
    device: str, comm: MPI.Intracomm, gradient_type: str
) -> None:
    """From one step that stopped to the next, if any does."""
    length = 300_007
    deferred, waited = (
        among_peers(device, comm, length, deferred=late, gradient_type=gradient_type, threshold_interval=8)
        for late in (True, False)
    )
    rng = np.random.default_rng(comm.rank)
    late, stopped = 0, 0
    for _ in range(60):
        gradient = (rng.standard_normal(length) ** 3).astype(np.float32)
        on_device = put(device, narrowed(gradient, gradient_type))
        first, second = deferred.step(on_device), waited.step(on_device)
        late += not first.complete
        deferred.complete()
        if not first.global_nnz:
            stopped += 1
            # on the rank that selected too much, or for all
            assert comm.allreduce(second.exact)
            waited.load_state_dict(deferred.state_dict())
            continue
        assert np.array_equal(get(deferred.update), get(waited.update))
        assert np.array_equal(get(deferred.residual), get(waited.residual))
        names = "exact local_nnz global_nnz words messages control_words global_threshold"
        for name in names.split():
            assert getattr(first, name) == getattr(second, name), name
    assert late > 30 > 3 > stopped
    deferred.close()
    waited.close()


@pytest.mark.parametrize("kind", GRADIENTS)
def test_deferred_steps_lose_nothing_and_agree(device: str, comm: MPI.Intracomm, kind: str) -> None:
    """Whether they stop or not; what stops applies nothing. All are deferred that may be."""
    for length, density in SHAPES:
        reducer = among_peers(
            device, comm, length, density=density, threshold_interval=6, boundary_interval=4
        )
        rng = np.random.default_rng((comm.rank, length))
        before = np.zeros(length, np.float64)
        reports, updates, late = [], [], 0
        for _ in range(14):
            reducer.complete()
            reducer._unaided = TRUSTED
            gradient = GRADIENTS[kind](rng, length, comm.rank, comm.size)
            reports.append(reducer.step(put(device, gradient)))
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
        # of nine whose thresholds and regions are not new by plan; after a stop regions are
        assert late >= 5 or reports[0].method == "dense"
        reducer.close()


def test_a_selection_over_the_cap_on_one_rank_stops_all_and_the_next_step_applies(
    device: str,
    comm: MPI.Intracomm,
) -> None:
    length, last = 100_003, comm.rank == comm.size - 1
    reducer = among_peers(device, comm, length, threshold_interval=16)
    draw = cubes(comm, length)
    until_deferred(device, reducer, draw)
    reports, left = [], []
    for step in range(3):
        reports.append(reducer.step(put(device, draw() * np.float32(4096 if step == 1 and last else 1))))
        left.append(get(reducer.residual))
    reducer.complete()
    assert [report.global_nnz > 0 for report in reports] == [True, False, True]
    assert not reports[1].skipped
    assert not last or np.abs(left[1]).max() > 50 * np.abs(left[0]).max()  # it is all there
    reducer.close()


def test_ranks_that_stopped_go_on_together(device: str, comm: MPI.Intracomm) -> None:
    """However far their hosts and GPUs are apart: nobody waits for the device in between. By make-believe all are together."""
    length = 100_003
    reducer = among_peers(device, comm, length, threshold_interval=1000, boundary_interval=1000)
    draw = cubes(comm, length)
    until_deferred(device, reducer, draw)
    gradients = [put(device, draw()) for _ in range(4)]
    stopped = 0
    for number in range(40):
        late, loud = number % comm.size == comm.rank, (number + 1) % comm.size == comm.rank
        gradient = gradients[number % 4] * np.float32(2.0**12 if loud else 1)
        if late and device == "cuda":
            torch.cuda._sleep(200_000)
        reducer.complete()
        reducer._unaided = TRUSTED
        report = reducer.step(gradient)
        reducer.step(gradients[(number + 1) % 4])
        stopped += not report.global_nnz
    updates = comm.allgather(get(reducer.update).tobytes())
    assert len(set(updates)) == 1
    assert stopped > 10
    reducer.close()


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("gradient_type", ["float32", "bfloat16"])
def test_a_nonfinite_gradient_leaves_the_residual_as_it_was(
    device: str, comm: MPI.Intracomm, gradient_type: str, nonfinite: str
) -> None:
    length = 100_003
    reducer = among_peers(
        device, comm, length, threshold_interval=32, gradient_type=gradient_type, nonfinite=nonfinite
    )
    draw = cubes(comm, length)

    def step(poison: bool = False) -> Any:
        gradient = draw()
        if poison and comm.rank == comm.size - 1:
            gradient[[5, 40_000]] = np.inf
        return reducer.step(put(device, narrowed(gradient, gradient_type)))

    until_deferred(device, reducer, lambda: narrowed(draw(), gradient_type))
    steps, before = reducer.steps, get(reducer.residual)
    poisoned = step(poison=True)
    assert np.array_equal(get(reducer.residual), before)
    assert not get(reducer.update).any()
    if nonfinite == "raise":
        with pytest.raises(NonFiniteGradientError, match=rf"step {steps}: .*rank\(s\) {comm.size - 1}$"):
            step()
    after = step()
    assert get(reducer.update).any() and after.complete and after.exact
    assert nonfinite == "raise" or poisoned.skipped
    reducer.close()


def test_a_reloaded_reducer_continues_deferred_steps_bit_for_bit(device: str, comm: MPI.Intracomm) -> None:
    length = 100_003
    settings = {"threshold_interval": 8, "boundary_interval": 8}
    undisturbed, resumed = (
        among_peers(device, comm, length, **settings),
        among_peers(device, comm, length, **settings),
    )
    draw = cubes(comm, length)
    for _ in range(30):
        undisturbed.step(put(device, draw()))
    until_deferred(device, resumed, draw)  # what is open is forgotten
    resumed.load_state_dict(undisturbed.state_dict())
    for _ in range(8):
        gradient = put(device, draw())
        undisturbed.step(gradient)
        resumed.step(gradient)
        assert np.array_equal(get(undisturbed.update), get(resumed.update))
    undisturbed.close()
    resumed.close()


@on_a_gpu
def test_the_host_does_not_wait_for_a_deferred_step(comm: MPI.Intracomm) -> None:
    device = "cuda"
    use(device, comm)
    length = 100_003
    reducer = among_peers(device, comm, length, threshold_interval=32)
    draw = cubes(comm, length)
    until_deferred(device, reducer, draw)
    gradient = put(device, draw())
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
    reducer.close()


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_a_network_trains_to_the_same_bits_whenever_the_host_looks(
    device: str, comm: MPI.Intracomm, clip_norm: float
) -> None:
    if comm.size == 1:
        pytest.skip("the ladder misses where this rank alone selected too little")
    if device == "cuda":
        if gpus() < comm.size:
            pytest.skip("ranks share a GPU")
        import cupy

        torch.cuda.set_device(cupy.cuda.Device().id)
    ends = []
    for looks in (True, False):
        torch.manual_seed(3)
        network = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 10)).to(device)
        inner = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9, fused=True)
        settings = {"density": 0.05, "boundary_interval": 4, "deferred": True}
        optimizer = DistributedOptimizer(inner, comm, clip_norm=clip_norm, **settings)
        torch.manual_seed(comm.rank)
        reports, late = [], 0
        for _ in range(60):
            x = torch.randn(128, 64, device=device)
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x), x[:, :10].argmax(1)).backward()
            reports.append(optimizer.step())
            late += not reports[-1].complete
            if looks:
                optimizer.complete()
                if device == "cuda":
                    torch.cuda.synchronize()
        optimizer.complete()
        assert late > 0
        assert np.median([report.global_nnz / report.k for report in reports]) > 0.9
        ends.append(torch.cat([p.detach().reshape(-1) for p in network.parameters()]))
        optimizer.close()
    assert torch.equal(*ends)
