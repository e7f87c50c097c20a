"""Coded entries: what arrives, in how many bytes, what is rounded away, and what happens to bytes that are not an encoding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives.codec import (
    ALONE,
    DAMAGES,
    PLAIN,
    VALUE_BITS,
    WIRES,
    CodedEntries,
    CodedIndices,
    make_codec,
    wire_layout,
)
from collectives.cpu import kernels
from collectives.sparse import ENTRY, MAX_LENGTH
from collectives.workspace import Workspace
from tests.inputs import UGLY_LISTS, entries_with

ROUNDING = [name for name in VALUE_BITS if name != "float32"]


class Wire:
    """One codec where arrays lie on the host or on a GPU; lists go in and come out as host arrays."""

    def __init__(self, name: str, on_gpu: bool = False) -> None:
        self.device: Any = None
        made, workspace = kernels, Workspace()
        if on_gpu:
            from collectives.cuda.device import Device, DeviceWorkspace
            from collectives.cuda.kernels import DeviceKernels

            self.device = Device()
            made, workspace = DeviceKernels(self.device), DeviceWorkspace(self.device)  # type: ignore[assignment]
        alone = name == "indices"
        self.codec = (
            CodedIndices(PLAIN, made, workspace, 3) if alone else CodedEntries(name, made, workspace, 3)
        )

    def put(self, entries: NDArray[np.void]) -> Any:
        if self.device is None:
            return entries.copy()
        from collectives.cuda.device import DeviceEntries

        memory = self.device.allocate(len(entries), np.uint64)
        memory[: len(entries)].set(entries.view(np.uint64))
        return DeviceEntries(self.device, memory.data.ptr, len(entries), memory)

    def get(self, entries: Any) -> NDArray[np.void]:
        return entries.copy() if self.device is None else entries.get()  # type: ignore[no-any-return]

    def encode(
        self, entries: NDArray[np.void], lower: int, upper: int
    ) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """The wire array, and the errors."""
        size, given = self.codec.wire_bytes(len(entries), lower, upper) // ENTRY.itemsize, self.put(entries)
        wire = self.codec.buffer("wire", given, size)
        self.codec.encode(given, lower, upper, wire, 2)
        return self.get(wire), self.get(given)

    def decode(self, wire: NDArray[np.void], count: int, lower: int, upper: int) -> NDArray[np.void]:
        out = self.put(np.full(count, -1, ENTRY))
        self.codec.decode(self.put(wire), lower, upper, out, 1)
        return self.get(out)

    def round_trip(
        self, entries: NDArray[np.void], lower: int, upper: int
    ) -> tuple[NDArray[np.void], NDArray[np.float32]]:
        """What arrives, and the errors that stay."""
        self.codec.start()
        wire, errors = self.encode(entries, lower, upper)
        assert np.array_equal(errors["index"], entries["index"])
        return self.decode(wire, len(entries), lower, upper), errors["value"]


@pytest.mark.parametrize("name", VALUE_BITS)
@pytest.mark.parametrize("kind", UGLY_LISTS)
def test_entries_arrive_and_errors_stay(name: str, kind: str) -> None:
    entries, lower, upper = UGLY_LISTS[kind]()
    wire = Wire(name)
    arrived, errors = wire.round_trip(entries, lower, upper)
    assert wire.codec.take_damage() == ""
    assert np.array_equal(arrived["index"], entries["index"])
    if name == "float32":
        assert arrived.tobytes() == entries.tobytes()
        return
    sent, got = entries["value"].astype(np.float64), arrived["value"].astype(np.float64)
    assert np.isfinite(got).all() and (got != 0).all()
    assert np.array_equal(np.signbit(got), np.signbit(sent))
    assert np.array_equal(errors, (entries["value"] - arrived["value"]).astype(np.float32))
    if "zero" not in kind:
        assert (np.abs(sent - got) < np.abs(sent)).all() or name == "bfloat16"
    expected = np.abs(errors.astype(np.float64)).sum(), np.abs(sent).sum()
    assert wire.codec.rounding == pytest.approx(expected, abs=0)


@pytest.mark.parametrize("kind", UGLY_LISTS)
def test_indices_travel_alone_and_damage_of_either_codec_is_known_to_both(kind: str) -> None:
    entries, lower, upper = UGLY_LISTS[kind]()
    wire, values = Wire("indices"), Wire("int8").codec
    arrived, errors = wire.round_trip(entries, lower, upper)
    assert arrived.tobytes() == entries_with(entries["index"], np.ones(len(entries))).tobytes()
    assert (errors == entries["value"]).all() and wire.codec.rounding == (0.0, 0.0)
    if len(entries):
        beside = CodedIndices(values, kernels, Workspace(), 3)
        beside.decode(np.full(9, -1, np.int64).view(ENTRY), lower, upper, entries, 2)
        assert values.take_damage().startswith("int8 entries are damaged that came from rank 2")
        assert not beside.damaged


@pytest.mark.parametrize("name", ROUNDING)
def test_a_value_becomes_the_nearest_code(name: str) -> None:
    rng = np.random.default_rng(3)
    values = (rng.standard_t(2, 256 * 3 + 100) * 0.01).astype(np.float32)
    entries = entries_with(np.arange(len(values)) * 7, values)
    arrived, _ = Wire(name).round_trip(entries, 0, 10_000)
    for start in range(0, len(values), 256):
        block, got = np.abs(values[start : start + 256]), np.abs(arrived["value"][start : start + 256])
        if name == "bfloat16":
            halves = block.view(np.uint32) >> 16
            codes = np.unique(np.concatenate([halves, halves + 1])).astype(np.uint32) << 16
        else:
            most = 2 ** (VALUE_BITS[name] - 1) - 1
            low, high = (int(bits) for bits in (block.min().view(np.uint32), block.max().view(np.uint32)))
            codes = np.array(
                [low + (q * (high - low) + most // 2) // most for q in range(most + 1)], np.uint32
            )
            assert {block.min(), block.max()} <= set(got)
        magnitudes = codes.view(np.float32).astype(np.float64)
        nearest = np.abs(magnitudes - block.astype(np.float64)[:, None]).min(axis=1)
        assert np.isin(got, codes.view(np.float32)).all()
        assert np.array_equal(np.abs(got.astype(np.float64) - block), nearest)


@pytest.mark.parametrize(
    ("seen", "even"), [(0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0x7F7FFFFF, 0x7F7F), (1, 1)]
)
def test_bfloat16_ties_go_to_even_and_the_ends_stay_within(seen: int, even: int) -> None:
    values = np.full(40, seen, np.uint32).view(np.float32)
    arrived, _ = Wire("bfloat16").round_trip(entries_with(np.arange(40), values), 0, 99)
    assert set(arrived["value"].view(np.uint32)) == {even << 16}


def indices_of(kind: str, density: float, rng: np.random.Generator) -> tuple[NDArray[np.int64], int]:
    """Selected indices and the length of the vector."""
    length = 2_000_000
    chance = np.full(length, density)
    if kind == "clustered":  # all but a hundredth of them in a tenth of the vector
        chance[:] = density / 90
        chance[length // 2 : length // 2 + length // 10] = 9.9 * density
    elif kind == "empty regions":
        chance[length // 8 : -length // 8] = 0
        chance *= 4
    return np.flatnonzero(rng.random(length) < chance), length


@pytest.mark.parametrize(("density", "most"), [(0.001, 12.1), (0.01, 8.7), (0.02, 7.7)])
@pytest.mark.parametrize("kind", ["uniform", "clustered", "empty regions"])
def test_bits_an_index(kind: str, density: float, most: float) -> None:
    indices, length = indices_of(kind, density, np.random.default_rng(1))
    entries = entries_with(indices, np.ones(len(indices)))
    for boundaries in (
        range(0, length + 1, length // 4),
        (0, *np.quantile(indices, [0.25, 0.5, 0.75]).astype(int), length),
    ):
        counts = np.diff(np.searchsorted(entries["index"], boundaries))
        parts = zip(counts.tolist(), boundaries, list(boundaries)[1:], strict=False)
        spent = sum(Wire("float32").codec.wire_bytes(n, int(a), int(b)) for n, a, b in parts)
        assert 8 * spent / len(entries) - 32 <= most


@pytest.mark.parametrize("tail", ["normal", "t3", "t2"])
@pytest.mark.parametrize("density", [0.001, 0.02])
def test_four_bits_round_away_at_most_15_percent_of_the_mass(tail: str, density: float) -> None:
    rng = np.random.default_rng(2)
    drawn = rng.standard_normal(10**6) if tail == "normal" else rng.standard_t(int(tail[1:]), 10**6)
    values = drawn[np.abs(drawn) >= np.quantile(np.abs(drawn), 1 - density)].astype(np.float32)
    shares = []
    for name in ("int4", "int8", "bfloat16"):
        wire = Wire(name)
        wire.round_trip(entries_with(np.arange(len(values)) * 50, values), 0, 10**6)
        error, mass = wire.codec.rounding
        shares.append(error / mass)
    assert shares[0] <= 0.15
    assert shares[1] <= shares[0] / 10
    assert shares[2] <= 2**-8


@pytest.mark.parametrize("name", [*WIRES, "indices"])
def test_bytes_are_known_from_the_count_and_never_more_than_plain(name: str) -> None:
    codec = Wire(name).codec if name == "indices" else make_codec(name, kernels, Workspace(), 2)
    assert codec.wire_bytes(0, 5, 5) == codec.wire_bytes(0, 0, MAX_LENGTH) == 0
    for length in (1, 2, 31, 32, 33, 1000, 10**6, MAX_LENGTH):
        for count in {1, 2, 3, 5, 64, 255, 256, 257, 1000, length // 4, length}:
            if count <= length:
                nbytes = codec.wire_bytes(count, 0, length)
                assert nbytes % ENTRY.itemsize == 0
                assert nbytes <= 8 * count
                assert nbytes == codec.wire_bytes(count, 77, 77 + length)
    assert PLAIN.wire_bytes(300, 0, 10**6) == 2400
    if name != "plain":  # values, 6 low bits, and a bitmap of 3 + 10000 / 64 / 100 bits, about
        bits = VALUE_BITS.get(name, 0)
        assert codec.wire_bytes(10_000, 0, 10**6) <= 10_000 * (bits + 8.6 + 0.25) / 8 + 16


def damaged(kind: str, wire: NDArray[np.uint32], layout: Any) -> None:
    """Change the words of a wire array."""
    if kind == "truncated":
        wire[-20:] = 0
    elif kind == "a bit more":
        free = np.flatnonzero(wire[layout.bitmap :] != 0xFFFFFFFF)[0] + layout.bitmap
        wire[free] |= ~wire[free] & (wire[free] + np.uint32(1))
    elif kind == "an index beyond":
        wire[layout.bitmap :] = 0
        bits = np.zeros(32 * (layout.words - layout.bitmap), np.uint8)
        bits[-layout.count :] = 1
        wire[layout.bitmap :] = np.packbits(bits, bitorder="little").view(np.uint32)
    elif kind == "indices not ascending":
        wire[layout.lows : layout.bitmap] ^= np.uint32(0xFFFFFFFF)
    elif kind == "values":
        wire[layout.values : layout.lows] = 0xFFFFFFFF
        if layout.values:
            wire[1] = 0x7F800000
    elif kind == "low above high":
        wire[:2] = wire[:2][::-1].copy()


DAMAGE = {
    "truncated": 1,
    "a bit more": 1,
    "an index beyond": 2,
    "indices not ascending": 2,
    "values": 3,
    "low above high": 3,
}


BITS = VALUE_BITS | {"indices": ALONE}


def damages(name: str, kind: str) -> bool:
    """Whether a wire has what this kind of damage changes."""
    return DAMAGE[kind] < 3 or (name != "indices" and (kind == "values" or BITS[name] < 16))


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in BITS for kind in DAMAGE if damages(name, kind)],
)
def test_bytes_that_are_no_encoding_are_noted_and_decode_to_zeros(name: str, kind: str) -> None:
    rng = np.random.default_rng(4)
    indices = np.sort(rng.choice(3000, 700, replace=False)) + 100  # many share their high bits
    wire = Wire(name)
    encoded, _ = wire.encode(entries_with(indices, rng.standard_normal(700)), 100, 3100)
    damaged(kind, encoded.view(np.uint32), wire_layout(BITS[name], 700, 100, 3100))
    arrived = wire.decode(encoded, 700, 100, 3100)
    assert np.array_equal(arrived, entries_with(np.arange(100, 800), np.zeros(700)))
    assert wire.codec.damaged
    assert (
        wire.codec.take_damage()
        == f"{wire.codec.name} entries are damaged that came from rank 1: {DAMAGES[DAMAGE[kind]]}"
    )
    assert wire.codec.take_damage() == ""


@pytest.mark.parametrize("index", [-1, 9, 4])
def test_damage_is_noted_in_lists_too_short_to_code(index: int) -> None:
    wire = Wire("int8")
    sent = entries_with([4, index], [1.0, 2.0])
    assert wire.codec.wire_bytes(2, 0, 9) == 16
    wire.decode(sent, 2, 0, 9)
    assert DAMAGES[2] in wire.codec.take_damage()


@pytest.mark.parametrize(
    ("bits", "count"), [("int8", 300), ("int8", 0), ("int4", 299), ("int4", 30), ("int4", 0)]
)
def test_a_wire_array_of_another_width_is_noted_and_decodes_within(bits: str, count: int) -> None:
    encoded, _ = Wire(bits).encode(entries_with(np.arange(50, 350), np.ones(300)), 50, 1000)
    wire = Wire("int4")
    arrived = wire.decode(encoded[:-1] if count == 299 else encoded, count, 50, 1000)
    assert np.all((arrived["index"] >= 50) & (arrived["index"] < 1000))
    assert wire.codec.damaged
    assert wire.codec.take_damage().endswith("came from rank 1: it has another number of bytes")


def test_plain_entries_are_neither_copied_nor_changed() -> None:
    entries = np.zeros(5, ENTRY)
    assert PLAIN.buffer("wire", entries, 5) is entries
    assert make_codec("plain", None, None, 8) is make_codec("int4", None, None, 1) is PLAIN
    assert SimpleNamespace(**vars(PLAIN)) == SimpleNamespace()
