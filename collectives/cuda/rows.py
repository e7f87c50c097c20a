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
from collectives.cuda.layouts import (
    COMPACT_THREADS,
    COMPACT_TILE,
    HOT_ROWS,
    MOST_PEERS,
    RowsSummed,
    RowState,
)
from collectives.rows import LONGEST_ON_GPU, Rows, row_type, rows_problem

_SOURCE = Path(__file__).with_name("rows.cu")
_TYPES = {"float32": "float", "bfloat16": "__nv_bfloat16", "float16": "__half"}
_THREADS = 256
"""Of a block of `sum_rows`."""
_STATE_BYTES = RowState.nonfinite.offset + 4


class DeviceRowKernels:
    """See `collectives.rows.RowKernels`; arrays of CuPy, in the memory of its pool.

    What returns sums waits for the stream: once where they have room, else twice, since their number decides how much they need.

    Args:
        device: where they run.
        element_type: of the tables.

    Memory: some 13 bytes a row that is summed, kept.
    """

    arrays: Any = cupy

    def __init__(self, device: Device, element_type: str) -> None:
        self._device = device
        module = compiled(_SOURCE, f"GRADIENT={_TYPES[element_type]}")
        names = ("pack_rows", "merge_rows", "mark_rows", "sum_rows")
        kernels = (Kernel(module, name) for name in names)
        self._pack_rows, self._merge_rows, self._mark_rows, self._sum_rows = kernels

    def coalesce(self, rows: Any, values: Any, length: int, scale: float) -> tuple[Rows, int]:
        return self.coalesce_into(None, rows, values, length, scale)

    def coalesce_into(
        self, room: Rows | None, rows: Any, values: Any, length: int, scale: float
    ) -> tuple[Rows, int]:
        """As `coalesce`; the sums are in `room` where it is large enough."""
        if not len(rows):
            return Rows(self.empty(0, rows).astype(row_type(length)), self.empty(0, values)), 0
        with self._device.gpu, self._device.stream:
            keys = self._sort(rows, length)
            lists = [(0, address_of(values))]
            sums, report = self._add_up(keys, row_type(length), lists, values, scale, room)
        if report.outside:
            raise ValueError(rows_problem(rows, length))
        return sums, report.nonfinite

    def merge(self, rows: Any, values: Any, firsts: NDArray[np.int64], scale: float) -> tuple[Rows, int]:
        return self.merge_into(None, rows, firsts, [(0, address_of(values))], values, scale)

    def merge_into(
        self,
        room: Rows | None,
        rows: Any,
        firsts: NDArray[np.int64],
        lists: Sequence[tuple[int, int]],
        like: Any,
        scale: float,
    ) -> tuple[Rows, int]:
        """As `merge`, where the values lie in several lists; the sums are in `room` where it is large enough.

        Args:
            lists: of each how many rows are before it, and the address of its values, which may be in another rank's memory.
            like: its type and width are those of the values.
        """
        if not len(rows):
            return Rows(rows, self.empty(0, like)), 0
        with self._device.gpu, self._device.stream:
            keys = self._merge(rows, firsts)
            sums, report = self._add_up(keys, rows.dtype, lists, like, scale, room)
        return sums, report.nonfinite

    def _sort(self, rows: Any, length: int) -> Any:
        """Keys of rows, in order."""
        keys, state = self._prepare(len(rows))
        pointers = {"ids": address_of(rows), "keys": address_of(keys), "state": state}
        fields = {"length": length, "wide": rows.itemsize == 8, "shift": _shift(len(rows))}
        self._device.launch_for(self._pack_rows, len(rows), **pointers, **fields)
        keys.sort()  # by a radix sort
        return keys

    def _merge(self, rows: Any, firsts: NDArray[np.int64]) -> Any:
        """Keys of rows, in order, that lie in ascending lists from these places on."""
        if len(firsts) > MOST_PEERS:
            return self._sort(rows, LONGEST_ON_GPU)
        keys, _ = self._prepare(len(rows))
        pointers = {"ids": address_of(rows), "keys": address_of(keys), "firsts": firsts.tobytes()}
        fields = {"lists": len(firsts), "wide": rows.itemsize == 8, "shift": _shift(len(rows))}
        self._device.launch_for(self._merge_rows, len(rows), **pointers, **fields)
        return keys

    def _prepare(self, count: int) -> tuple[Any, int]:
        """Keys of so many rows, and the address of a state that is zero."""
        state = address_of(self._device.scratch("rows state", _STATE_BYTES, np.uint8))
        self._device.zero(state, _STATE_BYTES)
        return self._device.scratch("row keys", count, np.uint64)[:count], state

    def _add_up(
        self,
        keys: Any,
        id_type: Any,
        lists: Sequence[tuple[int, int]],
        like: Any,
        scale: float,
        room: Rows | None,
    ) -> tuple[Rows, Any]:
        """Sums of the rows whose keys lie in order, and what the kernels report. Waits for the stream."""
        report = self._device.view("rows", RowsSummed)
        if room is not None:
            self._launch_mark(keys, room.rows, len(room))
            self._launch_sum(keys, lists, room.values, scale)
            self._device.synchronize()
            if report.count <= len(room) or report.outside:
                return Rows(room.rows[: report.count], room.values[: report.count]), report
            self._prepare(len(keys))
        ids = cupy.empty(len(keys), id_type)
        self._launch_mark(keys, ids, len(keys))
        self._device.synchronize()
        sums = cupy.empty((report.count, like.shape[1]), like.dtype)
        self._launch_sum(keys, lists, sums, scale)
        self._device.synchronize()
        return Rows(ids[: report.count], sums), report

    def _launch_mark(self, keys: Any, ids: Any, capacity: int) -> None:
        """Put on the stream: where each id begins in the keys, and the ids."""
        device, count = self._device, len(keys)
        tiles = -(-count // COMPACT_TILE)
        device.launch(
            self._mark_rows,
            tiles,
            COMPACT_THREADS,
            keys=address_of(keys),
            n=count,
            ids=address_of(ids),
            capacity=capacity,
            **self._marks(count),
            scan=device.scan("rows", tiles),
            wide=ids.itemsize == 8,
            shift=_shift(count),
            report=device.address("rows"),
        )

    def _launch_sum(self, keys: Any, lists: Sequence[tuple[int, int]], sums: Any, scale: float) -> None:
        """Put on the stream: the sums, if there is room for all."""
        device, count, width = self._device, len(keys), sums.shape[1]
        row_bytes, four = width * sums.itemsize, 4 * sums.itemsize
        addresses = [address_of(sums), *(address for _, address in lists)]
        vectors = width % 4 == 0 and all(address % four == 0 for address in addresses)
        warps = count * -(-width // (512 if vectors else 128)) + count // HOT_ROWS * -(-width // 32)
        device.launch(
            self._sum_rows,
            min(-(-warps * 32 // _THREADS), 16 * device.processors),
            _THREADS,
            values=np.array([address - first * row_bytes for first, address in lists], np.int64).tobytes(),
            firsts=np.array([first for first, _ in lists], np.int64).tobytes(),
            lists=len(lists),
            vectors=vectors,
            keys=address_of(keys),
            position=(1 << _shift(count)) - 1,
            **self._marks(count),
            sums=address_of(sums),
            capacity=len(sums),
            width=width,
            scale=scale,
            report=device.address("rows"),
        )

    def _marks(self, count: int) -> dict[str, int]:
        """Where `mark_rows` tells `sum_rows` what it found of so many keys."""
        sizes = {"starts": count + 1, "hot": count // HOT_ROWS + 1}
        memory = self._device.scratch("row marks", sum(sizes.values()), np.uint32)
        starts = address_of(memory)
        state = address_of(self._device.scratch("rows state", _STATE_BYTES, np.uint8))
        return {"starts": starts, "hot": starts + 4 * sizes["starts"], "state": state}

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


def _shift(count: int) -> int:
    """Bits of a position among so many."""
    return max(1, (count - 1).bit_length())
