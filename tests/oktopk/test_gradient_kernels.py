"""Kernels that touch gradients, against NumPy and plain Python, around the edges of their blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

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
from tests.adamw import assert_torchs

Vector = NDArray[np.float32]

TINY = np.float32(1e-45)  # the smallest denormal, whose bits are 1
LARGEST = np.finfo(np.float32).max
INFINITY_BITS = 0x7F800000
LENGTHS = [1, LANES - 1, LANES, LANES + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 13]
SENTINEL = np.array((-7, -7.0), ENTRY)

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
UGLY = st.sampled_from([0.0, -0.0, float(TINY), -float(TINY), 1.0, -1.0, float(LARGEST)])
WILD = st.one_of(FLOATS, UGLY, st.sampled_from([math.nan, math.inf, -math.inf, -float(LARGEST)]))


def magnitude_bits(values: Any) -> NDArray[np.int32]:
    return np.atleast_1d(np.abs(np.asarray(values, np.float32))).view(np.int32)


def integers(seed: int, length: int, most: int = 50) -> Vector:
    return np.random.default_rng((seed, length)).integers(-most, most + 1, length).astype(np.float32)


def check_accumulate_select(
    gradient: Vector, residual: Vector, threshold_bits: int, capacity: int | None = None
) -> None:
    """One call against NumPy; capacity None is just enough."""
    with np.errstate(over="ignore", invalid="ignore"):
        accumulated = gradient + residual
    finite = np.isfinite(accumulated)
    wanted = np.flatnonzero(finite & (magnitude_bits(accumulated) >= threshold_bits))
    room = len(wanted) if capacity is None else capacity
    memory = np.full(room + BLOCK + 3, SENTINEL)
    given_gradient, after = gradient.copy(), residual.copy()
    packing = kernels.accumulate_select(given_gradient, after, threshold_bits, memory[: room + BLOCK])
    nnz, nonfinite = packing.nnz, packing.nonfinite
    assert nnz == len(wanted)
    assert nonfinite == np.count_nonzero(~finite)
    assert after.tobytes() == np.where(finite, accumulated, residual).tobytes()
    assert given_gradient.tobytes() == gradient.tobytes()
    assert np.all(memory[room + BLOCK :] == SENTINEL), "wrote past the end of the list"
    if nnz <= room:
        assert memory["index"][:nnz].tolist() == wanted.tolist()
        assert memory["value"][:nnz].tobytes() == accumulated[wanted].tobytes()


@pytest.mark.parametrize("threshold", [TINY, 40, 101])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_pass_accumulates_and_packs_what_reaches_the_threshold(length: int, threshold: float) -> None:
    bits = int(magnitude_bits(threshold)[0])
    check_accumulate_select(integers(1, length), integers(2, length), bits)


@pytest.mark.parametrize(
    ("length", "missing"),
    [
        *((length, 0) for length in (BLOCK - 1, BLOCK)),
        *((3 * BLOCK + 13, missing) for missing in (0, 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 3 * BLOCK + 13)),
    ],
)
def test_a_pass_that_packs_everything_counts_on_where_its_list_is_full(length: int, missing: int) -> None:
    check_accumulate_select(np.full(length, 2, np.float32), integers(2, length, most=1), 1, length - missing)


def test_a_pass_that_overflows_midway_accumulates_and_counts_to_the_end() -> None:
    gradient, residual = integers(5, 4 * BLOCK), integers(6, 4 * BLOCK)
    gradient[[3, BLOCK + 2, 4 * BLOCK - 1]] = np.nan, np.inf, -np.inf
    check_accumulate_select(gradient, residual, int(magnitude_bits(30)[0]), capacity=100)


@pytest.mark.parametrize("length", [1, LANES - 1, LANES, 5 * LANES + 3])
@pytest.mark.parametrize("block", [1, LANES - 1, LANES, 3 * LANES + 5])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_shard_of_a_sum_is_taken_in_the_order_of_its_rows(ranks: int, block: int, length: int) -> None:
    rng = np.random.default_rng((ranks, block, length))
    rows = rng.standard_normal((ranks, length)).astype(np.float32)
    rows[:, length // 2] = [0, -np.inf, np.nan][:ranks]
    for shard in range(ranks):
        mine = np.flatnonzero(np.arange(length) // block % ranks == shard)
        residual = rng.standard_normal(len(mine)).astype(np.float32)
        expected = rows[0, mine].copy()
        for row in rows[1:]:
            expected += row[mine]
        expected += residual
        finite = np.isfinite(expected)
        wanted = np.flatnonzero(finite & (np.abs(expected) >= 1))
        entries, after = np.empty(len(mine) + BLOCK, ENTRY), residual.copy()
        total = kernels.ShardSum(rows, block, ranks, shard, np.empty(len(mine), np.float32))
        packing = kernels.accumulate_select(total, after, int(magnitude_bits(1)[0]), entries)
        assert packing.nnz == len(wanted)
        assert packing.nonfinite == np.count_nonzero(~finite)
        assert after.tobytes() == np.where(finite, expected, residual).tobytes()
        assert entries["index"][: len(wanted)].tolist() == wanted.tolist()
        assert entries["value"][: len(wanted)].tobytes() == expected[wanted].tobytes()


TYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("element_type", TYPES)
def test_a_displacement_is_rounded_as_torch_rounds_and_added_as_a_vector(element_type: str) -> None:
    """And what is shown then leaves none."""
    dtype, rng = getattr(torch, element_type), np.random.default_rng(7)
    sizes = [9, 2 * BLOCK + 3, 1, 1, 0, BLOCK, LANES + 5, 3]
    special = [0.0, -0.0, 1e-45, 6e-8, -6e-8, 65519, 65520, -65536, 1e-40, 3.4e38, 2**-14, 1.3 * 2**-15]
    special += [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11]  # half way
    reference = (rng.standard_normal(sum(sizes)) ** 3 * 3).astype(np.float32)
    chosen = rng.random(len(reference)) < 0.3
    reference[chosen] = rng.choice(np.array(special, np.float32), int(chosen.sum()))
    residual = np.where(rng.random(len(reference)) < 0.5, 0, rng.standard_normal(len(reference)) / 99)
    residual, share = residual.astype(np.float32), 1 / 3
    shown = torch.from_numpy(reference - np.float32(share) * residual).to(dtype)
    held = (shown.float() * (1 + torch.from_numpy(residual))).to(dtype)
    held[5], held[-1] = math.nan, math.inf
    parts, absent = [part.clone() for part in held.split(sizes)], 5
    with np.errstate(invalid="ignore"):
        gradient = shown.float().numpy() - held.float().numpy()
    begin = sum(sizes[:absent])
    gradient[begin : begin + sizes[absent]] = 0

    moved = HostDisplacement(sizes, element_type, reference, share)
    moved.set_pointers([0 if n == absent else part.data_ptr() for n, part in enumerate(parts)])
    alike = []
    for each in (gradient, moved):
        after, packed = residual.copy(), np.zeros(len(reference) + BLOCK, ENTRY)
        packing = kernels.accumulate_select(each, after, int(magnitude_bits(0.02)[0]), packed)
        alike.append((packing.nnz, packing.nonfinite, after.tobytes(), packed.tobytes()))
        kernels.undo_accumulate(moved, after)
        assert after.tobytes() == alike[-1][2]
    assert alike[0] == alike[1]
    assert alike[0][0] > 100 < len(reference) - alike[0][0]

    factors = [1.0, 0.999, 0.5, 1.0, 1.0, 0.25, 1.0, 1.0]
    expected = reference * np.repeat(np.array(factors, np.float32), sizes)
    moved.set_pointers([part.data_ptr() for part in parts])
    moved.show(residual, factors)
    assert reference.tobytes() == expected.tobytes()
    shown = torch.from_numpy(reference - np.float32(share) * residual).to(dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(torch.cat(parts).view(bits), shown.view(bits))
    after = residual.copy()
    moved.show(residual)
    shown_well = np.isfinite(shown.float().numpy())
    assert kernels.accumulate_select(moved, after, 1, np.empty(BLOCK, ENTRY)).nonfinite == np.sum(~shown_well)
    assert after.tobytes() == residual.tobytes()


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.99)], ids=str)
@pytest.mark.parametrize("element_type", TYPES)
def test_adamws_moves_and_moments_are_rounded_where_it_is_said(
    element_type: str, betas: tuple[float, float]
) -> None:
    """On 3 steps, of which one lacks a gradient; the residual takes each move, and the moments of float32 are torch's."""
    dtype, rng, rate, eps = getattr(torch, element_type), np.random.default_rng(3), 1e-2, 1e-8
    sizes, absent = [9, 2 * BLOCK + 3, 1, 1, 0, BLOCK, LANES + 5, 3], 5
    length, edges = sum(sizes), np.cumsum(sizes)[:-1]
    missing = slice(int(edges[absent - 1]), int(edges[absent]))
    displacement = HostAdamW(sizes, element_type)
    first, second = torch.zeros(length, dtype=dtype), torch.zeros(length, dtype=dtype)
    torchs = [nn.Parameter(torch.zeros(size)) for size in sizes]
    fused = torch.optim.AdamW(torchs, lr=rate, betas=betas, eps=eps, weight_decay=0.0, fused=True)
    residual, counts = rng.standard_normal(length).astype(np.float32) / 99, [0] * len(sizes)
    f = np.float32
    for step in range(3):
        gradient = torch.from_numpy((rng.standard_normal(length) ** 3).astype(f)).to(dtype)
        there = [number != absent or step != 1 for number in range(len(sizes))]
        counts = [count + here for count, here in zip(counts, there, strict=True)]
        for parameter, part, here in zip(torchs, gradient.split(sizes), there, strict=True):
            parameter.grad = part.float() if here else None
        fused.step()
        rows = [adamw_terms(rate, betas, eps, max(count, 1)) for count in counts]
        terms = np.array(rows, f)
        pointers = [[part.data_ptr() for part in vector.split(sizes)] for vector in (gradient, first, second)]
        addresses = np.array(pointers)
        addresses[0] *= there
        weight, from_gradient, beta2, square, by, root, small = np.repeat(terms, sizes, axis=0).T
        g, m, v = (vector.float().numpy() for vector in (gradient, first, second))
        base = np.where(from_gradient == 1, g, m)
        mean = (weight.astype(np.float64) * (g - m) + base).astype(f)
        squares = ((square * g).astype(np.float64) * g + v * beta2).astype(f)
        with np.errstate(all="ignore"):
            moved = (by * mean) / (np.sqrt(squares) / root + small)
        wanted = [torch.from_numpy(x).to(dtype) for x in (mean, squares)]
        if step == 1:
            moved[missing] = 0
            for new, old in zip(wanted, (first, second), strict=True):
                new[missing] = old[missing]
        expected, entries = residual + moved, np.empty(length + BLOCK, ENTRY)
        displacement.set_step(addresses, terms)
        packing = kernels.accumulate_select(displacement, residual, int(magnitude_bits(0.02)[0]), entries)
        assert residual.tobytes() == expected.tobytes()
        chosen = np.flatnonzero(np.abs(expected) >= f(0.02))
        assert (packing.nnz, packing.nonfinite) == (len(chosen), 0)
        assert entries["index"][: len(chosen)].tolist() == chosen.tolist()
        assert entries["value"][: len(chosen)].tobytes() == expected[chosen].tobytes()
        assert torch.equal(first, wanted[0])
        assert torch.equal(second, wanted[1])
        if element_type == "float32":
            assert_torchs(first.split(sizes), [fused.state[p]["exp_avg"] for p in torchs])
            assert_torchs(second.split(sizes), [fused.state[p]["exp_avg_sq"] for p in torchs])


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

    with pytest.raises(TypeError, match="abstract.* show"):
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
    st.one_of(st.sampled_from([1, 2, INFINITY_BITS]), FLOATS.map(lambda x: int(magnitude_bits(x)[0]))),
)
def test_nonfinite_sums_leave_the_residual_and_the_list_alone(
    vectors: tuple[Vector, Vector], bits: int
) -> None:
    check_accumulate_select(*vectors, max(1, bits))


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
