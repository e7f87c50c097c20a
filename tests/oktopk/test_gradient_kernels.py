"""Kernels that touch gradients, against NumPy and plain Python, around the edges of their blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from collectives.cpu.lanes import LANES
from collectives.sparse import ENTRY
from oktopk.cpu import kernels
from oktopk.cpu.accumulate import HostDisplacement
from oktopk.cpu.adamw import HostAdamW
from oktopk.cpu.histograms import LEVELS
from oktopk.cpu.kernels import BLOCK
from oktopk.cuda.adamw import DeviceAdamW
from oktopk.cuda.displacement import DeviceDisplacement
from oktopk.displacement import ParameterDisplacement, adamw_terms
from tests.sides import (
    SENTINEL,
    Side,
    Vector,
    check_adamw,
    check_displacement,
    check_select,
    check_shard_sums,
    magnitude_bits,
)

TINY = np.float32(1e-45)  # the smallest denormal, whose bits are 1
LARGEST = np.finfo(np.float32).max
INFINITY_BITS = 0x7F800000
LENGTHS = [1, LANES - 1, LANES, LANES + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 13]
HOST = Side()

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
UGLY = st.sampled_from([0.0, -0.0, float(TINY), -float(TINY), 1.0, -1.0, float(LARGEST)])
WILD = st.one_of(FLOATS, UGLY, st.sampled_from([math.nan, math.inf, -math.inf, -float(LARGEST)]))


def integers(seed: int, length: int, most: int = 50) -> Vector:
    return np.random.default_rng((seed, length)).integers(-most, most + 1, length).astype(np.float32)


def check_accumulate_select(
    gradient: Vector, residual: Vector, magnitude: float, room: int | None = None
) -> None:
    """One pass on the host, which reads the gradient."""
    given_gradient = gradient.copy()
    check_select(HOST, given_gradient, gradient, HOST.hold(residual), magnitude, room)
    assert given_gradient.tobytes() == gradient.tobytes()


@pytest.mark.parametrize("threshold", [TINY, 40, 101])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_pass_accumulates_and_packs_what_reaches_the_threshold(length: int, threshold: float) -> None:
    check_accumulate_select(integers(1, length), integers(2, length), threshold)


@pytest.mark.parametrize(
    ("length", "missing"),
    [
        *((length, 0) for length in (BLOCK - 1, BLOCK)),
        *((3 * BLOCK + 13, missing) for missing in (0, 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 3 * BLOCK + 13)),
    ],
)
def test_a_pass_that_packs_everything_counts_on_where_its_list_is_full(length: int, missing: int) -> None:
    twos = np.full(length, 2, np.float32)
    check_accumulate_select(twos, integers(2, length, most=1), TINY, length - missing)


def test_a_pass_that_overflows_midway_accumulates_and_counts_to_the_end() -> None:
    gradient, residual = integers(5, 4 * BLOCK), integers(6, 4 * BLOCK)
    gradient[[3, BLOCK + 2, 4 * BLOCK - 1]] = np.nan, np.inf, -np.inf
    check_accumulate_select(gradient, residual, 30, room=100)


@pytest.mark.parametrize("length", [1, LANES - 1, LANES, 5 * LANES + 3])
@pytest.mark.parametrize("block", [1, LANES - 1, LANES, 3 * LANES + 5])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_shard_is_summed_in_the_order_of_its_rows(ranks: int, block: int, length: int) -> None:
    rows = np.random.default_rng((ranks, block, length)).standard_normal((ranks, length)).astype(np.float32)
    rows[:, length // 2] = [0, -np.inf, np.nan][:ranks]
    check_shard_sums(HOST, rows, block, shards=ranks, magnitude=1)


@pytest.mark.parametrize("element_type", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("check", [check_displacement, check_adamw])
def test_moves_are_rounded_where_it_is_said_and_added_as_a_vector(
    check: Callable[..., None], element_type: str
) -> None:
    check(HOST, element_type, [9, 2 * BLOCK + 3, 1, 1, 0, BLOCK, LANES + 5, 3])


def test_adamws_move_that_is_not_finite_leaves_the_residual_and_is_counted() -> None:
    gradient, residual = torch.tensor([0.0, 1.0, 3e38, -1.0]), np.full(4, 0.5, np.float32)
    first, second = torch.zeros(4), torch.zeros(4)
    displacement, entries = HostAdamW([4], "float32"), np.empty(4 + BLOCK, ENTRY)
    pointers = np.array([[each.data_ptr()] for each in (gradient, first, second)])
    displacement.set_step(pointers, np.array([adamw_terms(0.25, (0.9, 0.99), 0.0, 1)], np.float32))
    packing = kernels.accumulate_select(displacement, residual, 1, entries)
    # zero over zero; a square that overflows is a move of zero, as torch's
    assert (packing.nnz, packing.nonfinite) == (3, 1)
    assert residual.tolist() == pytest.approx([0.5, 0.75, 0.5, 0.25])
    assert second.tolist() == pytest.approx([0.0, 0.01, math.inf, 0.01])


def test_a_displacement_lacks_no_method() -> None:
    class Half(ParameterDisplacement):
        def set_pointers(self, addresses: Sequence[int]) -> None: ...

    with pytest.raises(TypeError, match="abstract.*show"):
        Half()  # type: ignore[abstract]
    for kind in (HostDisplacement, DeviceDisplacement, HostAdamW, DeviceAdamW):
        assert not kind.__abstractmethods__


@st.composite
def wild_vectors(draw: st.DrawFn) -> tuple[Vector, Vector]:
    """Gradient and residual, ugly around the edges of blocks and of lanes."""
    length = draw(st.sampled_from([1, LANES, LANES + 13, BLOCK, BLOCK + 1, 2 * BLOCK + 7]))
    near = [0, 1, LANES - 1, LANES, LANES + 12, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, length - 1]
    near = [i for i in near if i < length]
    place = st.one_of(st.sampled_from(near), st.integers(0, length - 1))
    gradient, residual = np.zeros(length, np.float32), np.zeros(length, np.float32)
    for vector, values in ((gradient, WILD), (residual, st.one_of(FLOATS, UGLY))):
        for i, value in draw(st.dictionaries(place, values, max_size=10)).items():
            vector[i] = value
    return gradient, residual


@given(
    wild_vectors(),
    st.one_of(st.sampled_from([float(TINY), 2 * float(TINY), math.inf]), FLOATS.map(abs)),
)
def test_nonfinite_sums_leave_the_residual_and_the_list_alone(
    vectors: tuple[Vector, Vector], magnitude: float
) -> None:
    check_accumulate_select(*vectors, max(float(TINY), magnitude))


@pytest.mark.parametrize("all_added", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_undo_gives_the_residual_back(length: int, all_added: bool) -> None:
    """Where not all sums were finite, and huge elements where all were added."""
    gradient, residual = integers(3, length), integers(4, length)
    if all_added:
        gradient[length - 1], residual[length - 1] = LARGEST, 0
    else:  # not finite; finite but overflowing; -0.0
        gradient[0], gradient[length // 2], gradient[length - 1] = np.nan, LARGEST, -np.inf
        residual[length // 2] = LARGEST
    after = residual.copy()
    kernels.accumulate_select(gradient, after, INFINITY_BITS, np.empty(BLOCK, ENTRY))
    assert length < 4 or not np.array_equal(after, residual)
    kernels.undo_accumulate(gradient, after, **({"all_added": True} if all_added else {}))
    assert after.tolist() == residual.tolist()


@pytest.mark.parametrize("length", LENGTHS)
def test_nonfinite_values_are_counted_in_vectors_and_lists(length: int) -> None:
    vector = integers(3, length)
    vector[length // 2] = LARGEST
    entries = np.zeros(length, ENTRY)
    entries["index"] = INFINITY_BITS
    for bad in (None, np.inf, -np.inf, np.nan):
        if bad is not None:
            vector[[0, length - 1]] = bad
        entries["value"] = vector
        expected = np.count_nonzero(~np.isfinite(vector))
        assert kernels.count_nonfinite(vector) == kernels.count_nonfinite(entries) == expected


@pytest.mark.parametrize("length", [1, 9, BLOCK + 1])
def test_accumulate_into_another_vector_counts_what_is_not_finite(length: int) -> None:
    gradient, residual = integers(1, length), integers(2, length)
    out = np.full(length, np.nan, np.float32)
    assert kernels.accumulate(gradient, residual, out) == 0
    assert np.array_equal(out, gradient + residual)
    assert kernels.accumulate(gradient, None, out) == 0
    assert np.array_equal(out, gradient)
    gradient[-1], residual[-1] = LARGEST, LARGEST
    assert kernels.accumulate(gradient, residual, out) == 1
    gradient[-1] = np.nan
    assert kernels.accumulate(gradient, None, out) == 1


@given(st.lists(st.one_of(UGLY, FLOATS), max_size=40), UGLY, st.integers(0, 6))
def test_select_packs_the_larger_ones_and_the_lowest_ties(
    values: list[float], threshold: float, ties: int
) -> None:
    vector = np.array(values, np.float32)
    magnitudes, bits = magnitude_bits(vector), max(1, int(magnitude_bits(threshold)[0]))
    wanted = sorted([*np.flatnonzero(magnitudes > bits), *np.flatnonzero(magnitudes == bits)[:ties]])
    entries = np.full(len(wanted) + 1, SENTINEL)
    packed = kernels.select_at_least(vector, bits, ties, entries)
    assert entries["index"][:packed].tolist() == wanted
    assert entries["value"][:packed].tobytes() == vector[wanted].tobytes()
    assert entries[packed] == SENTINEL


@pytest.mark.parametrize("packed", [False, True], ids=["vector", "entries"])
@given(values=st.lists(st.one_of(UGLY, FLOATS), min_size=1, max_size=40), chosen=st.integers(0, 39))
def test_histograms_count_nonzero_magnitudes_by_digit(packed: bool, values: list[float], chosen: int) -> None:
    vector = np.array(values, np.float32)
    given_values: NDArray[Any] = vector
    if packed:
        given_values = np.zeros(len(vector), ENTRY)
        given_values["index"], given_values["value"] = -1 - np.arange(len(vector)), vector
    nonzero = [int(bits) for bits in magnitude_bits(vector) if bits]
    followed = int(magnitude_bits(vector)[chosen % len(vector)])
    for level, (shift, width) in enumerate(LEVELS):
        prefix = followed >> (shift + width)
        expected = [0] * 2**width
        for bits in nonzero:
            if bits >> (shift + width) == prefix:
                expected[(bits >> shift) % 2**width] += 1
        counts = kernels.magnitude_histogram(given_values, level, prefix)
        assert counts.dtype == np.int64
        assert counts.tolist() == expected


@pytest.mark.parametrize("kind", ["heavy", "equal", "few", "denormal", "sorted"])
@pytest.mark.parametrize("length", [1, 100, 100_003])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.25, 1.0])
def test_a_histogram_of_the_top_is_exact_down_to_k(kind: str, length: int, share: float) -> None:
    rng = np.random.default_rng(length)
    values, k = rng.standard_t(2, length).astype(np.float32), max(1, int(share * length))
    if kind == "equal":
        values = np.full(length, -2, np.float32)
    elif kind == "few":
        values[rng.random(length) < 0.999] = -0.0
    elif kind == "denormal":
        values *= np.float32(1e-40)
    elif kind == "sorted":
        values.sort()
    whole, top = kernels.magnitude_histogram(values, 0, 0), kernels.top_histogram(values, k)
    assert top.sum() == whole.sum()
    reached, expected = np.cumsum(top[::-1]), np.cumsum(whole[::-1])
    needed = int(np.searchsorted(expected, k)) + 1
    assert reached[:needed].tolist() == expected[:needed].tolist()


def test_the_digits_of_a_histogram_tile_the_bits_of_a_magnitude() -> None:
    shifts = [shift for shift, _ in LEVELS]
    assert [shift + width for shift, width in LEVELS] == [31, *shifts[:-1]]
    assert shifts[-1] == 0


INDICES = st.lists(st.integers(0, 30), unique=True, max_size=20).map(sorted)


def pack(indices: Any, values: Any = None) -> NDArray[np.void]:
    entries = np.zeros(len(indices), ENTRY)
    entries["index"] = indices
    entries["value"] = 1 if values is None else values
    return entries


@given(INDICES, INDICES)
def test_clearing_common_places_zeroes_the_intersection_alone(mine: list[int], theirs: list[int]) -> None:
    expected = [0.0 if i in mine and i in theirs else i + 1.0 for i in range(31)]
    vector = np.arange(1, 32, dtype=np.float32)
    kernels.clear_common(vector, pack(mine), pack(theirs))
    assert vector.tolist() == expected


@pytest.mark.parametrize("keep_values", [False, True])
def test_clearing_common_places_goes_on_over_long_vectors(keep_values: bool) -> None:
    rng = np.random.default_rng(1)
    length = 150_000
    mine, theirs = (np.sort(rng.choice(length, 20_000, replace=False)) for _ in range(2))
    vector = np.ones(length, np.float32)
    kernels.clear_common(vector, pack(mine, mine + 2), pack(theirs, theirs), keep_values)
    expected = np.ones(length, np.float32)
    common = np.intersect1d(mine, theirs)
    expected[common] = common + 2 if keep_values else 0
    assert vector.tobytes() == expected.tobytes()
    kernels.add_common(vector, pack(mine, mine - 0.5), pack(theirs, theirs))
    expected[common] += (common - 0.5).astype(np.float32)
    assert vector.tobytes() == expected.tobytes()


@given(INDICES)
def test_clearing_zeroes_the_given_places_alone(indices: list[int]) -> None:
    expected = [0.0 if i in indices else i + 1.0 for i in range(31)]
    vector = np.arange(1, 32, dtype=np.float32)
    kernels.clear_support(vector, pack(indices))
    assert vector.tolist() == expected


@given(INDICES)
def test_entries_are_written_scaled_and_added(indices: list[int]) -> None:
    entries = pack(indices, [3.0 * i + 1 for i in indices])
    vector = np.arange(31, dtype=np.float32)
    kernels.write_scaled(vector, entries, 0.25)
    assert vector.tolist() == [(3.0 * i + 1) / 4 if i in indices else i for i in range(31)]
    vector = np.arange(31, dtype=np.float32)
    kernels.add_entries(vector, entries, 1.0)
    assert vector.tolist() == [4.0 * i + 1 if i in indices else i for i in range(31)]
