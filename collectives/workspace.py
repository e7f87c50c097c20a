"""Scratch memory that outlives a step, so that a regular step allocates nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.sparse import ENTRY


class Workspace:
    """Named buffers that grow by half and never shrink.

    Each transport has its own, so that instances side by side share no scratch.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[Any]] = {}

    def entries(self, name: str, count: int) -> NDArray[np.void]:
        """ENTRY[count], contents undefined; valid until the same name is asked for again."""
        return self._take(name, count, ENTRY)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _take(self, name: str, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < count:
            grown = 0 if buffer is None else len(buffer) * 3 // 2
            buffer = self._buffers[name] = np.empty(max(count, grown), dtype)
        return buffer[:count]
