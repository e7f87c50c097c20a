"""Host kernels that code entries; the format is that of `collectives.codec`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

ASYNCHRONOUS = False
"""Whether a call returns before what it computes is known."""

_BLOCK = 256
_MAGNITUDE = np.int64(0x7FFFFFFF)
_INFINITY = np.int64(0x7F800000)
_WORD = np.int64(0xFFFFFFFF)
_COUNT, _ORDER, _VALUES = 1, 2, 3  # of collectives.codec.DAMAGES

# place of the only bit of a word, by a product that differs for each (de Bruijn)
_PLACE = np.zeros(32, np.int64)
_PLACE[[(0x077CB531 << bit & 0xFFFFFFFF) >> 27 for bit in range(32)]] = np.arange(32)


def codec_report(ranks: int) -> NDArray[np.float64]:
    """float64[ranks, 4] that `encode_entries` and `decode_entries` write to."""
    return np.zeros((ranks, 4))


def zero_entries(entries: NDArray[np.void]) -> None:
    """Fill ENTRY[m] with zeros."""
    entries.view(np.int64)[:] = 0


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
        wire: ENTRY[layout.words / 2], zeroed.
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
    _encode_indices(entries, words, layout.lower, layout.low_bits, layout.lows, layout.bitmap)
    if layout.bits == 32:
        words[: layout.count] = entries["value"].view(np.uint32)
    elif layout.bits == 16:
        report[:2] = _encode_halves(entries, words.view(np.uint16))
    else:
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
        if bits == 32:
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


@njit(cache=True)
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


@njit(cache=True)
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


@njit(cache=True)
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


@njit(cache=True)
def _encode_halves(entries, halves):  # type: ignore[no-untyped-def]
    lost = mass = 0.0
    for i in range(len(entries)):
        value = entries[i].value
        bits = np.int64(np.float32(value).view(np.int32)) & _WORD
        magnitude = bits & _MAGNITUDE
        half: Any = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        half = min(max(half, 1), 0x7F7F) | (bits >> 31) << 15
        halves[i] = half
        error = np.float32(value - np.uint32(half << 16).view(np.float32))
        entries[i].value = error
        lost += abs(np.float64(error))
        mass += abs(np.float64(value))
    return lost, mass


@njit(cache=True)
def _decode_halves(halves, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        out[i].value = np.uint32(np.uint32(halves[i]) << 16).view(np.float32)


@njit(cache=True)
def _decoded(code, low, span, most):  # type: ignore[no-untyped-def]
    """The magnitude of a code."""
    return np.uint32(low + (code * span + most // 2) // most).view(np.float32)


@njit(cache=True)
def _encode_codes(entries, ranges, octets, bits):  # type: ignore[no-untyped-def]
    most = np.int64((1 << (bits - 1)) - 1)
    lost = mass = 0.0
    magnitudes = np.empty(_BLOCK, np.int64)
    for start in range(0, len(entries), _BLOCK):
        stop = min(start + _BLOCK, len(entries))
        low: Any = _MAGNITUDE
        high: Any = np.int64(1)
        for i in range(start, stop):
            magnitude: Any = max(np.int64(np.float32(entries[i].value).view(np.int32)) & _MAGNITUDE, 1)
            magnitudes[i - start] = magnitude
            low, high = min(low, magnitude), max(high, magnitude)
        ranges[2 * (start // _BLOCK)], ranges[2 * (start // _BLOCK) + 1] = low, high
        span = high - low
        scale = np.float64(most) / np.float64(max(span, 1))
        for i in range(start, stop):
            value, magnitude = entries[i].value, magnitudes[i - start]
            # floor of the exact quotient: that is at least 2^-31 below an integer that it does not reach
            code = min(np.int64(np.float64(magnitude - low) * scale + 2.0**-40), most - 1) if span else 0
            exact = np.uint32(magnitude).view(np.float32)
            below, above = _decoded(code, low, span, most), _decoded(code + 1, low, span, most)
            nearer_above = np.float32(exact - below) > np.float32(above - exact)
            code += nearer_above
            decoded = above if nearer_above else below
            sign = np.int64(np.float32(value).view(np.int32) < 0)
            if bits == 8:
                octets[i] = code | sign << 7
            else:
                octets[i >> 1] |= (code | sign << 3) << 4 * (i & 1)
            error = np.float32(value + decoded) if sign else np.float32(value - decoded)
            entries[i].value = error
            lost += abs(np.float64(error))
            mass += abs(np.float64(value))
    return lost, mass


@njit(cache=True)
def _decode_codes(ranges, octets, bits, out):  # type: ignore[no-untyped-def]
    """Whether a block's range is none of finite nonzero magnitudes."""
    most = np.int64((1 << (bits - 1)) - 1)
    problem = False
    for start in range(0, len(out), _BLOCK):
        low, high = np.int64(ranges[2 * (start // _BLOCK)]), np.int64(ranges[2 * (start // _BLOCK) + 1])
        if low < 1 or low > high or high >= _INFINITY:
            problem = True
            low = high = np.int64(1)
        span = high - low
        for i in range(start, min(start + _BLOCK, len(out))):
            octet = np.int64(octets[i]) if bits == 8 else np.int64(octets[i >> 1]) >> 4 * (i & 1)
            magnitude = _decoded(octet & most, low, span, most)
            out[i].value = -magnitude if octet >> (bits - 1) & 1 else magnitude
    return problem
