"""What a GPU must do beyond the contract that all devices share; skipped where there is none."""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.cuda.layouts import BAD_SELECTION, BAD_THRESHOLD, PROCEED
from oktopk import GradientAllreduce
from tests.devices import asynchronous, get, gpus, narrowed, on_gpus, put, use
from tests.inputs import GRADIENTS, kinds_with, shapes_of
from tests.peers import noted_outcomes, on_both, step_alike
from tests.rows import widened

pytestmark = [pytest.mark.mpi, on_gpus, pytest.mark.host_cuda(ranks=3)]

LENGTH = 20_011 if asynchronous() else 10_007
USUAL: dict[str, Any] = {
    "density": 0.05,
    "threshold_interval": 4,
    "boundary_interval": 6,
    "average": False,
}


def normal(comm: MPI.Intracomm, step: int) -> NDArray[np.float32]:
    return np.random.default_rng((comm.rank, step)).standard_normal(LENGTH).astype(np.float32)


def reducer(comm: MPI.Intracomm, method: str, device: str = "cuda", **settings: Any) -> GradientAllreduce:
    use("cuda", comm)
    return GradientAllreduce(comm, LENGTH, method, device=device, **USUAL | settings)


@pytest.mark.parametrize("wire", ["plain", "float32"])
def test_a_staged_step_waits_once_for_each_number_the_host_needs(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    """How many were selected, what is sent, how many sums reach each threshold, and what each round of the allgather sends."""
    from collectives.cuda.device import Device
    from collectives.mpi import MpiTransport

    if comm.size == 1:
        pytest.skip("nothing is sent")
    monkeypatch.setenv("OKTOPK_CUDA_AWARE_MPI", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        staged = reducer(comm, "oktopk", peer_memory=False, wire=wire, threshold_interval=8)
    events: list[str] = []

    def noted(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            events.append(name)
            return original(self, *arguments, **named)

        monkeypatch.setattr(kind, name, call)

    waits = []
    for step in range(12):
        if step == 8:  # a regular selection is not trimmed any more
            noted(Device, "synchronize")
            noted(MpiTransport, "send")
            noted(MpiTransport, "wait")
            noted(type(staged.backend.kernels), "clear_support")
        events.clear()
        report = staged.step(put("cuda", normal(comm, step)))
        if step >= 8 and not report.exact:
            waits.append(events.count("synchronize"))
            # behind the wire, where the GPU has nothing else to do
            assert events.index("send") < events.index("clear_support") < events.index("wait")
    assert min(waits) == 3 + (comm.size - 1).bit_length()
    assert report.wire == wire


@pytest.mark.parametrize("density", [0.1, 0.004])
@pytest.mark.host_cuda(ranks=1)
def test_settled_steps_among_peers_give_the_cpus_bits(comm: MPI.Intracomm, density: float) -> None:
    """Regular ones send a control message each of what was selected, counted and kept: the host need not help."""
    length = 30_011
    on_cpu, on_gpu = on_both(comm, length, density=density, threshold_interval=8, boundary_interval=12)
    rng = np.random.default_rng(comm.rank)
    notes = set()
    for _ in range(18):
        report = step_alike(comm, on_cpu, on_gpu, (rng.standard_normal(length) ** 3).astype(np.float32))
        if not (report.local_exact or report.global_exact):
            notes.add(report.control_messages)
    assert 3 in notes <= {3, 4}  # one more where regions are renewed


LOCKSTEPS: dict[str, dict[str, Any]] = {
    "regular and exact": {"threshold_interval": 3, "boundary_interval": 2},
    "exact alone": {"threshold_interval": 1, "boundary_interval": 3},
    "balanced at once": {"threshold_interval": 4, "boundary_interval": 8, "balance_trigger": 1.0},
    "k changes": {"threshold_interval": 4, "boundary_interval": 4, "density_warmup_steps": 8},
}


@pytest.mark.parametrize(("kind", "settings"), kinds_with(LOCKSTEPS))
@pytest.mark.host_cuda(ranks=1)
def test_ugly_gradients_among_peers_give_the_cpus_bits(comm: MPI.Intracomm, kind: str, settings: str) -> None:
    """The CPU keeps the contract on these (test_contract): what equals it does.

    On every pair of a kind, a setting and a shape; their whole product took four times as long.
    """
    for length, density in shapes_of(kind, list(LOCKSTEPS).index(settings), len(LOCKSTEPS)):
        on_cpu, on_gpu = on_both(comm, length, density=density, average=False, **LOCKSTEPS[settings])
        rng = np.random.default_rng((comm.rank, length))
        for _ in range(10):
            step_alike(comm, on_cpu, on_gpu, GRADIENTS[kind](rng, length, comm.rank, comm.size))
        on_cpu.close()
        on_gpu.close()


class Launches:
    """What was launched since `clear`: of each launch whether it is exact, begins with the gradient, and why it stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from oktopk.cuda.p2p_launches import P2PLaunches

        self._outcomes = noted_outcomes(monkeypatch)
        self._kinds: list[tuple[bool, bool]] = []
        launch = P2PLaunches.launch

        def noted(launches: Any, *arguments: Any, **more: Any) -> int:
            self._kinds.append((more["exact"], more["selected"] is None))
            return launch(launches, *arguments, **more)

        monkeypatch.setattr(P2PLaunches, "launch", noted)

    def clear(self) -> None:
        self._outcomes.clear()
        self._kinds.clear()

    def noted(self) -> list[tuple[bool, bool, int]]:
        stops = [outcome.stop for outcome, selected in self._outcomes if selected]
        return [(*kind, stop) for kind, stop in zip(self._kinds, stops, strict=True)]


def in_lockstep(
    comm: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
    wrong: dict[int, tuple[int, bool]],
    steps: int,
    captured: bool = True,
    **settings: Any,
) -> list[list[tuple[bool, bool, int]]]:
    """The launches of each step, whose bits and thresholds are the CPU's.

    Args:
        wrong: step -> bits that are added to the local threshold before it, on the last rank or on all.
        captured: steps are to become graphs.
    """
    launches = Launches(monkeypatch)
    on_cpu, on_gpu = on_both(comm, LENGTH, **USUAL | settings)
    found = []
    held = put("cuda", np.zeros(LENGTH, np.float32))  # where captured steps find it
    for step in range(steps):
        gradient = np.rint(1000 * normal(comm, step) ** 3)  # sums are exact in any order
        held.set(gradient)
        more, everywhere = wrong.get(step, (0, False))
        if more and (everywhere or comm.rank == comm.size - 1):
            for each in (on_cpu, on_gpu):
                each._methods["oktopk"].selection.bits += more  # type: ignore[attr-defined]
        launches.clear()
        step_alike(comm, on_cpu, on_gpu, gradient, held)
        found.append(launches.noted())
        # those of the selection that was sent
        one, other = (each._methods["oktopk"].state_dict()["splits"] for each in (on_cpu, on_gpu))
        assert np.array_equal(one, other), step
        if BAD_SELECTION in [stop for *_, stop in found[-1]]:  # a deferred step would have been given up
            assert on_gpu._trust == 0
    graphs = on_gpu._executors["oktopk"].launches._graphs._graphs  # type: ignore[attr-defined]
    assert len(graphs) == captured and all(graphs.values())
    return found


OCTAVES = 1 << 23  # of a magnitude's bits


@pytest.mark.parametrize("everywhere", [False, True], ids=["on one rank", "on all ranks"])
def test_exact_steps_are_launched_whole_and_once_more_where_a_guess_missed(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, everywhere: bool
) -> None:
    missed = {6: 2 * OCTAVES, 10: -9 * OCTAVES, 14: 2 * OCTAVES}  # too few reach the guess, or nearly all
    wrong = {step: (more, everywhere) for step, more in missed.items()}
    found = in_lockstep(comm, monkeypatch, wrong, 16, threshold_interval=2, boundary_interval=100)
    missed[0] = 0  # nothing is known yet
    for step in range(0, 16, 2):
        if step in missed:
            assert found[step] == [(True, True, BAD_SELECTION), (True, False, PROCEED)]
        else:
            assert found[step] == [(True, True, PROCEED)]


def test_steps_that_select_all_nonzeros_are_launched_once(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer than k, so that no guess of a threshold could select more."""
    launches = Launches(monkeypatch)
    on_cpu, on_gpu = on_both(comm, LENGTH, **USUAL | {"threshold_interval": 3})
    gradient = np.zeros(LENGTH, np.float32)
    gradient[7 + comm.rank :: LENGTH // 9] = 1 + comm.rank
    for step in range(8):
        launches.clear()
        step_alike(comm, on_cpu, on_gpu, gradient if step % 4 else np.zeros(LENGTH, np.float32))
        exact, noted = step % 3 == 0, launches.noted()  # which finds fewer than k sums
        assert noted[-1] == (exact, bool(step), BAD_THRESHOLD if exact else PROCEED)
        assert len(noted) == 1 + (not step)


@pytest.mark.parametrize("late", [False, True], ids=["", "a rank reads late"])
def test_a_regular_selection_above_2k_is_made_right_and_launched_once_more(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    from oktopk.cuda.p2p_launches import P2PLaunches
    from oktopk.cuda.step_graphs import StepGraphs

    enqueue = P2PLaunches._enqueue

    def enqueue_late(*arguments: Any, **more: Any) -> None:
        time.sleep(0.05)  # between this rank's selection and its look at those of the others
        enqueue(*arguments, **more)

    reads_late = late and comm.rank == 0
    if reads_late:
        monkeypatch.setattr(StepGraphs, "_second", lambda graphs, key, enqueue: None)
        monkeypatch.setattr(P2PLaunches, "_enqueue", enqueue_late)
    settings = {"threshold_interval": 100, "boundary_interval": 100}
    found = in_lockstep(comm, monkeypatch, {9: (-9 * OCTAVES, False)}, 12, not reads_late, **settings)
    assert found[9] == [(False, True, BAD_SELECTION), (False, False, PROCEED)]
    assert [launch[:2] for launch in found[8]] == [(False, True)]


def test_tiles_that_are_crowded_give_the_cpus_bits(comm: MPI.Intracomm) -> None:
    """Some large entries side by side in a long region, as one small layer has them."""
    length = 1_300_021
    on_cpu, on_gpu = on_both(comm, length, density=0.01, threshold_interval=2, boundary_interval=4)
    rng = np.random.default_rng(comm.rank)
    for _ in range(2):  # exact, and regular
        gradient = rng.standard_normal(length, np.float32)
        for hot in (length // 7, length - 50_000):
            gradient[hot : hot + 6_000] *= 100
        step_alike(comm, on_cpu, on_gpu, gradient)
    launches = on_gpu._executors["oktopk"].launches  # type: ignore[attr-defined]
    # so wide that one of them holds more than half of what lies side by side
    assert comm.allreduce(1 << launches._step.shift > 2 * 6_000, MPI.LOR)


def test_lists_shrink_with_k(comm: MPI.Intracomm) -> None:
    """A density warm-up begins with lists as long as the gradient."""
    reduced = reducer(comm, "oktopk", peer_memory=True, density=0.001, density_warmup_steps=8)
    held = []
    for step in range(12):
        reduced.step(put("cuda", normal(comm, step)))
        held.append(reduced.transport.workspace.nbytes)
    assert held[-1] < held[0] / 20


def test_where_memory_of_peers_cannot_be_mapped_mpi_takes_over(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    def refuse(*_: Any) -> int:
        raise cupy.cuda.runtime.CUDARuntimeError(201)

    monkeypatch.setattr("cupy.cuda.runtime.ipcOpenMemHandle", refuse)
    reduced = reducer(comm, "oktopk", peer_memory=True)
    assert ("no peer memory: rank 0" in reduced.p2p_unavailable_reason) == (comm.size > 1)
    reduced.step(put("cuda", normal(comm, 0)))
    assert get(reduced.update).any()


# sparse methods select from what is widened, and Gaussiank fits to it: the second type needs one of them
@pytest.mark.parametrize(
    ("method", "gradient_type"),
    [("dense", "bfloat16"), ("oktopk", "bfloat16"), ("gaussiank", "bfloat16"), ("oktopk", "float16")],
)
def test_narrow_gradients_are_widened_before_anything_is_added(
    comm: MPI.Intracomm, method: str, gradient_type: str
) -> None:
    narrow = reducer(comm, method, gradient_type=gradient_type)
    wide = reducer(comm, method)
    for step in range(3):
        stored = narrowed(normal(comm, step), gradient_type)
        narrow.step(put("cuda", stored))
        wide.step(put("cuda", widened(stored, gradient_type)))
        assert np.array_equal(get(narrow.update), get(wide.update))


def test_what_a_gpu_does_not_take_is_named(comm: MPI.Intracomm) -> None:
    import cupy

    reduced, gradient = reducer(comm, "oktopk"), normal(comm, 0)
    own = reduced.backend.device.id  # type: ignore[attr-defined]
    other = (own + 1) % gpus()
    with cupy.cuda.Device(other):
        elsewhere = put("cuda", gradient)
    for given, error, message in (
        (gradient, TypeError, rf"ndarray, not a cupy array on GPU {own}: cupy\.asarray"),
        (put("cuda", gradient.astype(np.float64)), TypeError, "float64 is not float32"),
        (put("cuda", gradient[1:]), ValueError, rf"shape \({LENGTH - 1},\) is not \({LENGTH},\)"),
        (put("cuda", np.repeat(gradient, 2))[::2], ValueError, r"not contiguous: pass cupy\.ascontiguous"),
        (elsewhere, ValueError, rf"is on GPU {other}, not on GPU {own}.*Device\({other}\)\.use\(\)"),
    ):
        if other != own or given is not elsewhere:
            with pytest.raises(error, match=message):
                reduced.step(given)
    with pytest.raises(TypeError, match="float32 is not uint16, which holds bfloat16"):
        reducer(comm, "oktopk", gradient_type="bfloat16").step(put("cuda", gradient))


def test_a_step_runs_on_its_own_gpu_whatever_the_caller_made_current(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    if gpus() < 2:
        pytest.skip("one GPU is always the current one")
    on_gpu, on_cpu = reducer(comm, "oktopk"), reducer(comm, "oktopk", device="cpu")
    gradients = [normal(comm, step) for step in range(6)]
    given = [put("cuda", gradient) for gradient in gradients]
    begin, seen = on_gpu._begin, []

    def noted(*arguments: Any, **keywords: Any) -> Any:
        seen.append(cupy.cuda.runtime.getDevice())
        return begin(*arguments, **keywords)

    monkeypatch.setattr(on_gpu, "_begin", noted)
    own = on_gpu.backend.device.id  # type: ignore[attr-defined]
    other = (own + 1) % gpus()
    cupy.cuda.Device(other).use()
    try:
        for gradient, same in zip(given, gradients, strict=True):
            on_gpu.step(gradient)
            on_cpu.step(same)
            assert cupy.cuda.runtime.getDevice() == other
        assert seen == [own] * len(gradients)
    finally:
        cupy.cuda.Device(own).use()
    assert np.array_equal(get(on_gpu.update), on_cpu.update)
