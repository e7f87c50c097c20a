"""Rows on a GPU: sort them by their id, and add up equal ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from collectives.cuda.device import Device, address_of
from collectives.cuda.launch import Kernel, compiled
from collectives.rows import Rows

_SOURCE = Path(__file__).with_name("rows.cu")
_TYPES = {"float32": "float", "bfloat16": "__nv_bfloat16", "float16": "__half"}
_WARPS = 8
"""Of a block."""


class DeviceRowKernels:
    """See `collectives.rows.RowKernels`; arrays of CuPy, in the memory of its pool. What returns a count waits for the stream.

    Args:
        device: where they run.
        element_type: of the tables.
    """

    arrays: Any = cupy

    def __init__(self, device: Device, element_type: str) -> None:
        self._device = device
        self._sum = Kernel(compiled(_SOURCE, f"GRADIENT={_TYPES[element_type]}"), "sum_rows")

    def coalesce(self, rows: Any, values: Any, scale: float) -> tuple[Rows, int]:
        return self.coalesce_lists(rows, [(0, address_of(values))], values, scale)

    def coalesce_lists(
        self, rows: Any, lists: Sequence[tuple[int, int]], like: Any, scale: float
    ) -> tuple[Rows, int]:
        """As `coalesce`, where the values lie in several lists.

        Args:
            rows: ids of all lists, one after the other.
            lists: of each how many rows are before it, and its address, which may be in another rank's memory.
            like: its type and width are those of the values.
        """
        width = like.shape[1]
        if not len(rows):
            return Rows(rows, self.empty(0, like)), 0
        row_bytes = width * like.itemsize
        bases = [address - first * row_bytes for first, address in lists]
        four = 4 * like.itemsize
        vectors = width % 4 == 0 and all(address % four == 0 for _, address in lists)
        with self._device.gpu, self._device.stream:
            order = cupy.argsort(rows)  # stable: by a radix sort
            ordered = rows[order]
            heads = cupy.ones(len(rows) + 1, np.bool_)  # the last one is the end
            heads[1:-1] = ordered[1:] != ordered[:-1]
            starts = cupy.flatnonzero(heads)
            count = len(starts) - 1
            ids = ordered[starts[:-1]]
            sums = cupy.empty((count, width), like.dtype)
            nonfinite = cupy.zeros(1, np.uint32)
            self._device.launch(
                self._sum,
                min(
                    -(-count * -(-width // (128 if vectors else 32)) // _WARPS), 16 * self._device.processors
                ),
                32 * _WARPS,
                values=np.array(bases, np.int64).tobytes(),
                firsts=np.array([first for first, _ in lists], np.int64).tobytes(),
                lists=len(lists),
                vectors=vectors,
                order=address_of(order),
                starts=address_of(starts),
                sums=address_of(sums),
                nonfinite=address_of(nonfinite),
                count=count,
                width=width,
                scale=scale,
            )
            return Rows(ids, sums), int(nonfinite.get()[0])

    def at(self, rows: Any, places: NDArray[np.int64]) -> NDArray[np.int64]:
        with self._device.gpu, self._device.stream:
            shown: NDArray[np.int64] = rows[cupy.asarray(places)].get().astype(np.int64)
        return shown

    def offsets(self, rows: Any, boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
        with self._device.gpu, self._device.stream:
            at: NDArray[np.int64] = cupy.searchsorted(rows, cupy.asarray(boundaries.astype(rows.dtype))).get()
        return at.astype(np.int64)

    def empty(self, count: int, like: Any) -> Any:
        with self._device.gpu, self._device.stream:
            self._device.pending = True  # memory of the pool may still be in use on the stream
            return cupy.empty((count, *like.shape[1:]), like.dtype)

    def copy(self, target: Any, source: Any) -> None:
        if target.nbytes:
            self._device.copy(address_of(target), address_of(source), target.nbytes)
