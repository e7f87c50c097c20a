"""What a caller gets wrong is refused on every rank, in a sentence, before anything has changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from oktopk import METHODS, GradientAllreduce, Settings

pytestmark = pytest.mark.mpi
LENGTH = 500


def stepped(comm: MPI.Intracomm, method: str = "oktopk", **settings: Any) -> GradientAllreduce:
    """A reducer after four steps."""
    reducer = GradientAllreduce(comm, LENGTH, method, **{"density": 0.02, "threshold_interval": 3} | settings)
    rng = np.random.default_rng(comm.rank)
    for _ in range(4):
        reducer.step(rng.standard_normal(LENGTH).astype(np.float32))
    return reducer


def test_the_update_cannot_be_written_to_unless_it_is_said(comm: MPI.Intracomm) -> None:
    reducer = stepped(comm)
    with pytest.raises(ValueError, match="read-only"):
        reducer.update[:] = 7
    with pytest.raises(ValueError, match="read-only"):
        reducer.update += 1  # type: ignore[misc]
    reducer.writable_update[:] = 7
    reducer.forget_support()
    report = reducer.step(np.ones(LENGTH, np.float32))
    assert np.count_nonzero(reducer.update) == report.global_nnz


@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_that_is_the_update_is_refused(comm: MPI.Intracomm, method: str) -> None:
    reducer = stepped(comm, method)
    with pytest.raises(ValueError, match="own update"):
        reducer.step(reducer.update)


@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [
        *((given, TypeError, r"gradient is a \w+, not a NumPy array") for given in (None, [0.0] * LENGTH, 3)),
        (np.zeros(LENGTH), TypeError, "float64 is not float32"),
        (np.zeros(499, np.float32), ValueError, r"\(499,\) is not \(500,\)"),
        (np.zeros(2 * LENGTH, np.float32)[::2], ValueError, "not contiguous"),
    ],
)
def test_a_gradient_of_another_kind_is_named(
    comm: MPI.Intracomm, gradient: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        stepped(comm).step(gradient)


def test_memory_that_one_rank_lacks_is_an_error_on_all(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    reducer = stepped(comm, dense_warmup_steps=0)
    take = reducer.backend.zeros

    def none_left(length: int) -> Any:
        if comm.rank == comm.size - 1:
            raise MemoryError("no memory for the sampler")
        return take(length)

    monkeypatch.setattr(reducer.backend, "zeros", none_left)
    with pytest.raises(ValueError, match=f"rank {comm.size - 1}: no memory for the sampler"):
        reducer.step(np.ones(LENGTH, np.float32), measure=True)


def test_numbers_of_numpy_are_numbers() -> None:
    settings = Settings(density=np.float32(0.07), threshold_interval=np.int64(8), average=np.bool_(True))  # type: ignore[arg-type]
    assert settings == Settings(density=0.07, threshold_interval=8)
    assert type(settings.density) is float and type(settings.threshold_interval) is int
