"""Some rows of a table, and which of them there are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from collectives.sparse import MAX_LENGTH, Array

MOST_ON_GPU = (1 << 31) - 1
"""Rows at most that a GPU adds up at a time."""

LONGEST_ON_GPU = 1 << 33
"""Rows of a table at most: the id of a row and its place among MOST_ON_GPU are sorted as one word of 64 bits."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a table.

    Attributes:
        rows: int32[m] or int64[m], where a table is longer than 2**31 - 1 rows; ascending strictly.
        values: [m, width] of the table's type; row j is that of rows[j].
    """

    rows: Array
    values: Array

    def __len__(self) -> int:
        return len(self.rows)


def row_type(length: int) -> type[np.int32 | np.int64]:
    """Of the row ids of a table of so many rows."""
    return np.int32 if length <= MAX_LENGTH else np.int64


def check_rows(rows: Array, length: int) -> None:
    """Raise ValueError where one of some row ids is not in a table of so many rows."""
    low, high = int(rows.min()), int(rows.max())
    if not 0 <= low <= high < length:
        raise ValueError(f"row {low if low < 0 else high} is not in [0, {length})")
