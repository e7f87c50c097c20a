"""AdamW on the host, in the pass that adds what it moves parameters by to the residual and selects."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import carray, types
from numba.extending import register_jitable
from numpy.typing import NDArray

from collectives.cpu.compiled import ENTRIES, INT, VECTOR, compiled
from collectives.cpu.lanes import (
    LANES,
    LINE,
    add,
    divide,
    floats_at,
    fused,
    halves_at,
    load,
    multiply,
    prefetch,
    root,
    spread,
    store,
    subtract,
)
from oktopk.cpu.accumulate import (
    AHEAD,
    FLOAT32,
    KINDS,
    PIECE,
    HostMoves,
    accumulate_range,
    narrow,
    round_to,
    widen,
)
from oktopk.displacement import ADAMW_TERMS, AdamWDisplacement

_GRADIENT, _FIRST, _SECOND = range(1, 4)  # columns of addresses, behind where a tensor begins


class HostAdamW(HostMoves, AdamWDisplacement):
    """AdamW's step on parameters in host memory.

    Args:
        sizes: as HostMoves.
        element_type: of gradients and moments: "float32", "bfloat16" or "float16".
    """

    def __init__(self, sizes: Sequence[int], element_type: str) -> None:
        super().__init__(sizes, addresses=3)
        self._kind = KINDS[element_type]
        self._terms = np.zeros((len(self._filled), len(ADAMW_TERMS)), np.float32)

    def set_step(self, addresses: NDArray[np.int64], terms: NDArray[np.float32]) -> None:
        self._spans[:-1, _GRADIENT:] = addresses.T[self._filled]
        self._terms[:] = terms[self._filled]

    def accumulate(
        self, residual: NDArray[np.float32], threshold: np.int32, entries: NDArray[np.void]
    ) -> tuple[int, int]:
        layout = self._spans, self._kind, self._terms
        packed, nonfinite = _accumulate_adamw(*layout, residual, threshold, entries)
        return packed, nonfinite


@compiled((types.int64[:, ::1], INT, types.float32[:, ::1], VECTOR, types.int32, ENTRIES))
def _accumulate_adamw(spans, kind, every, residual, threshold, entries):  # type: ignore[no-untyped-def]
    moved, rest = np.zeros(PIECE, np.float32), np.empty(2 * LANES, np.float32)
    gradient, edge = np.empty(PIECE, np.float32), np.empty(4 * LANES, np.float32)
    mean, square = np.empty(PIECE, np.float32), np.empty(PIECE, np.float32)
    packed = nonfinite = 0
    for tensor in range(len(spans) - 1):
        begin, end, address = spans[tensor, 0], spans[tensor + 1, 0], spans[tensor, _GRADIENT]
        first, second, terms = spans[tensor, _FIRST], spans[tensor, _SECOND], every[tensor]
        for start in range(begin, end, PIECE):
            stop = min(start + PIECE, end)
            size, at = stop - start, start - begin
            if not address:
                moved[:] = 0
            elif kind == FLOAT32:
                _adamw(
                    carray(floats_at(address + 4 * at), size), carray(floats_at(first + 4 * at), size),
                    carray(floats_at(second + 4 * at), size), terms, moved, edge,
                )  # fmt: skip
            else:
                m, v = carray(halves_at(first + 2 * at), size), carray(halves_at(second + 2 * at), size)
                widen(carray(halves_at(address + 2 * at), size), kind, gradient)
                widen(m, kind, mean)
                widen(v, kind, square)
                _adamw(gradient[:size], mean[:size], square[:size], terms, moved, edge)
                round_to(kind, mean[:size])
                round_to(kind, square[:size])
                narrow(mean, kind, m)
                narrow(square, kind, v)
            packed, bad = accumulate_range(
                moved, -start, PIECE, 1, residual, start, stop, threshold, entries, packed, rest
            )
            nonfinite += bad
    return packed, nonfinite


@register_jitable
def _adamw(g, m, v, terms, moved, edge):  # type: ignore[no-untyped-def]
    """Update the moments, and write by how much parameters move.

    Args:
        edge: float32[4 LANES], for what is left at the end, padded with zeros.
    """
    size = len(g)
    whole = size - size % LANES
    for i in range(0, whole, LANES):
        for ahead in range(i + AHEAD, i + AHEAD + LANES, LINE):
            prefetch(g, ahead)
            prefetch(m, ahead)
            prefetch(v, ahead)
        _adamw_lanes(g, m, v, terms, moved, i)
    if whole < size:
        left = size - whole
        edge[:] = 0
        mean, square, to = edge[LANES:], edge[2 * LANES :], edge[3 * LANES :]
        edge[:left], mean[:left], square[:left] = g[whole:], m[whole:], v[whole:]
        _adamw_lanes(edge, mean, square, terms, to, 0)
        m[whole:], v[whole:], moved[whole:size] = mean[:left], square[:left], to[:left]


@register_jitable
def _adamw_lanes(g, m, v, terms, moved, at):  # type: ignore[no-untyped-def]
    gradient, mean, square = load(g, at), load(m, at), load(v, at)
    toward = subtract(gradient, mean)
    if terms[1]:
        mean = gradient
    mean = fused(spread(terms[0]), toward, mean)
    square = fused(multiply(spread(terms[3]), gradient), gradient, multiply(square, spread(terms[2])))
    store(m, at, mean)
    store(v, at, square)
    size = add(divide(root(square), spread(terms[5])), spread(terms[6]))
    store(moved, at, divide(multiply(spread(terms[4]), mean), size))
