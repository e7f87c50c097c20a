"""Rows of a table for tests, and their elements as float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.table_rows import Rows


def widened(values: Any, kind: str) -> NDArray[np.float32]:
    """Elements of one of `collectives.element_types.ELEMENT_TYPES` as float32."""
    if kind == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def narrowed(values: NDArray[np.float32], kind: str) -> Any:
    """float32 rounded to nearest even."""
    if kind == "float32":
        return values.astype(np.float32)
    if kind == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(values), bits >> np.uint64(16) | np.uint64(0x40), rounded).astype(np.uint16)


def touched(seed: int, length: int, count: int, width: int, kind: str, skewed: bool = False) -> Rows:
    """Rows in any order, some of them more than once; skewed: low ones far more often, by Zipf's law."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, length, count)
    if skewed:
        chances = 1.0 / np.arange(1, length + 1)
        rows = rng.choice(length, count, p=chances / chances.sum())
    values = rng.standard_normal((count, width)) * 10.0 ** rng.integers(-3, 3, (count, 1))
    return Rows(rows.astype(np.int32), narrowed(values.astype(np.float32), kind))
