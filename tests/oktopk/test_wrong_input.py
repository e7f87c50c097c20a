"""What a caller gets wrong is refused on every rank, in a sentence, before anything has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from oktopk import METHODS, GradientAllreduce, Settings
from oktopk.methods import SparseMethod
from oktopk.selection import Selection
from oktopk.settings import entries_kept
from oktopk.step import Plan, StepResult

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


@pytest.mark.parametrize("gradient", [None, [0.0] * LENGTH, 3])
def test_a_gradient_that_is_no_array_is_a_type_error(comm: MPI.Intracomm, gradient: Any) -> None:
    with pytest.raises(TypeError, match=r"gradient is a \w+, not a NumPy array"):
        stepped(comm).step(gradient)


class Forgetful(SparseMethod):
    """Writes one entry of its own in every step, and clears nothing."""

    name = "forgetful"

    def exchange(self, selection: Selection, out: NDArray[np.float32], plan: Plan) -> StepResult:
        selection.packed.entries = selection.packed.entries[:1]
        return StepResult(
            selection.packed,
            selection.packed,
            (),
            local_exact=True,
            local_nnz=1,
            global_nnz=selection.packed.nnz,
        )


def test_no_method_need_clear_the_update(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "forgetful", Forgetful)
    reducer = GradientAllreduce(comm, LENGTH, "forgetful", density=0.02)
    for step in range(5):
        gradient = np.zeros(LENGTH, np.float32)
        gradient[step] = 1000
        reducer.step(gradient)
        assert np.flatnonzero(reducer.update).tolist() == [step]


def shorter(state: dict[str, Any]) -> None:
    state["residual"] = state["residual"][:-1]


def longer(state: dict[str, Any]) -> None:
    state["residual"] = np.append(state["residual"], np.float32(0))


def of_another_type(state: dict[str, Any]) -> None:
    state["residual"] = state["residual"].astype(np.float64)


def not_finite(state: dict[str, Any]) -> None:
    state["residual"][3] = np.inf


def with_velocity(state: dict[str, Any]) -> None:
    state["velocity"] = np.zeros(LENGTH, np.float32)


def without_residual(state: dict[str, Any]) -> None:
    del state["residual"]


def without_selection(state: dict[str, Any]) -> None:
    del state["methods"]["oktopk"]["selection"]


def without_threshold(state: dict[str, Any]) -> None:
    del state["methods"]["oktopk"]["threshold"]


def with_regions_out_of_range(state: dict[str, Any]) -> None:
    state["methods"]["oktopk"]["boundaries"][-1] = LENGTH + 1


def with_regions_out_of_order(state: dict[str, Any]) -> None:
    state["methods"]["oktopk"]["boundaries"][0] = LENGTH


def of_an_unknown_method(state: dict[str, Any]) -> None:
    state["methods"]["other"] = {}


def without_velocity(state: dict[str, Any]) -> None:
    del state["velocity"]


def without_a_trend(state: dict[str, Any]) -> None:
    del state["methods"]["oktopk"]["selection"]["trend"]


def without_exact_due(state: dict[str, Any]) -> None:
    del state["methods"]["oktopk"]["selection"]["exact_due"]


def without_global_bits(state: dict[str, Any]) -> None:
    del state["methods"]["oktopk"]["threshold"]["bits"]


def with_a_threshold_that_is_negative(state: dict[str, Any]) -> None:
    state["methods"]["oktopk"]["threshold"]["bits"] = -5


def with_a_threshold_that_is_no_integer(state: dict[str, Any]) -> None:
    state["methods"]["oktopk"]["selection"]["bits"] = 1.5


def with_a_trend_that_is_nan(state: dict[str, Any]) -> None:
    state["methods"]["oktopk"]["selection"]["trend"] = float("nan")


def with_a_k_that_is_text(state: dict[str, Any]) -> None:
    state["last_k"] = "x"


DAMAGE = [
    (without_velocity, "the state lacks velocity"),
    (without_a_trend, "the state is damaged: KeyError 'trend'"),
    (without_exact_due, "the state is damaged: KeyError 'exact_due'"),
    (without_global_bits, "the state is damaged: KeyError 'bits'"),
    (
        with_a_threshold_that_is_negative,
        "the global threshold of the state is not the bits of a magnitude: -5",
    ),
    (
        with_a_threshold_that_is_no_integer,
        "the local threshold of the state is not the bits of a magnitude: 1.5",
    ),
    (with_a_trend_that_is_nan, "the trend of the local threshold of the state is not an integer: nan"),
    (with_a_k_that_is_text, "last_k 'x' of the state is not an integer >= 0"),
    (shorter, r"residual of the state is float32\[499\], not float32\[500\]"),
    (longer, r"residual of the state is float32\[501\], not float32\[500\]"),
    (of_another_type, r"residual of the state is float64\[500\], not float32\[500\]"),
    (not_finite, "residual of the state is not finite"),
    (with_velocity, "the state has a velocity, and this reducer no momentum correction"),
    (without_residual, "the state lacks residual"),
    (without_selection, "the state is damaged: KeyError 'selection'"),
    (without_threshold, "the state is damaged: KeyError 'threshold'"),
    (with_regions_out_of_range, "boundaries of the state do not ascend from 0 to 500"),
    (with_regions_out_of_order, "boundaries of the state do not ascend from 0 to 500"),
    (of_an_unknown_method, "the state is of unknown methods: other"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=lambda value: getattr(value, "__name__", ""))
def test_a_state_that_is_damaged_on_one_rank_is_refused_on_all(
    comm: MPI.Intracomm, damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    reducer = stepped(comm)
    before = reducer.state_dict()
    state = copy.deepcopy(before)
    damaged = comm.size - 1
    if comm.rank == damaged:
        damage(state)
    with pytest.raises(ValueError, match=f"rank {damaged}: {message}"):
        reducer.load_state_dict(state)
    after = reducer.state_dict()
    assert after["residual"].tobytes() == before["residual"].tobytes() and after["steps"] == before["steps"]
    reducer.load_state_dict(before)
    reducer.step(np.ones(LENGTH, np.float32))


def test_memory_that_one_rank_lacks_for_a_step_is_an_error_on_all(
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


@pytest.mark.parametrize(
    ("density", "length", "k"), [(0.07, 100, 7), (0.29, 100, 29), (0.01, 14_728_266, 147_283), (1e-9, 10, 1)]
)
def test_k_is_that_of_the_density_as_it_is_written(density: float, length: int, k: int) -> None:
    assert entries_kept(density, length) == k
