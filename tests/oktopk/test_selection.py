"""Local selection: the exact top k when asked, about k in between, never above the cap, nothing lost."""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.cpu.kernels import bits_magnitude
from collectives.mpi import MpiTransport
from oktopk.cpu import kernels as host_kernels
from oktopk.cpu.kernels import BLOCK
from oktopk.selection import LocalSelection, Selection
from tests.oracle import top_k

Vector = NDArray[np.float32]

TINY = float(np.float32(1e-45))  # the smallest denormal, whose bits are 1
LARGEST = float(np.finfo(np.float32).max)


class Rank:
    """One rank's selection with its residual, checked in every step for what always holds."""

    def __init__(self, length: int, k: int, kernels: ModuleType = host_kernels) -> None:
        self.k = k
        self.residual = np.zeros(length, np.float32)
        self.transport = MpiTransport(MPI.COMM_SELF)
        self.selection = LocalSelection(length, kernels, self.transport)

    def step(self, gradient: Vector, exact: bool = False, clear: bool = True) -> Selection:
        given_gradient, accumulated = gradient.copy(), self.residual + gradient
        selected = self.selection.select(gradient, self.residual, self.k, exact)
        assert selected.nonfinite == 0
        # conservation: nothing has left the residual, and what is packed is what it holds
        assert self.residual.tobytes() == accumulated.tobytes()
        assert gradient.tobytes() == given_gradient.tobytes()
        indices = selected.packed.indices.tolist()
        assert selected.packed.values.tobytes() == accumulated[indices].tobytes()
        assert selected.packed.nnz <= 5 * self.k // 4
        if exact:
            assert selected.exact
        if selected.exact:
            assert indices == top_k(accumulated.astype(np.float64), self.k).tolist()
            nonzeros = np.count_nonzero(accumulated)
            kth = np.sort(np.abs(accumulated))[-self.k] if nonzeros >= self.k else TINY
            assert selected.threshold == kth
        else:
            assert indices == np.flatnonzero(np.abs(accumulated) >= selected.threshold).tolist()
            assert selected.threshold > 0
        if clear:
            self.residual[indices] = 0
        return selected


def heavy_tailed(seed: Any, length: int, scale: float = 1.0) -> Vector:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(length) ** 3 * scale).astype(np.float32)


def counted_kernels(length: int) -> tuple[ModuleType, Counter[str]]:
    """The host kernels, counting by name the calls that read a vector of this length."""
    passes: Counter[str] = Counter()
    module = ModuleType("counted_kernels")

    def counted(name: str, kernel: Any) -> Any:
        def call(*arguments: Any) -> Any:
            passes[name] += any(
                isinstance(argument, np.ndarray)
                and argument.shape == (length,)
                and argument.dtype == np.float32
                for argument in arguments
            )
            return kernel(*arguments)

        return call

    for name, value in vars(host_kernels).items():
        setattr(module, name, counted(name, value) if callable(value) else value)
    return module, passes


SCALES = [1, 1, 100, 1, 1e-3, 1e-3, 1e6, 1, 1e-20, 1e-42, 1e10, 0, 0, 1]


@pytest.mark.parametrize(
    ("length", "k"), [(1, 1), (5, 1), (5, 5), (100, 25), (1000, 1), (9001, 90), (9001, 9001)]
)
@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("forget", [False, True], ids=["error feedback", "fresh residual"])
def test_exact_steps_are_the_top_k_whatever_the_scale(
    length: int, k: int, interval: int, forget: bool
) -> None:
    rank = Rank(length, k)
    for step, scale in enumerate(SCALES):
        if forget:
            rank.residual.fill(0)
        rank.step(heavy_tailed((length, step), length, scale), exact=step % interval == 0)


UGLY = {
    "constant": np.full(500, -3, np.float32),
    "zero": np.zeros(500, np.float32),
    "negative zero": np.full(500, -0.0, np.float32),
    "smallest denormals": np.full(500, TINY, np.float32),
    "denormals": (np.arange(500) % 7 * TINY).astype(np.float32),
    "one nonzero": np.eye(1, 500, 77, np.float32)[0],
    "ties at the threshold": np.repeat(np.array([5, 4, 3, 2, 0], np.float32), 100),
    "ties below a few": np.concatenate([np.full(20, 9), np.ones(480)]).astype(np.float32),
    "largest": np.where(np.arange(500) % 2, LARGEST, 1).astype(np.float32),
    "mass at the end": np.where(np.arange(500) < 480, 0, 7).astype(np.float32),
}


@pytest.mark.parametrize("k", [1, 3, 25, 499, 500])
@pytest.mark.parametrize("kind", UGLY)
def test_ugly_vectors_are_selected_by_the_same_rules(kind: str, k: int) -> None:
    rank = Rank(500, k)
    for step in range(6):
        rank.residual.fill(0)
        rank.step(UGLY[kind], exact=step in (0, 4), clear=False)


@pytest.mark.parametrize("k", [10, 100, 250, 1000])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_every_step_selects_k_of_quantised_gradients(levels: int, k: int) -> None:
    length, rng = 1000, np.random.default_rng(levels)
    rank = Rank(length, k)
    for step in range(12):
        gradient = rng.integers(1, levels + 1, length) * rng.choice([-1, 1], length)
        if step % 2:
            rank.residual.fill(0)
        nonzeros = np.count_nonzero(rank.residual + gradient)
        assert rank.step(gradient.astype(np.float32)).packed.nnz == min(k, nonzeros)


@pytest.mark.parametrize(("equal", "again"), [(5, False), (6, True)])
def test_many_equal_entries_make_the_next_step_exact_and_leave_the_trend(equal: int, again: bool) -> None:
    k, rank = 100, Rank(1000, 100)
    rank.step(heavy_tailed(0, 1000))
    rank.selection.trend = 1234
    vector = np.arange(1, 1001, dtype=np.float32)[::-1].copy() + 1e4
    vector[k - 1 : k - 1 + equal] = vector[k - 1]
    rank.residual.fill(0)
    assert rank.step(vector, exact=True).packed.nnz == k
    assert rank.selection.needs_exact == again
    assert (rank.selection.trend == 1234) == again
    rank.residual.fill(0)
    assert rank.step(vector).exact == again


@pytest.mark.parametrize("k", [1, 2, 10, 19])
def test_few_entries_that_differ_leave_the_next_step_regular(k: int) -> None:
    rank = Rank(1000, k)
    vector = np.arange(1, 1001, dtype=np.float32)
    for _ in range(2):
        rank.residual.fill(0)
        assert rank.step(vector, exact=True).packed.nnz == k
        assert not rank.selection.needs_exact
    rank.residual.fill(0)
    rank.residual[: 1000 - k] = -vector[: 1000 - k]  # k candidates and no more
    assert rank.step(vector, exact=True).packed.nnz == k
    assert not rank.selection.needs_exact


TIED = st.sampled_from([0.0, -0.0, TINY, -2 * TINY, 1.0, -1.0, 1.5, 2.0, -3.0, 1e30])


@given(
    st.lists(
        st.lists(st.one_of(TIED, st.floats(-1e6, 1e6, width=32)), min_size=30, max_size=30),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 30),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_any_steps_keep_the_rules(gradients: list[list[float]], k: int, exact: list[bool]) -> None:
    rank = Rank(30, k)
    for gradient, now in zip(gradients, exact, strict=False):
        rank.step(np.array(gradient, np.float32), exact=now)


def test_the_first_step_is_exact_unasked() -> None:
    assert Rank(1000, 50).step(heavy_tailed(0, 1000)).exact


def test_steady_steps_read_the_vector_once_and_stay_near_k() -> None:
    length, k = 40_000, 400
    kernels, passes = counted_kernels(length)
    rank = Rank(length, k, kernels)
    counts: list[int] = []
    for step in range(40):
        if step == 8:  # the residual has settled
            passes.clear()
            counts.clear()
        counts.append(rank.step(heavy_tailed(step, length), exact=step % 16 == 0).packed.nnz)
    assert +passes == {"accumulate_select": 32}
    assert np.mean(np.abs(np.array(counts) - k)) <= 0.12 * k


def test_the_selection_keeps_up_with_residuals_that_grow() -> None:
    # only a quarter of what is selected is applied: residuals, and with them the threshold, grow for hundreds of steps
    length, k = 50_000, 500
    rank, missed = Rank(length, k), []
    for step in range(120):
        selected = rank.step(heavy_tailed(step, length), exact=step % 32 == 0, clear=False)
        indices = selected.packed.indices
        rank.residual[indices[::4]] = 0
        if step > 40 and not selected.exact:
            missed.append(selected.packed.nnz / k - 1)
    assert len(missed) > 70
    assert abs(np.mean(missed)) < 0.02  # without a trend it is 4.6 % too much
    assert np.abs(missed).mean() < 0.04


@pytest.mark.parametrize("jump", [100.0, 1e30])
def test_an_overflow_after_a_change_of_regime_repeats_the_pass_once(jump: float) -> None:
    length, k = 20_000, 200
    kernels, passes = counted_kernels(length)
    rank = Rank(length, k, kernels)
    for step in range(4):
        rank.step(heavy_tailed(step, length))
    passes.clear()
    rank.residual.fill(0)
    overflowing, reused = heavy_tailed(4, length, jump), rank.selection.bits
    assert reused is not None
    assert np.count_nonzero(np.abs(overflowing) >= bits_magnitude(reused)) > 2 * k
    assert rank.step(overflowing).exact
    assert passes["accumulate_select"] == passes["select_at_least"] == 1
    assert passes["magnitude_histogram"] <= 3
    # and the new regime is followed from there
    passes.clear()
    rank.residual.fill(0)
    assert not rank.step(heavy_tailed(5, length, jump)).exact
    assert +passes == {"accumulate_select": 1}


def test_a_list_just_too_short_for_the_reused_threshold_loses_nothing() -> None:
    length, k = 10 * BLOCK, 400
    reached = []
    for jump in (1.3, 1.5, 1.7, 2.0, 2.5):
        rank = Rank(length, k)
        rank.step(heavy_tailed(0, length))
        rank.residual.fill(0)
        gradient, reused = heavy_tailed(1, length, jump), rank.selection.bits
        assert reused is not None
        reached.append(np.count_nonzero(np.abs(gradient) >= bits_magnitude(reused)) / k)
        rank.step(gradient)
    # on either side of the cap of 5k/4 and of the 2k that the list holds
    assert [sum(low <= each < high for each in reached) > 0 for low, high in ((1.25, 2), (2, 3), (3, 9))] == [
        True
    ] * 3


def test_far_fewer_than_k_force_an_exact_step_next() -> None:
    length, k = 5000, 100
    rank = Rank(length, k)
    rank.step(heavy_tailed(0, length))
    rank.residual.fill(0)
    starved = rank.step(heavy_tailed(1, length, 1e-3))
    assert not starved.exact
    assert starved.packed.nnz < k / 2
    # also when the state is reloaded in between
    other = Rank(length, k)
    other.selection.load_state_dict(rank.selection.state_dict())
    for each in (rank, other):
        each.residual.fill(0)
        recovered = each.step(heavy_tailed(2, length, 1e-3))
        assert recovered.exact
        assert recovered.packed.nnz == k


@pytest.mark.parametrize("nonzeros", [0, 1, 30])
def test_fewer_than_k_nonzeros_are_all_selected_without_exact_steps_for_ever(nonzeros: int) -> None:
    length, k = 5000, 100
    rank = Rank(length, k)
    rank.step(heavy_tailed(0, length))
    sparse = np.zeros(length, np.float32)
    sparse[:: length // max(1, nonzeros)][:nonzeros] = 1e-3
    exact, counts = [], []
    for _ in range(6):
        rank.residual.fill(0)
        selected = rank.step(sparse)
        exact.append(selected.exact)
        counts.append(selected.packed.nnz)
    # one step under the old threshold, one that learns, and then all that there is
    assert exact == [False, True, False, False, False, False]
    assert counts[1:] == [nonzeros] * 5


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, LARGEST])
def test_nonfinite_sums_pack_nothing_and_make_the_next_step_exact(bad: float, first: bool) -> None:
    length = BLOCK + 50
    rank = Rank(length, 40)
    if not first:
        rank.step(heavy_tailed(0, length))
    rank.residual[[3, length - 1]] = LARGEST / 2 if bad == LARGEST else 0
    gradient, before = heavy_tailed(1, length, 1e-3), rank.residual.copy()
    gradient[[3, length - 1]] = bad
    selected = rank.selection.select(gradient, rank.residual, 40, False)
    assert selected.nonfinite == 2
    assert selected.packed.nnz == 0
    finite = np.ones(length, bool)
    finite[[3, length - 1]] = False
    assert rank.residual[~finite].tolist() == before[~finite].tolist()
    assert rank.residual[finite].tobytes() == (before[finite] + gradient[finite]).tobytes()
    assert rank.step(heavy_tailed(2, length, 1e-3)).exact


def test_k_may_change_between_steps() -> None:
    rank = Rank(3000, 300)
    for step, k in enumerate((300, 30, 30, 3000, 3000, 1, 1, 700)):
        rank.k = k
        rank.step(heavy_tailed(step, 3000))


def test_the_packed_list_takes_two_k_and_a_block() -> None:
    rank = Rank(50_000, 500)
    for step, scale in enumerate((1, 1, 100, 1)):
        rank.step(heavy_tailed(step, 50_000, scale))
    assert rank.transport.workspace.nbytes == 8 * (2 * 500 + BLOCK)
