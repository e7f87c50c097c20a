"""Host kernels that code entries; the format is that of `collectives.codec`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable
from numpy.typing import NDArray

from collectives.cpu.compiled import BOOL, ENTRIES, INT, compiled

ASYNCHRONOUS = False
"""Whether a call returns before what it computes is known."""

_WORDS, _HALVES, _BYTES = types.uint32[::1], types.uint16[::1], types.uint8[::1]
_BLOCK = 256
_MAGNITUDE = np.int64(0x7FFFFFFF)
_INFINITY = np.int64(0x7F800000)
_WORD = np.int64(0xFFFFFFFF)
_COUNT, _ORDER, _VALUES = 1, 2, 3  # of collectives.codec.DAMAGES
_ALONE = 1  # collectives.codec.ALONE
_STEPS = {4: 6_990_507, 8: 532_610}
"""Bits of a value -> bits between two magnitudes, see `collectives.sum_values`: six steps over five octaves, 126 over eight."""

# place of the only bit of a word, by a product that differs for each (de Bruijn)
_PLACE = np.zeros(32, np.int64)
_PLACE[[(0x077CB531 << bit & 0xFFFFFFFF) >> 27 for bit in range(32)]] = np.arange(32)


def codec_report(ranks: int) -> NDArray[np.float64]:
    """float64[ranks, 5] that what encodes and decodes writes to."""
    return np.zeros((ranks, 5))


def wait() -> None:
    """Wait for everything that was started: nothing."""


def cut_values(entries: NDArray[np.void], others: NDArray[np.void]) -> None:
    """entries.value -= others.value, both ENTRY[nnz]."""
    np.subtract(entries["value"], others["value"], out=entries["value"])


def encode_entries(
    entries: NDArray[np.void], wire: NDArray[np.void], layout: Any, rounds: bool, report: NDArray[np.float64]
) -> None:
    """Encode a list.

    Args:
        entries: ENTRY[layout.count], ascending and finite within the layout's range, count >= 1. Where values are rounded they
            become their rounding errors.
        wire: ENTRY[layout.words / 2].
        layout: a `collectives.codec.WireLayout`.
        rounds: the codec rounds; a list that travels plain then has errors of 0.
        report: float64[2]; becomes the sums of the magnitudes of rounding errors and of values, where the codec rounds.
    """
    if not layout.bits:
        wire[:] = entries
        if rounds:
            report[:2] = 0, np.abs(entries["value"].astype(np.float64)).sum()
            entries["value"] = 0
        return
    words = wire.view(np.uint32)
    words[:] = 0
    _encode_indices(entries, words, layout.lower, layout.low_bits, layout.lows, layout.bitmap)
    if layout.bits == 32:
        words[: layout.count] = entries["value"].view(np.uint32)
    elif layout.bits == 16:
        report[:2] = _encode_halves(entries, words.view(np.uint16), 1)
    elif layout.bits > _ALONE:
        report[:2] = _encode_codes(entries, words, words[layout.values :].view(np.uint8), layout.bits)


def decode_entries(
    wire: NDArray[np.void], layout: Any, out: NDArray[np.void], damage: NDArray[np.float64]
) -> None:
    """Decode a list; one that is damaged decodes to values of 0.

    Args:
        wire: ENTRY[layout.words / 2].
        layout: a `collectives.codec.WireLayout`.
        out: ENTRY[layout.count].
        damage: float64[1]; becomes the number of what is wrong, in `collectives.codec.DAMAGES`, where something is.
    """
    words, bits = wire.view(np.uint32), layout.bits
    if not bits:
        out[:] = wire
        kind = _entries_problem(out, layout.lower, layout.length)
    else:
        kind = _decode_indices(
            words, layout.low_bits, layout.lows, layout.bitmap, layout.lower, layout.length, out
        )
        if bits == _ALONE:
            out["value"] = 1
        elif bits == 32:
            out["value"] = words[: layout.count].view(np.float32)
        elif bits == 16:
            _decode_halves(words.view(np.uint16), out)
        elif _decode_codes(words, words[layout.values :].view(np.uint8), bits, out):
            kind = kind or _VALUES
        kind = kind or _entries_problem(out, layout.lower, layout.length)
    if kind:
        damage[0] = kind
        out["index"] = layout.lower + np.arange(layout.count)
        out["value"] = 0


@compiled((ENTRIES, INT, INT))
def _entries_problem(entries, lower, length):  # type: ignore[no-untyped-def]
    """The number of what is wrong with a list, 0 if nothing is."""
    last = np.int64(lower) - 1
    order: Any = False
    values: Any = False
    for i in range(len(entries)):
        index = np.int64(entries[i].index)
        order |= index <= last
        last = index
        values |= not np.isfinite(entries[i].value)
    if order or last >= np.int64(lower) + length:
        return _ORDER
    return _VALUES if values else 0


@compiled((ENTRIES, _WORDS, INT, INT, INT, INT))
def _encode_indices(entries, words, lower, low_bits, lows, bitmap):  # type: ignore[no-untyped-def]
    mask = (np.int64(1) << low_bits) - 1
    pending, filled = np.int64(0), 0
    for i in range(len(entries)):
        offset = np.int64(entries[i].index) - lower
        place = (offset >> low_bits) + i
        words[bitmap + (place >> 5)] |= np.uint32(np.int64(1) << (place & 31))
        pending |= (offset & mask) << filled
        filled += low_bits
        if filled >= 32:
            words[lows] = np.uint32(pending & _WORD)
            lows += 1
            pending >>= 32
            filled -= 32
    if filled:
        words[lows] = np.uint32(pending)


@compiled((_WORDS, INT, INT, INT, INT, INT, ENTRIES))
def _decode_indices(words, low_bits, lows, bitmap, lower, length, out):  # type: ignore[no-untyped-def]
    mask = (np.int64(1) << low_bits) - 1
    count, last = len(out), np.int64(-1)
    i, at, problem, final = 0, 0, 0, len(words) - 1
    for w in range(len(words) - bitmap):
        word = np.int64(words[bitmap + w])
        while word:
            lowest = word & -word
            word ^= lowest
            if i == count:
                return _COUNT
            place = 32 * w + _PLACE[((lowest * 0x077CB531) & _WORD) >> 27]
            first = lows + (at >> 5)
            pair = np.int64(words[first]) | np.int64(words[min(first + 1, final)]) << 32
            offset = (place - i) << low_bits | ((pair >> (at & 31)) & mask)
            if offset <= last or offset >= length:
                problem = _ORDER
            last = offset
            out[i].index = np.int32(lower + offset)
            at += low_bits
            i += 1
    return problem if i == count else _COUNT


@compiled((ENTRIES, _HALVES, INT))
def _encode_halves(entries, halves, least):  # type: ignore[no-untyped-def]
    """least: the smallest magnitude that a value may become; with 0 those that are Inf or NaN become Inf."""
    lost = mass = 0.0
    for i in range(len(entries)):
        value = entries[i].value
        bits = np.int64(np.float32(value).view(np.int32)) & _WORD
        magnitude = bits & _MAGNITUDE
        half: Any = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        half = 0x7F80 if magnitude >= _INFINITY and not least else min(max(half, least), 0x7F7F)
        half |= (bits >> 31) << 15
        halves[i] = half
        error = np.float32(value - np.uint32(half << 16).view(np.float32))
        entries[i].value = error
        lost += abs(np.float64(error))
        mass += abs(np.float64(value))
    return lost, mass


@compiled((_HALVES, ENTRIES))
def _decode_halves(halves, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        out[i].value = np.uint32(np.uint32(halves[i]) << 16).view(np.float32)


@register_jitable
def _decoded(code, low, span, most):  # type: ignore[no-untyped-def]
    """Bits of the magnitude of a code; all are float64, so that loops run on vectors."""
    # an integer below 2^38 over `most`, rounded down: the product is off by less than 2^-10
    return low + np.floor((code * span + (most - 1.0) / 2.0) * (1.0 / most) + 2.0**-10)


@compiled((ENTRIES, _WORDS, _BYTES, INT))
def _encode_codes(entries, ranges, octets, bits):  # type: ignore[no-untyped-def]
    most = np.float64((1 << (bits - 1)) - 1)
    lost = mass = 0.0
    exact, below, above = np.zeros((3, _BLOCK), np.int32)
    values, lower, upper = exact.view(np.float32), below.view(np.float32), above.view(np.float32)
    codes = np.zeros(_BLOCK, np.int32)
    for start in range(0, len(entries), _BLOCK):
        size = min(_BLOCK, len(entries) - start)
        block = entries[start : start + size]
        for i in range(size):
            exact[i] = np.float32(block[i].value).view(np.int32) & np.int32(0x7FFFFFFF)
        least: Any = np.int32(0x7FFFFFFF)
        largest: Any = np.int32(1)
        for i in range(size):
            exact[i] = max(exact[i], np.int32(1))
            least, largest = min(least, exact[i]), max(largest, exact[i])
        ranges[2 * (start // _BLOCK)], ranges[2 * (start // _BLOCK) + 1] = least, largest
        low = np.float64(least)
        span = np.float64(largest) - low
        scale = most / max(span, 1.0)
        for i in range(size):
            # floor of the exact quotient: that is at least 2^-31 below an integer that it does not reach
            code = min(np.floor((np.float64(exact[i]) - low) * scale + 2.0**-40), most - 1)
            codes[i] = np.int32(code)
            below[i] = np.int32(_decoded(code, low, span, most))
            above[i] = np.int32(_decoded(code + 1, low, span, most))
        for i in range(size):
            nearer_above = values[i] - lower[i] > upper[i] - values[i]
            codes[i] += nearer_above
            below[i] = above[i] if nearer_above else below[i]
        for i in range(size):
            value = block[i].value
            sign = np.float32(value).view(np.int32) & np.int32(-0x80000000)
            code = codes[i] | np.int32(sign != 0) << (bits - 1)
            if bits == 8:
                octets[start + i] = code
            else:
                octets[(start + i) >> 1] |= code << 4 * (i & 1)
            error = np.float32(value - np.int32(below[i] | sign).view(np.float32))
            block[i].value = error
            lost += abs(np.float64(error))
            mass += abs(np.float64(value))
    return lost, mass


@compiled((_WORDS, _BYTES, INT, ENTRIES))
def _decode_codes(ranges, octets, bits, out):  # type: ignore[no-untyped-def]
    """Whether a block's range is none of finite nonzero magnitudes."""
    most = np.int64((1 << (bits - 1)) - 1)
    problem = False
    for start in range(0, len(out), _BLOCK):
        low, high = np.int64(ranges[2 * (start // _BLOCK)]), np.int64(ranges[2 * (start // _BLOCK) + 1])
        if low < 1 or low > high or high >= _INFINITY:
            problem = True
            low = high = np.int64(1)
        size = min(_BLOCK, len(out) - start)
        for i in range(size):
            octet = (
                np.int64(octets[start + i])
                if bits == 8
                else np.int64(octets[(start + i) >> 1]) >> 4 * (i & 1)
            )
            magnitude = _decoded(
                np.float64(octet & most), np.float64(low), np.float64(high - low), np.float64(most)
            )
            sign = np.int32(octet >> (bits - 1) & 1) << np.int32(31)
            out[start + i].value = np.int32(np.int32(magnitude) | sign).view(np.float32)
    return problem


def encode_values(
    entries: NDArray[np.void], wire: NDArray[np.void], layout: Any, rounds: bool, report: NDArray[np.float64]
) -> None:
    """Encode the values of a list, as `collectives.sum_values` says.

    Args:
        entries: ENTRY[layout.count], count >= 1. Where values are rounded they become their rounding errors.
        wire: ENTRY[layout.words / 2].
        layout: of `collectives.sum_values.values_layout`.
        rounds: the wire rounds.
        report: float64[2]; becomes the sums of the magnitudes of rounding errors and of values, where the wire rounds.
    """
    words = wire.view(np.uint32)
    if not rounds:
        words[: layout.count] = entries["value"].view(np.uint32)
        words[layout.count :] = 0
        return
    words[:] = 0
    if layout.bits == 16:
        report[:2] = _encode_halves(entries, words.view(np.uint16), 0)
    else:
        octets = words[layout.values :].view(np.uint8)
        report[:2] = _round_to_steps(entries, words, octets, layout.bits, _STEPS[layout.bits])


def decode_values(
    wire: NDArray[np.void], layout: Any, out: NDArray[np.void], add: bool, report: NDArray[np.float64]
) -> None:
    """Decode values.

    Args:
        wire: ENTRY[layout.words / 2].
        layout: of `collectives.sum_values.values_layout`.
        out: ENTRY[layout.count].
        add: to the values that are there; else in place of them.
        report: float64[1]; becomes the number of such values in `collectives.codec.DAMAGES` where one is Inf or NaN.
    """
    step = _STEPS.get(layout.bits, 0)
    if _decode_values(wire.view(np.uint32), layout.values, layout.bits, step, add, out):
        report[0] = _VALUES


@compiled((ENTRIES, _WORDS, _BYTES, INT, INT))
def _round_to_steps(entries, ranges, octets, bits, step):  # type: ignore[no-untyped-def]
    most = (np.int64(1) << (bits - 1)) - 1
    lost = mass = 0.0
    for start in range(0, len(entries), _BLOCK):
        stop = min(start + _BLOCK, len(entries))
        largest = np.int64(0)
        for i in range(start, stop):
            largest = max(largest, np.int64(np.float32(entries[i].value).view(np.int32)) & _MAGNITUDE)
        ranges[start // _BLOCK] = np.uint32(largest)
        for i in range(start, stop):
            value = np.float32(entries[i].value)
            word = np.int64(value.view(np.int32))
            magnitude = word & _MAGNITUDE
            steps = (largest - magnitude) // step
            code = max(most - steps, 1)
            above = np.int32(max(largest - (most - code) * step, 0)).view(np.float32)
            below = (
                np.int32(max(largest - (most - code + 1) * step, 0)).view(np.float32)
                if code > 1
                else np.float32(0)
            )
            size = np.int32(magnitude).view(np.float32)
            if above - size < size - below:
                decoded = above
            else:
                decoded = below
                code -= 1
            decoded = -decoded if word < 0 else decoded
            code |= np.int64(word < 0) << (bits - 1)
            if bits == 8:
                octets[i] = code
            else:
                octets[i >> 1] |= code << 4 * (i & 1)
            error = np.float32(value - decoded)
            entries[i].value = error
            lost += abs(np.float64(error))
            mass += abs(np.float64(value))
    return lost, mass


@compiled((_WORDS, INT, INT, INT, BOOL, ENTRIES))
def _decode_values(words, values, bits, step, add, out):  # type: ignore[no-untyped-def]
    """Whether a value is Inf or NaN."""
    most = (np.int64(1) << (bits - 1)) - 1
    problem = False
    for i in range(len(out)):
        place = np.int64(i) * bits
        word = np.int64(words[values + (place >> 5)]) >> (place & 31)
        if bits == 32:
            magnitude, negative = word & _MAGNITUDE, word >> 31
        elif bits == 16:
            magnitude, negative = (word & 0x7FFF) << 16, word >> 15 & 1
        else:
            largest, code = np.int64(words[i // _BLOCK]), word & most
            magnitude, negative = (
                max(largest - (most - code) * step, 0) if code else np.int64(0),
                word >> (bits - 1) & 1,
            )
            magnitude = magnitude if largest < _INFINITY else _INFINITY + 1
        problem |= magnitude >= _INFINITY
        value = np.int32(magnitude | negative << 31).view(np.float32)
        out[i].value = np.float32(out[i].value + value) if add else value
    return problem
