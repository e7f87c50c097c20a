"""Gradients for the contract's tests: small integers as float32, so that every sum is exact in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from collectives.sparse import ENTRY, MAX_LENGTH

Vector = NDArray[np.float32]
Draw = Callable[[np.random.Generator, int, int, int], Vector]

DENORMAL = np.float32(1e-45)


def _iid(rng: np.random.Generator, length: int, rank: int, size: int) -> Vector:
    return rng.integers(-999, 1000, length).astype(np.float32)


def _heavy_tailed(rng: np.random.Generator, length: int, rank: int, size: int) -> Vector:
    return np.trunc(np.clip(rng.standard_cauchy(length) * 8, -60000, 60000)).astype(np.float32)


def _clustered(rng: np.random.Generator, length: int, rank: int, size: int) -> Vector:
    gradient = rng.integers(-3, 4, length)
    hot = slice(length // 3, length // 3 + max(1, length // 16))
    gradient[hot] *= rng.integers(50, 200, gradient[hot].shape)
    return gradient.astype(np.float32)


def _one_element_region(rng: np.random.Generator, length: int, rank: int, size: int) -> Vector:
    gradient = np.zeros(length, np.float32)
    gradient[: max(1, length // 50)] = rng.integers(1, 99, max(1, length // 50))
    return gradient


def _silent_rank(rng: np.random.Generator, length: int, rank: int, size: int) -> Vector:
    return _iid(rng, length, rank, size) * (rank != 0)


def _zero(rng: np.random.Generator, length: int, rank: int, size: int) -> Vector:
    return np.zeros(length, np.float32)


def _negative_zero(rng: np.random.Generator, length: int, rank: int, size: int) -> Vector:
    return np.full(length, -0.0, np.float32)


def _constant(rng: np.random.Generator, length: int, rank: int, size: int) -> Vector:
    return np.full(length, 3.0, np.float32)


def _ties(rng: np.random.Generator, length: int, rank: int, size: int) -> Vector:
    return rng.integers(-1, 2, length).astype(np.float32)


def _denormal(rng: np.random.Generator, length: int, rank: int, size: int) -> Vector:
    return rng.integers(-99, 100, length).astype(np.float32) * DENORMAL


def _few_nonzeros(rng: np.random.Generator, length: int, rank: int, size: int) -> Vector:
    gradient = np.zeros(length, np.float32)
    gradient[rng.integers(0, length)] = rank + 1
    return gradient


def _disjoint(rng: np.random.Generator, length: int, rank: int, size: int) -> Vector:
    gradient = _iid(rng, length, rank, size)
    return gradient * (np.arange(length) * size // length == rank)


def _cancelling(rng: np.random.Generator, length: int, rank: int, size: int) -> Vector:
    same_everywhere = np.random.default_rng(7).integers(1, 500, length).astype(np.float32)
    return same_everywhere * (1 if rank % 2 else -1)


GRADIENTS: dict[str, Draw] = {
    "iid": _iid,
    "heavy tailed": _heavy_tailed,
    "clustered": _clustered,
    "one region": _one_element_region,
    "silent rank": _silent_rank,
    "zero": _zero,
    "negative zero": _negative_zero,
    "constant": _constant,
    "ties": _ties,
    "denormal": _denormal,
    "few nonzeros": _few_nonzeros,
    "disjoint": _disjoint,
    "cancelling": _cancelling,
}

SHAPES = ((1, 0.01), (3, 0.25), (7, 0.2), (257, 0.25), (1000, 0.05), (9001, 0.01))
"""(length, density): shorter than the ranks, k = 1, the densest that is still sparse, several blocks long."""


def kinds_with(settings: Mapping[str, object]) -> list[Any]:
    """(kind, name of a setting) for all pairs; all but one setting of each kind are left to `make test-all`."""
    return [
        pytest.param(
            kind,
            name,
            marks=[]
            if at % len(settings) == number
            else pytest.mark.long("`make test` has each kind with one setting"),
        )
        for at, kind in enumerate(GRADIENTS)
        for number, name in enumerate(settings)
    ]


def shapes_of(kind: str, setting: int, settings: int) -> list[tuple[int, float]]:
    """The shapes to try a kind of gradient with under one of several settings.

    Over all settings a kind meets every shape once. Every kind meets every setting, and every setting every shape: a bug
    of two of the three is found, and the whole product took three to four times as long.
    """
    first = list(GRADIENTS).index(kind)
    return [shape for at, shape in enumerate(SHAPES) if (first + at) % settings == setting]


def entries_with(indices: ArrayLike, values: ArrayLike) -> NDArray[np.void]:
    """ENTRY[nnz] of these indices and values."""
    entries = np.empty(len(np.asarray(indices)), ENTRY)
    entries["index"], entries["value"] = indices, values
    return entries


def _listed(
    indices: ArrayLike, values: ArrayLike, lower: int, upper: int
) -> tuple[NDArray[np.void], int, int]:
    return entries_with(indices, values), lower, upper


_LARGEST = float(np.finfo(np.float32).max)
_drawn = np.random.default_rng(11).standard_t(2, 5000)

UGLY_LISTS: dict[str, Callable[[], tuple[NDArray[np.void], int, int]]] = {
    "nothing": lambda: _listed([], [], 3, 900),
    "one entry": lambda: _listed([899], [-2.5], 3, 900),
    "an index alone": lambda: _listed([7], [1.5], 7, 8),
    "every index": lambda: _listed(np.arange(9, 1309), _drawn[:1300], 9, 1309),
    "the first and the last": lambda: _listed([0, MAX_LENGTH - 1], [1, -1], 0, MAX_LENGTH),
    "high indices": lambda: _listed(
        MAX_LENGTH - 900 + 3 * np.arange(300), _drawn[:300], MAX_LENGTH - 900, MAX_LENGTH
    ),
    "two clusters": lambda: _listed(
        np.concatenate([np.arange(100, 400), np.arange(10**6, 10**6 + 300)]), _drawn[:600], 0, 1_100_000
    ),
    "random": lambda: _listed(np.arange(0, 35_000, 7) + np.arange(5000) % 7, _drawn, 0, 36_000),
    "denormal": lambda: _listed(np.arange(0, 9000, 30), DENORMAL * np.arange(1, 301), 0, 9000),
    "largest": lambda: _listed(np.arange(0, 9000, 30), np.resize([_LARGEST, -_LARGEST, 1e38], 300), 0, 9000),
    "equal magnitudes": lambda: _listed(np.arange(0, 9000, 30), np.resize([3, -3], 300), 0, 9000),
    "one huge": lambda: _listed(np.arange(0, 9000, 30), np.where(np.arange(300) == 5, 1e30, 1e-3), 0, 9000),
    "zeros": lambda: _listed(np.arange(0, 9000, 30), np.resize([0.0, -0.0], 300), 0, 9000),
}
"""A list and the range of its indices, by name."""
