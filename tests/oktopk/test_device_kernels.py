"""Kernels on a GPU against the host's, on inputs that reach every branch; skipped where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives.cpu import kernels as host_kernels
from collectives.cpu.kernels import magnitude_bits
from collectives.sparse import ENTRY
from oktopk.thresholds import CANDIDATES
from tests.devices import asynchronous, gpus, narrowed, on_gpus, put
from tests.inputs import entries_with
from tests.rows import widened
from tests.sides import (
    GUARD,
    Held,
    Side,
    bits_of,
    check_adamw,
    check_displacement,
    check_select,
    check_shard_sums,
    wild,
)

pytestmark = [on_gpus, pytest.mark.host_cuda(ranks=0)]

CHUNK, TILE = 4096, 65_536  # the widest
# several chunks a group: 2 on 132 multiprocessors, 8 on the 4 of the host that stands in for them
GROUPED = 6_000_001 if asynchronous() else 600_001
MANY_TILES = (100 if asynchronous() else 20) * TILE
POISON = 0xA5


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device whose memory is full of what nobody wrote."""
    import cupy

    from collectives.cuda.device import Device

    allocate = Device.allocate

    def poisoned(self: Any, count: int, dtype: Any) -> Any:
        array = allocate(self, count, dtype)
        with self.gpu:
            cupy.cuda.runtime.memset(array.data.ptr, POISON, array.nbytes)
        return array

    monkeypatch.setattr(Device, "allocate", poisoned)
    return Device()


def entries_of(device: Any, host: NDArray[np.void]) -> Any:
    from collectives.cuda.device import DeviceEntries

    memory = device.allocate(len(host), np.uint64)
    memory.set(host.view(np.uint64))
    return DeviceEntries(device, memory.data.ptr, len(host), memory)


def accumulated(kind: str, n: int, rng: np.random.Generator) -> tuple[NDArray[np.float32], float]:
    """A sum of gradient and residual, and the magnitude to select by."""
    values = rng.standard_normal(n, np.float32)
    if kind == "crowded":  # nearly all that is selected lies in few chunks
        values *= 0.01
        values[n // 3 : n // 3 + 3 * CHUNK] *= 1000
    return values, {"everything": 1e-30, "nothing": 100.0, "crowded": 0.5}.get(kind, 2.5)


SPREAD = [1, CHUNK - 1, CHUNK + 1, 50_003, GROUPED]
# 40 M: 16 chunks a group on 132 multiprocessors
LONG = pytest.param(40_000_003, marks=pytest.mark.skipif(not asynchronous(), reason="minutes without a GPU"))


@pytest.mark.parametrize("n", [*SPREAD, LONG])
@pytest.mark.parametrize("kind", ["spread", "crowded", "nothing"])
@pytest.mark.parametrize("gradient_type", ["float32", "bfloat16"])
def test_selections_are_the_hosts(device: Any, n: int, kind: str, gradient_type: str) -> None:
    rng = np.random.default_rng(n)
    wanted, magnitude = accumulated(kind, n, rng)
    check_selection(device, wanted, magnitude, gradient_type, rng, room=n // 16 + 16 + 4 * CHUNK)


@pytest.mark.parametrize(
    ("kind", "n", "shift", "rooms"),
    [
        ("everything", 5 * CHUNK + 7, 0, (1,)),
        *(("spread", 3 * CHUNK + 5, shift, (1,)) for shift in (1, 2, 3)),
        # a list that is full counts on; what overflowed must leave nothing behind
        *(("spread", n, 0, (200, 16, 200, 16)) for n in (9 * CHUNK, GROUPED)),
        ("not finite", 20 * CHUNK + 3, 0, (16,)),
    ],
)
def test_lists_of_any_room_of_vectors_that_begin_anywhere_are_the_hosts(
    device: Any, kind: str, n: int, shift: int, rooms: tuple[int, ...]
) -> None:
    """The room is a part of the vector; nothing behind it is written, and what is not finite is counted and left as it was."""
    rng = np.random.default_rng(n)
    wanted, magnitude = accumulated(kind, n, rng)
    if kind == "not finite":
        wanted[[0, CHUNK, CHUNK + 1, -1]] = [np.nan, np.inf, -np.inf, np.nan]
    for part in rooms:
        check_selection(device, wanted, magnitude, "float32", rng, room=n // part, shift=shift)


def check_selection(
    device: Any,
    wanted: NDArray[np.float32],
    magnitude: float,
    gradient_type: str,
    rng: np.random.Generator,
    room: int,
    shift: int = 0,
) -> None:
    """The gradient lies so many elements behind where memory begins."""
    gradient, stored = rounded_down(wanted, gradient_type)
    residual = rng.standard_normal(len(wanted), np.float32) * np.float32(1e-3)
    side = Side(device, gradient_type)
    on_device = side.hold(stored, shift)
    check_select(side, on_device.array, gradient, side.hold(residual, 0), magnitude, room)
    assert on_device.get().tobytes() == stored.tobytes()


def rounded_down(vector: NDArray[np.float32], gradient_type: str) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """What a gradient type holds of a vector, as float32 and as it is stored."""
    stored = narrowed(vector, gradient_type)
    return widened(stored, gradient_type), stored


@pytest.mark.parametrize("block", [1024, 768, 100, 7], ids=lambda block: f"blocks of {block}")
@pytest.mark.parametrize("gradient_type", ["float32", "bfloat16", "float16"])
def test_a_shard_is_summed_where_it_is_selected_from(device: Any, gradient_type: str, block: int) -> None:
    rows = np.random.default_rng(block).standard_normal((3, 3 * CHUNK + 700)).astype(np.float32)
    rows[1, [5, -1]] = np.inf, np.nan
    rows, stored = rounded_down(rows, gradient_type)
    check_shard_sums(Side(device, gradient_type), rows, block, shards=2, magnitude=4.0, stored=stored)


# sizes of pieces: one; begins at odd places, at twice odd ones and at multiples of four; many in a chunk; none of length 0
PIECES = {
    "one": [3 * CHUNK + 5],
    "single": [1],
    "chunk": [CHUNK],
    "odd": [3, 2 * CHUNK, 1, CHUNK - 3, 2, 3 * CHUNK + 7],
    "twice odd": [2 * CHUNK + 2, 3 * CHUNK, 6, 2 * CHUNK],
    "fours": [8, 2 * CHUNK, 4 * CHUNK - 8, 100, CHUNK + 1],
    "tiny": [1] * (CHUNK + 77),
    "none": [0, 5, 0, CHUNK, 0],
}


CONVERSIONS = (
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("float16", "bfloat16"),
)


# each conversion with half of the lists, at one of three offsets in turn; the others are left to `make test-all`
@pytest.mark.parametrize(
    ("element_type", "gradient_type", "pieces", "shift"),
    [
        pytest.param(
            *conversion,
            pieces,
            shift,
            marks=[]
            if (number + at) % 3 == shift and (number + number // 3 + at) % 2 == 0
            else pytest.mark.long("`make test` has each list in two conversions or more, at one offset each"),
        )
        for number, conversion in enumerate(CONVERSIONS)
        for at, pieces in enumerate(PIECES)
        for shift in range(3)
    ],
)
def test_pieces_are_selected_from_as_one_vector(
    device: Any, element_type: str, gradient_type: str, pieces: str, shift: int
) -> None:
    """Bit for bit, wherever they begin and whichever are missing; and they leave the residual as one vector does."""
    import cupy
    import torch

    from oktopk.cuda.kernels import DeviceKernels

    sizes = PIECES[pieces]
    rng = np.random.default_rng((len(sizes), shift))
    kernels = DeviceKernels(device, gradient_type)
    scattered = kernels.gradient_tensors(sizes, element_type)
    n = sum(sizes)
    residual = rng.standard_normal(n, np.float32) * np.float32(1e-3)
    one, other = (entries_of(device, np.full(n + GUARD, POISON, np.uint64).view(ENTRY)) for _ in range(2))
    for missing in (0.0, 0.4, *[1.0] * (pieces == "fours")):  # each time they lie elsewhere
        parts = [wild(rng, size).to(getattr(torch, element_type)) for size in sizes]
        homes: list[Any] = []
        for part in parts:
            here = rng.random() >= missing
            homes.append(Held("cuda", bits_of(part), GUARD + shift) if here else None)
            if not here:
                part.zero_()
        scattered.set_pointers([0 if home is None else home.address for home in homes])
        stored = bits_of(torch.cat(parts).to(getattr(torch, gradient_type)))
        left = [cupy.asarray(np.pad(residual, (0, GUARD))) for _ in range(2)]
        pair = (cupy.asarray(stored), left[0], one), (scattered, left[1], other)
        edges = np.array([0, n // 3, n], np.int64)
        found = [
            kernels.accumulate_select(gradient, rest[:n], magnitude_bits(2.5), entries[:n], edges)
            for gradient, rest, entries in pair
        ]
        assert (found[0].nnz, found[0].nonfinite) == (found[1].nnz, found[1].nonfinite)
        assert found[0].offsets.tolist() == found[1].offsets.tolist()
        assert missing or n < CHUNK or found[1].nnz > n // 100 < found[1].nonfinite
        assert left[0].get().tobytes() == left[1].get().tobytes()
        assert one.get()[: found[0].nnz].tobytes() == other.get()[: found[0].nnz].tobytes()
        assert np.all(other.get()[n:].view(np.uint64) == POISON)
        for gradient, rest, _ in pair:
            kernels.undo_accumulate(gradient, rest[:n])
        assert left[0].get().tobytes() == left[1].get().tobytes()
        assert np.all(left[1].get()[n:] == 0)


each_type_in_pieces = pytest.mark.parametrize(
    ("element_type", "pieces"),
    [
        pytest.param(
            element_type,
            pieces,
            marks=[]
            if at in (3, number + 4, 7)
            else pytest.mark.long("`make test` has lists of many parts in each type"),
        )
        for number, element_type in enumerate(("float32", "bfloat16", "float16"))
        for at, pieces in enumerate(PIECES)
    ],
)


@each_type_in_pieces
@pytest.mark.parametrize("check", [check_displacement, check_adamw])
def test_moves_are_rounded_where_it_is_said_and_added_as_a_vector(
    device: Any, check: Callable[..., None], element_type: str, pieces: str
) -> None:
    """Wherever they begin, and what they are compared with or kept in."""
    check(Side(device), element_type, PIECES[pieces], GUARD + 3 * (pieces == "odd"))


@each_type_in_pieces
def test_squares_of_pieces_are_summed_where_they_lie(
    device: Any, element_type: str, pieces: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits wherever that is, by several blocks or few; with missing ones as zeros. What is not finite is seen."""
    import torch

    from oktopk.cuda.kernels import DeviceKernels
    from oktopk.cuda.step_check import StepCheck

    monkeypatch.setattr(StepCheck, "BLOCKS", 2 if pieces == "fours" else StepCheck.BLOCKS)
    sizes, rng = PIECES[pieces], np.random.default_rng(5)
    check, edges = DeviceKernels(device).step_check(sizes, element_type), np.cumsum([0, *sizes])
    whole = torch.from_numpy(rng.standard_normal(edges[-1])).to(getattr(torch, element_type))
    for missing, last in ((0.0, None), (0.4, None), (1.0, None), (0.0, math.nan), (0.0, -math.inf)):
        if last is not None:
            whole[-1] = last
        here, sums = rng.random(len(sizes)) >= missing, list[tuple[float, bool]]()
        for shift in (0, 3):
            memory = Held("cuda", bits_of(whole), GUARD + shift)
            addresses = memory.address + whole.element_size() * edges[:-1]
            check.set_pointers((addresses * here).tolist())
            check.begin(0)
            sums.append(check.read())
        square, differs = sums[0]
        assert str(sums[0]) == str(sums[1]), "NaN equals NaN as text"
        assert not differs
        if last is not None:
            assert not square < math.inf
            continue
        squares = np.add.reduceat(np.append(whole.double().square().numpy(), 0), edges[:-1]) * (
            np.array(sizes) > 0
        )
        assert square == pytest.approx(float(squares[here].sum()), rel=1e-6)


def test_a_square_above_float32_is_infinite(device: Any) -> None:
    from oktopk.cuda.kernels import DeviceKernels

    check = DeviceKernels(device).step_check([2000], "float32")
    for value, finite in ((4e18, True), (2e19, False)):
        memory = put("cuda", np.full(2000, value, np.float32))
        check.set_pointers([memory.data.ptr])
        check.begin(0)
        assert (check.read()[0] < math.inf) == finite


@pytest.mark.parametrize("element_type", ["float32", "bfloat16"])
def test_a_sample_that_differs_is_seen_by_its_bits(device: Any, element_type: str) -> None:
    """Of several checks each has its own; none counts as a step among peers, which other ranks may check by other means."""
    from oktopk.cuda.kernels import DeviceKernels

    word, stride = np.uint32 if element_type == "float32" else np.uint16, 3
    values = np.arange(1000, dtype=word)
    values[10] = np.iinfo(word).max  # a NaN, which equals itself here
    memory, epoch = put("cuda", values), device.epoch
    places = memory.data.ptr + np.arange(0, 1000, stride, dtype=np.uint64) * values.itemsize
    kernels = DeviceKernels(device)
    check, other = (kernels.step_check([5], element_type, len(places)) for _ in range(2))
    check.set_samples(places)
    other.set_samples(places)
    same = put("cuda", values[::stride].copy())
    for at in (None, 0, 1, 501, 999):
        kept = values.copy()
        if at is not None:
            kept[at] ^= 1 << 15
        now = put("cuda", kept[::stride].copy())
        check.begin(now.data.ptr)
        other.begin(same.data.ptr)
        assert check.read() == (0.0, at is not None and at % stride == 0), at
        assert other.read() == (0.0, False)
    assert device.epoch == epoch


def test_addresses_that_no_gradient_has_are_refused(device: Any) -> None:
    from oktopk.cuda.kernels import DeviceKernels

    scattered = DeviceKernels(device, "float32").gradient_tensors([5, 7], "float32")
    with pytest.raises(ValueError, match="3 addresses for 2 tensors"):
        scattered.set_pointers([0, 0, 0])
    with pytest.raises(
        ValueError, match="address 4098 of tensor 1 is not a multiple of an element's 4 bytes"
    ):
        scattered.set_pointers([4096, 4098])


def lists_over(
    lower: int, upper: int, lists: int, share: float, rng: np.random.Generator
) -> tuple[NDArray[np.void], NDArray[np.int64], NDArray[np.int64]]:
    """Sorted lists that each hold a share of the region, one after the other in a pool."""
    parts = []
    for _ in range(lists):
        at = lower + np.flatnonzero(rng.random(upper - lower) < share)
        part = np.empty(len(at), ENTRY)
        part["index"], part["value"] = at, rng.standard_normal(len(at), np.float32)
        parts.append(part)
    sizes = np.array([len(part) for part in parts])
    ends = sizes.cumsum()
    return np.concatenate(parts), ends - sizes, ends


# 0.001: tiles as wide as they come; 9 lists: fetched in three goes
@pytest.mark.parametrize(
    ("length", "lists", "share"),
    [
        pytest.param(
            length,
            lists,
            share,
            # of the longest, the sparse lists of four and nine ranks alone: others are slow on the host
            marks=pytest.mark.long("`make test` has sparse lists of four and nine")
            if length == MANY_TILES and (lists not in (4, 9) or lists * share >= 0.1)
            else pytest.mark.long("`make test` has full lists of four and nine, and others of one and five")
            if length == 3 * TILE + 11 and share >= 0.4 and (share == 1.0) != (lists in (4, 9))
            else [],
        )
        for length in (1, 1000, 3 * TILE + 11, MANY_TILES)
        for lists in (1, 4, 5, 9)
        for share in (1.0, 0.4, 0.02, 0.001, 0.0)
        if length * lists * share <= 4e6
    ],
)
def test_region_sums_are_the_hosts(device: Any, length: int, lists: int, share: float) -> None:
    rng = np.random.default_rng((length, lists))
    lower, upper = 12_345, 12_345 + length
    check_sums(device, *lists_over(lower, upper, lists, share, rng), lower, upper)


# wide tiles that hold more sums than fit at once; 70 lists: too many for the windows' edges
@pytest.mark.parametrize("lists", [1, 9, 70])
def test_sums_of_crowded_tiles_are_the_hosts(device: Any, lists: int) -> None:
    from collectives.cuda.kernels import WIDEST, tile_shift

    rng = np.random.default_rng(lists)
    lower, length = 12_345, 6_000_007 if asynchronous() else 2_000_007
    crowd = lower + length // 2
    pools = [
        lists_over(lower, crowd, lists, 1e-5, rng),
        lists_over(crowd, crowd + 22_500, lists, 0.9 / lists**0.5, rng),
        lists_over(crowd + 22_500, lower + length, lists, 1e-5, rng),
    ]
    parts = [
        np.concatenate([pool[begins[at] : ends[at]] for pool, begins, ends in pools]) for at in range(lists)
    ]
    ends = np.cumsum([len(part) for part in parts])
    assert tile_shift(int(ends[-1]), length) > WIDEST - 3
    check_sums(
        device, np.concatenate(parts), ends - [len(part) for part in parts], ends, lower, lower + length
    )


def check_sums(
    device: Any,
    pool: NDArray[np.void],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    lower: int,
    upper: int,
) -> None:
    from collectives.cuda.kernels import DeviceKernels

    length = upper - lower
    bits = magnitude_bits(1.2)
    room = min(len(pool), length) + 1
    out = np.empty(room, ENTRY)
    nnz, nonfinite = host_kernels.sum_sorted_lists(pool, begins, ends, lower, upper, bits, out)
    expected = out[:nnz]

    kernels = DeviceKernels(device)
    given = entries_of(device, pool) if len(pool) else entries_of(device, np.empty(1, ENTRY))
    whole = entries_of(device, np.full(room + GUARD, POISON, np.uint64).view(ENTRY))
    for _ in range(2):
        kept = kernels.sum_sorted_lists(given, begins, ends, lower, upper, bits, whole[:room])
        assert kept == (nnz, nonfinite)
        got = whole.get()
        assert got[:nnz].tobytes() == expected.tobytes()
        assert np.all(got[room:].view(np.uint64) == POISON)

    # launches are prepared before the lists arrive; other lists are not summed by them
    fewer = begins.copy()
    late = entries_of(device, np.zeros(max(1, len(pool)), ENTRY))
    kernels.lay_out_sums(late, begins, ends, lower, upper)
    late[:] = given
    lay_out, kernels.lay_out_sums = kernels.lay_out_sums, None  # type: ignore[method-assign, assignment]
    assert kernels.sum_sorted_lists(late, begins, ends, lower, upper, bits, whole[:room]) == (nnz, nonfinite)
    kernels.lay_out_sums = lay_out  # type: ignore[method-assign]
    assert kernels.sum_sorted_lists(late, fewer, fewer, lower, upper, bits, whole[:room]) == (0, 0)
    fewer[:] = ends
    fewer[0] = begins[0]
    # arrays that were not laid out may change
    first = host_kernels.sum_sorted_lists(pool, fewer, ends, lower, upper, bits, out)
    assert kernels.sum_sorted_lists(late, fewer, ends, lower, upper, bits, whole[:room]) == first
    fewer[:] = begins
    assert kernels.sum_sorted_lists(late, fewer, ends, lower, upper, bits, whole[:room]) == (nnz, nonfinite)
    assert kernels.sum_sorted_lists(late, begins, ends, lower, upper, bits, whole[:room]) == (nnz, nonfinite)

    moved = bits + int(CANDIDATES[40])
    huge = pool.copy()
    huge["value"][::97] = np.inf
    for lists, overflows in ((huge, len(pool) > 0), (pool, False)):
        given = entries_of(device, lists) if len(lists) else given
        counted = kernels.counted_sums(given, begins, ends, lower, upper, bits, CANDIDATES, whole[:room])
        known = host_kernels.counted_sums(
            lists, begins, ends, lower, upper, bits, CANDIDATES, np.empty(room, ENTRY)
        )
        assert counted.counts.tolist() == known.counts.tolist()
        assert (known.counts[-1] > 0) == overflows
        assert (
            kernels.sum_sorted_lists(given, begins, ends, lower, upper, bits, whole[:room])[1]
            == known.counts[-1]
        )
        counted = kernels.counted_sums(given, begins, ends, lower, upper, bits, CANDIDATES, whole[:room])
        reached = int(known.counts[40])
        kept = known.take(moved, reached)
        assert len(kept) == reached
        assert counted.take(moved, reached).get().tobytes() == kept.tobytes()


def test_a_viewed_report_does_not_move(device: Any) -> None:
    import ctypes

    view = device.view("seen", ctypes.c_uint32 * 4)
    with pytest.raises(RuntimeError, match="report 'seen' is viewed and cannot grow from 4 to 5 words"):
        device.report("seen", 5)
    device.report("seen", 4)[:] = 7
    assert view[:] == [7] * 4
    assert len(device.report("unseen", 4)) < len(device.report("unseen", 5))


@pytest.mark.skipif(gpus() < 2, reason="no second GPU")
def test_memory_is_taken_on_the_devices_own_gpu(device: Any) -> None:
    import cupy

    own = device.id
    cupy.cuda.Device(own + 1).use()
    try:
        arrays = [device.allocate(3, np.uint32), device.scratch("anew", 3, np.uint32)]
        assert [array.data.device_id for array in arrays] == [own, own]
        assert cupy.cuda.Device().id == own + 1
    finally:
        cupy.cuda.Device(own).use()


@pytest.mark.parametrize(("ranks", "k"), [(2, 2**32 // 3 + 1), (4, 2**30), (32, 2**27)])
def test_lists_beyond_32_bit_offsets_are_refused(ranks: int, k: int) -> None:
    from oktopk.cuda.p2p_launches import P2PLaunches
    from oktopk.settings import Settings

    transport: Any = SimpleNamespace(size=ranks, device=None)
    with pytest.raises(ValueError, match=rf"k = {k} on {ranks} ranks: .* \(< 4294967296\)"):
        P2PLaunches(None, transport, 2**31 - 1, Settings(), k)


def test_a_launch_with_another_kernels_parameters_is_refused(device: Any) -> None:
    from collectives.cuda.kernels import DeviceKernels
    from collectives.cuda.launch import PreparedLaunch

    kernels = DeviceKernels(device)
    with pytest.raises(TypeError, match="keep_sums takes KeepSums, not EqualCountSplits"):
        PreparedLaunch(kernels.keep_kernel, kernels._equal_count_splits.parameters())
    with pytest.raises(AttributeError, match="limit"):
        kernels.keep_kernel.prepare(limit=1)


@pytest.mark.parametrize("count", [1, 2047, 2049, 30_001])
def test_values_at_the_indices_of_a_list_are_the_hosts(device: Any, count: int) -> None:
    import cupy

    from oktopk.cpu import kernels as on_host
    from oktopk.cuda.kernels import DeviceKernels

    rng = np.random.default_rng(count)
    vector = rng.standard_normal(3 * count, np.float32)
    vector[::5] = 0
    support = entries_with(np.sort(rng.choice(3 * count, count, replace=False)), np.ones(count))
    kernels, on_device = DeviceKernels(device), entries_of(device, support)
    expected, found = np.zeros(count, ENTRY), entries_of(device, np.zeros(count, ENTRY))
    on_host.take_values(vector, support, expected)
    kernels.take_values(cupy.asarray(vector), on_device, found)
    assert np.array_equal(expected["value"], vector[support["index"]])
    assert found.get().tobytes() == expected.tobytes()
