"""Steps among peers that read a gradient in pieces do to the bit what they do with one vector; where there are GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from oktopk import GradientAllreduce
from oktopk.results import StepReport
from tests.devices import asynchronous, get, hold_up, narrowed, on_gpus, put
from tests.peers import among_peers

pytestmark = [pytest.mark.mpi, on_gpus, pytest.mark.host_cuda(ranks=3)]
SIZES = [9, 20_001, 1, 1, 0, 9_522, 4096, 6_000, 3]
BEGINS = [sum(SIZES[:number]) for number in range(len(SIZES))]
LENGTH = sum(SIZES)
SAME = "exact skipped complete local_nnz global_nnz words messages control_words global_threshold local_threshold"


def pair(comm: MPI.Intracomm, **settings: Any) -> tuple[GradientAllreduce, GradientAllreduce, Any]:
    """Two reducers alike, and a gradient in pieces for the second one."""
    chosen: dict[str, Any] = {"density": 0.05, "threshold_interval": 8, "boundary_interval": 8} | settings
    flat, scattered = (among_peers(comm, LENGTH, **chosen) for _ in range(2))
    return flat, scattered, scattered.gradient_tensors(SIZES, "float32")


def assert_alike(first: StepReport, second: StepReport) -> None:
    for name in SAME.split():
        one, other = getattr(first, name), getattr(second, name)
        assert one == other or one != one, (first.step, name)


def drawn(
    rng: np.random.Generator, gradient_type: str, loud: float = 1.0, poison: bool = False
) -> NDArray[np.float32]:
    """A gradient with a heavy tail as one vector; of float32 whose bits fit a narrower type."""
    vector = (rng.standard_normal(LENGTH) ** 3 * loud).astype(np.float32)
    if gradient_type == "bfloat16":
        # what rounds to nearest as it does by its upper half: the lower one is below a half
        vector = (vector.view(np.uint32) & np.uint32(0xFFFF7FFF)).view(np.float32)
    if poison:
        vector[[5, 20_100]] = np.inf, np.nan
    return vector


def missing_pieces(moved: bool) -> set[int]:
    return {6} if moved else {0, 2}


class Homes:
    """Where pieces lie: in one memory on the GPU, where those of the last steps are written over, each behind its step.

    Nothing here waits for the GPU.
    """

    TURNS = 3

    def __init__(self) -> None:
        self._stride = LENGTH + 8 * len(SIZES)
        self._memory = put("cuda", np.full(self.TURNS * self._stride, np.nan, np.float32))
        self._turn = 0

    def take(self, vector: Any, moved: bool) -> list[int]:
        """Copy a gradient into pieces that are elsewhere, or where those of the last step were; their addresses."""
        self._turn += moved
        turn = self._turn % self.TURNS
        # in either order, with gaps, so that they begin at multiples of 4 to 16 bytes
        order = range(len(SIZES)) if turn != 1 else range(len(SIZES) - 1, -1, -1)
        at, addresses = turn * self._stride, [0] * len(SIZES)
        for number in order:
            size, begin = SIZES[number], BEGINS[number]
            if number not in missing_pieces(moved):
                addresses[number] = self._memory.data.ptr + 4 * at
                self._memory[at : at + size] = vector[begin : begin + size]
            at += size + 1 + (number + turn) % 7
        return addresses

    def spoil(self) -> None:
        """Write over them, once what is on the stream has ended."""
        begin = self._turn % self.TURNS * self._stride
        self._memory[begin : begin + self._stride].fill(np.nan)


# the type is read before a step knows whether it is waited for: each value once
@pytest.mark.parametrize(("gradient_type", "deferred"), [("float32", False), ("bfloat16", True)])
def test_pieces_give_the_bits_of_one_vector_on_cuda(
    cuda: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, gradient_type: str, deferred: bool
) -> None:
    """Exact and regular steps, some that need the host's help, some that are not finite; in pieces that stay and that move.

    From one vector each is looked at; from pieces all are given to the stream first, however late it is. Pieces are written over
    right behind the step, and are elsewhere before it has begun.
    """
    monkeypatch.setattr("oktopk.steps._TRUSTED", 0)  # all are deferred that may be
    steps, poisoned, loud = 18, (5, 15), (9, 13)
    flat, scattered, gradient = pair(
        comm, gradient_type=gradient_type, deferred=deferred, nonfinite="skip", average=False
    )
    rng = np.random.default_rng(comm.rank)
    last = comm.rank == comm.size - 1
    vectors = np.zeros((steps, LENGTH), np.float32)
    moves = [step % 4 != 3 for step in range(steps)]
    expected: list[tuple[StepReport, bool, bytes, bytes]] = []
    for step in range(steps):
        vectors[step] = drawn(
            rng, gradient_type, 4096.0 if step in loud and last else 1.0, step in poisoned and last
        )
        whole = vectors[step].copy()
        for number in missing_pieces(moves[step]):
            whole[BEGINS[number] : BEGINS[number] + SIZES[number]] = 0
        report = flat.step(put(cuda, narrowed(whole, gradient_type)))
        late = not report.complete
        flat.complete()
        expected.append((report, late, get(flat.update).tobytes(), get(flat.residual).tobytes()))

    sources, homes = put(cuda, vectors), Homes()
    updates, residuals = (put(cuda, np.zeros((steps, LENGTH), np.float32)) for _ in range(2))
    reports: list[StepReport] = []
    late_ones, overlapping = 0, 0
    held = hold_up(0)
    for step in range(steps):
        gradient.set_pointers(homes.take(sources[step], moves[step]))
        assert scattered.reads_tensors()
        overlapping += held()
        if reports:
            assert reports[-1].complete != expected[step - 1][1]
        held = hold_up()
        reports.append(scattered.step(gradient))
        late_ones += not reports[-1].complete
        homes.spoil()
        updates[step, :] = scattered.update
        residuals[step, :] = scattered.residual
    scattered.complete()
    for step, (report, wanted) in enumerate(zip(reports, expected, strict=True)):
        assert_alike(wanted[0], report)
        assert report.skipped == (step in poisoned)
        assert get(updates[step]).tobytes() == wanted[2], step
        if not (deferred and report.skipped):  # then it is exact only after `complete`
            assert get(residuals[step]).tobytes() == wanted[3], step
    assert late_ones > 5 or not deferred
    assert overlapping > 5 or not (deferred and asynchronous())
    for step in range(6, 13):  # the first one renews regions, perhaps with tiles that need other graphs
        # every second one is waited for, also behind one that was given up
        scattered._trust, scattered._last_k = step % 2, reports[0].k
        gradient.set_pointers(homes.take(sources[step], True))
        scattered.step(gradient)
        scattered.complete()
    graphs = scattered._executors["oktopk"].launches._graphs._graphs  # type: ignore[attr-defined]
    assert len(graphs) == 1 + deferred and all(graphs.values())  # though pieces move


def test_steps_that_cannot_read_pieces_say_so_on_cuda(cuda: str, comm: MPI.Intracomm) -> None:
    flat, scattered, gradient = pair(comm, dense_warmup_steps=1, density_warmup_steps=4)
    vector = put(cuda, np.ones(LENGTH, np.float32))
    said = []
    for _ in range(8):
        said.append(scattered.reads_tensors())
        assert not scattered.reads_tensors(measure=True)
        if said[-1]:
            with pytest.raises(ValueError, match="this step reads no tensor list"):
                scattered.step(gradient, measure=True)
            scattered.step(gradient)
        else:
            with pytest.raises(ValueError, match="this step reads no tensor list"):
                scattered.step(gradient)
            assert scattered.step(vector).method in ("dense", "oktopk")
    assert said[0] is False
    assert said[-1] is True
    with pytest.raises(ValueError, match=f"sizes add up to 3, not to {LENGTH}"):
        scattered.gradient_tensors([1, 2], "float32")
    with pytest.raises(ValueError, match="element_type 'float64' is not one of float32, bfloat16, float16"):
        scattered.gradient_tensors(SIZES, "float64")
    flat.close()
    scattered.close()
    for settings in (
        {"peer_memory": False},
        {"peer_memory": True, "density": 0.5},
    ):
        other = GradientAllreduce(comm, LENGTH, "oktopk", device="cuda", **settings)
        assert not other.can_read_tensors
        assert not other.reads_tensors()
        with pytest.raises(RuntimeError, match="no step of this reducer reads a tensor list"):
            other.gradient_tensors(SIZES, "float32")
        with pytest.raises(ValueError, match="this step reads no tensor list"):
            other.step(gradient)
        other.close()
