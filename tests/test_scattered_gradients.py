"""Steps among peers that read a gradient in pieces do to the bit what they do with one vector; where there are GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from oktopk import GradientAllreduce, NonFiniteGradientError
from tests.devices import get, gpus, narrowed, put, use

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(not gpus(), reason="no GPU")]
SIZES = [9, 40_001, 1, 1, 0, 30_522, 4096, 20_000, 3]
LENGTH = sum(SIZES)
TRUSTED = 8
SAME = "exact skipped complete local_nnz global_nnz words messages control_words global_threshold local_threshold"


@pytest.fixture
def device(comm: MPI.Intracomm) -> str:
    use("cuda", comm)
    return "cuda"


def pair(comm: MPI.Intracomm, **settings: Any) -> tuple[GradientAllreduce, GradientAllreduce, Any]:
    """Two reducers alike, and a gradient in pieces for the second one."""
    chosen: dict[str, Any] = {"density": 0.02, "threshold_interval": 8, "boundary_interval": 8} | settings
    flat, scattered = (
        GradientAllreduce(comm, LENGTH, "oktopk", device="cuda", peer_memory=True, **chosen) for _ in range(2)
    )
    assert scattered.without_peers == ""
    return flat, scattered, scattered.scattered(SIZES, "float32")


class Draw:
    """Gradients with a heavy tail, without some of their pieces; of float32 whose bits fit a narrower type."""

    def __init__(self, comm: MPI.Intracomm, gradient_type: str) -> None:
        self._rng = np.random.default_rng(comm.rank)
        self._gradient_type = gradient_type
        self._kept: list[Any] = []

    def __call__(self, gradient: Any, moved: bool, loud: float = 1.0, poison: bool = False) -> NDArray[Any]:
        """A gradient, put into pieces that are new ones or those of the last step; and as one vector."""
        vector = (self._rng.standard_normal(LENGTH) ** 3 * loud).astype(np.float32)
        if self._gradient_type == "bfloat16":
            # what rounds to nearest as it does by its upper half: the lower one is below a half
            vector = (vector.view(np.uint32) & np.uint32(0xFFFF7FFF)).view(np.float32)
        if poison:
            vector[[5, 40_100]] = np.inf, np.nan
        ends = np.cumsum(SIZES)
        parts = [vector[end - size : end] for end, size in zip(ends, SIZES, strict=True)]
        missing = {6} if moved else {0, 2}
        if moved or not self._kept:
            self._kept = [put("cuda", part.copy()) for part in parts]
        for number, (home, part) in enumerate(zip(self._kept, parts, strict=True)):
            if number in missing:
                part[:] = 0
            home.set(part)
        addresses = [0 if n in missing else home.data.ptr for n, home in enumerate(self._kept)]
        gradient.place(addresses)
        return narrowed(vector, self._gradient_type)


def assert_alike(flat: GradientAllreduce, scattered: GradientAllreduce, first: Any, second: Any) -> None:
    for name in SAME.split():
        one, other = getattr(first, name), getattr(second, name)
        assert one == other or one != one, name
    assert get(flat.update).tobytes() == get(scattered.update).tobytes()
    assert get(flat.residual).tobytes() == get(scattered.residual).tobytes()


@pytest.mark.parametrize("deferred", [False, True], ids=["waited for", "deferred"])
@pytest.mark.parametrize("gradient_type", ["float32", "bfloat16"])
def test_pieces_give_the_bits_of_one_vector_on_cuda(
    device: str, comm: MPI.Intracomm, gradient_type: str, deferred: bool
) -> None:
    """Exact and regular steps, some that need the host's help, some that are not finite; in pieces that stay and that move."""
    flat, scattered, gradient = pair(
        comm, gradient_type=gradient_type, deferred=deferred, nonfinite="skip", average=False
    )
    draw = Draw(comm, gradient_type)
    last = comm.rank == comm.size - 1
    late = 0
    for step in range(48):
        loud = 4096.0 if step in (13, 31) and last else 1.0
        vector = draw(gradient, moved=step % 3 == 0, loud=loud, poison=step in (5, 27, 38) and last)
        assert scattered.reads_pieces()
        if deferred:  # all are that may be
            flat._unaided = scattered._unaided = TRUSTED
        first, second = flat.step(put(device, vector)), scattered.step(gradient)
        late += not second.complete
        assert_alike(flat, scattered, first, second)
        flat.complete()
        scattered.complete()
        assert_alike(flat, scattered, first, second)
        assert first.skipped == (step in (5, 27, 38))
    assert late > 8 or not deferred
    flat.close()
    scattered.close()


def test_steps_of_pieces_that_move_replay_one_graph_on_cuda(device: str, comm: MPI.Intracomm) -> None:
    flat, scattered, gradient = pair(comm)
    draw = Draw(comm, "float32")
    for _ in range(12):
        draw(gradient, moved=True)
        scattered.step(gradient)
    graphs = scattered._instance("oktopk")._peers.kernels._graphs  # type: ignore[attr-defined]
    assert len(graphs) == 1
    assert all(graphs.values())
    flat.close()
    scattered.close()


def test_a_gradient_in_pieces_that_is_not_finite_leaves_the_residual_on_cuda(
    device: str, comm: MPI.Intracomm
) -> None:
    flat, scattered, gradient = pair(comm, gradient_type="bfloat16")
    draw = Draw(comm, "bfloat16")
    for step in range(11):
        draw(gradient, moved=True)
        scattered.step(gradient)
        before = get(scattered.residual)
        draw(gradient, moved=False, poison=comm.rank == 0)
        with pytest.raises(NonFiniteGradientError, match=r"rank\(s\) 0$"):
            scattered.step(gradient)
        # to the rounding of what was added
        assert np.allclose(get(scattered.residual), before, rtol=1e-4, atol=1e-5), step
        assert not get(scattered.update).any()
    flat.close()
    scattered.close()


def test_steps_that_cannot_read_pieces_say_so_on_cuda(device: str, comm: MPI.Intracomm) -> None:
    flat, scattered, gradient = pair(comm, dense_warmup_steps=1, density_warmup_steps=4)
    vector = put(device, np.ones(LENGTH, np.float32))
    said = []
    for _ in range(8):
        said.append(scattered.reads_pieces())
        assert not scattered.reads_pieces(measure=True)
        if said[-1]:
            with pytest.raises(ValueError, match="this step reads no gradient in pieces"):
                scattered.step(gradient, measure=True)
            scattered.step(gradient)
        else:
            with pytest.raises(ValueError, match="this step reads no gradient in pieces"):
                scattered.step(gradient)
            assert scattered.step(vector).method in ("dense", "oktopk")
    assert said[0] is False
    assert said[-1] is True
    with pytest.raises(ValueError, match=f"sizes add up to 3, not to {LENGTH}"):
        scattered.scattered([1, 2], "float32")
    with pytest.raises(ValueError, match="element_type 'float64' is not one of float32, bfloat16, float16"):
        scattered.scattered(SIZES, "float64")
    flat.close()
    scattered.close()
    for settings in (
        {"peer_memory": False},
        {"peer_memory": True, "momentum_correction": 0.5},
        {"peer_memory": True, "density": 0.5},
    ):
        other = GradientAllreduce(comm, LENGTH, "oktopk", device="cuda", **settings)
        assert not other.may_read_pieces
        assert not other.reads_pieces()
        with pytest.raises(RuntimeError, match="no step of this reducer reads a gradient in pieces"):
            other.scattered(SIZES, "float32")
        with pytest.raises(ValueError, match="this step reads no gradient in pieces"):
            other.step(gradient)
        other.close()
