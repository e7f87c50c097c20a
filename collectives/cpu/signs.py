"""Values as signs: one bit each, and one magnitude for a block of at most 512 of them.

The code of a block is CODE_WORDS words: the mean magnitude of its elements as a float32, then a bit for each, 1 for negative.
Each element decodes to plus or minus that mean. Blocks are dealt to owners in turn: of codes [owners, rows, CODE_WORDS] that of
[owner, row] is of block `first + row * owners + owner`, all zero behind the last block.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numba import types
from numpy.typing import NDArray

from collectives.cpu.compiled import BOOL, FLOAT, INT, VECTOR, compiled

BLOCK = 512
"""Elements that share a magnitude, at most."""

CODE_WORDS = 1 + BLOCK // 32
"""Words of a block's code."""

_MOST = np.finfo(np.float32).max
_LANES = 32  # partial sums of a block, which are added pair by pair: so a warp adds them
_CODES = types.uint32[:, :, ::1]
_BOUNDS = types.int64[::1]


def block_bounds(parts: Iterable[int]) -> NDArray[np.int64]:
    """int64[blocks + 1], where the blocks of a vector begin, and its end: no block has elements of two parts.

    Args:
        parts: elements of each, in the order of the vector.
    """
    parts = np.array([part for part in parts if part], np.int64)
    ends = np.cumsum(parts)
    if not len(parts):
        return np.zeros(1, np.int64)
    blocks = -(-parts // BLOCK)
    within = np.arange(blocks.sum()) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    return np.append(np.repeat(ends - parts, blocks) + within * BLOCK, ends[-1])


def place_bounds(bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bounds where these kernels read them."""
    return bounds


def encode_signs(
    values: NDArray[np.float32],
    bounds: NDArray[np.int64],
    first: int,
    owners: int,
    words: NDArray[np.float32],
) -> None:
    """Code blocks of a vector.

    Args:
        values: float32[n], finite.
        bounds: of its blocks, as `place_bounds` gives them.
        first: number of the first block to code.
        owners: that blocks are dealt to.
        words: float32[owners * rows * CODE_WORDS], filled; all magnitudes are finite.
    """
    _encode(values, bounds, first, _codes(words, owners))


def _codes(words: NDArray[np.float32], owners: int) -> NDArray[np.uint32]:
    return words.view(np.uint32).reshape(owners, -1, CODE_WORDS)


@compiled((VECTOR, _BOUNDS, INT, _CODES))
def _encode(values, bounds, first, codes):  # type: ignore[no-untyped-def]
    owners, rows = codes.shape[0], codes.shape[1]
    bits = values.view(np.uint32)
    sums = np.empty(_LANES, np.float32)
    for owner in range(owners):
        for row in range(rows):
            block = first + row * owners + owner
            code = codes[owner, row]
            code[:] = 0
            if block >= len(bounds) - 1:
                continue
            begin, stop = bounds[block], bounds[block + 1]
            sums[:] = 0
            weight = np.float32(1) / np.float32(stop - begin)  # so that no sum of finite values overflows
            for at in range(begin, stop, _LANES):
                word = np.uint32(0)
                width = min(_LANES, stop - at)
                for lane in range(width):
                    sums[lane] += abs(values[at + lane]) * weight
                for lane in range(width):
                    word |= (bits[at + lane] >> np.uint32(31)) << np.uint32(lane)
                code[1 + (at - begin) // _LANES] = word
            half = _LANES // 2
            while half:
                for lane in range(half):
                    sums[lane] += sums[lane + half]
                half //= 2
            sums[0] = min(sums[0], _MOST)  # a weight that was rounded up can overflow the sum
            code[0] = sums.view(np.uint32)[0]


def subtract_signs(
    values: NDArray[np.float32],
    bounds: NDArray[np.int64],
    first: int,
    owners: int,
    words: NDArray[np.float32],
) -> None:
    """values -= what they were coded as, in the blocks that have a code; arguments as `encode_signs`."""
    _decode(values, bounds, first, _codes(words, owners), -1.0, True)


def write_signs(
    values: NDArray[np.float32],
    bounds: NDArray[np.int64],
    first: int,
    owners: int,
    words: NDArray[np.float32],
    scale: float,
) -> None:
    """values = scale times the decoded, in the blocks that have a code; arguments as `encode_signs`."""
    _decode(values, bounds, first, _codes(words, owners), scale, False)


@compiled((VECTOR, _BOUNDS, INT, _CODES, FLOAT, BOOL))
def _decode(values, bounds, first, codes, scale, added):  # type: ignore[no-untyped-def]
    owners, rows = codes.shape[0], codes.shape[1]
    for owner in range(owners):
        for row in range(rows):
            block = first + row * owners + owner
            if block >= len(bounds) - 1:
                break
            begin, stop, code = bounds[block], bounds[block + 1], codes[owner, row]
            one = np.float32(code[:1].view(np.float32)[0] * np.float32(scale))
            for at in range(begin, stop, _LANES):
                word = code[1 + (at - begin) // _LANES]
                for lane in range(min(_LANES, stop - at)):
                    value = -one if word >> np.uint32(lane) & np.uint32(1) else one
                    values[at + lane] = values[at + lane] + value if added else value


def sum_signs(
    words: NDArray[np.float32],
    ranks: int,
    bounds: NDArray[np.int64],
    first: int,
    kept: NDArray[np.float32],
    sums: NDArray[np.float32],
) -> bool:
    """Add what the ranks sent of one owner's blocks to what it has kept, in the order of the ranks.

    Args:
        words: float32[ranks * rows * CODE_WORDS], of the blocks from `first` on.
        bounds: of the owner's blocks in these vectors.
        kept, sums: float32[m]; read, and filled in these blocks.

    Returns:
        Whether all sums are finite.
    """
    return bool(_sum(_codes(words, ranks), bounds, first, kept, sums))


@compiled((_CODES, _BOUNDS, INT, VECTOR, VECTOR))
def _sum(codes, bounds, first, kept, sums):  # type: ignore[no-untyped-def]
    finite = True
    for row in range(min(codes.shape[1], len(bounds) - 1 - first)):
        begin, stop = bounds[first + row], bounds[first + row + 1]
        sums[begin:stop] = kept[begin:stop]
        for rank in range(codes.shape[0]):
            code = codes[rank, row]
            one = code[:1].view(np.float32)[0]
            for at in range(begin, stop, _LANES):
                word = code[1 + (at - begin) // _LANES]
                for lane in range(min(_LANES, stop - at)):
                    sums[at + lane] += -one if word >> np.uint32(lane) & np.uint32(1) else one
        for i in range(begin, stop):
            finite = finite and np.isfinite(sums[i])
    return finite
