"""Scratch memory that outlives a step, so that a regular step allocates nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.sparse import ENTRY, Entries


class Workspace:
    """Named buffers that grow by half, and shrink where they are forgotten.

    Each transport has its own, so that instances side by side share no scratch.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Any] = {}

    def entries(self, name: str, count: int) -> Entries:
        """ENTRY[count], contents undefined; valid until the same name is asked for again."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < count:
            grown = 0 if buffer is None else len(buffer) * 3 // 2
            buffer = self._buffers[name] = self._allocate(max(count, grown))
        return buffer[:count]

    def forget(self, *names: str) -> None:
        """Drop buffers, all of them without names; their memory is freed with the last entries that refer to it."""
        for name in names or tuple(self._buffers):
            self._buffers.pop(name, None)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _allocate(self, count: int) -> Any:  # DeviceEntries on a GPU
        return np.empty(count, ENTRY)
