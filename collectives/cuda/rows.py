"""Rows on a GPU: sort them by their id, and add up equal ones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from collectives.cpu.rows import HostRowKernels
from collectives.cuda.device import CuArray, Device, address_of
from collectives.cuda.launch import Kernel, PreparedLaunch, compiled
from collectives.cuda.layouts import (
    COMPACT_THREADS,
    COMPACT_TILE,
    HOT_ROWS,
    MOST_PEERS,
    RowsSummed,
    RowState,
)
from collectives.element_types import ELEMENT_TYPES
from collectives.sparse import MAX_LENGTH
from collectives.table_rows import LONGEST_ON_GPU, MOST_ON_GPU, Rows, check_rows, row_type

_SOURCE = Path(__file__).with_name("rows.cu")
_THREADS = 256
"""Of a block that adds up rows."""


class DeviceRowKernels(HostRowKernels):
    """Arrays of CuPy, in the memory of its pool.

    What returns sums waits for the stream: once where they have room, else twice, since their number decides how much they need.

    Args:
        device: where they run.
        element_type: of the tables.

    Memory: some 13 bytes a row that is summed, kept.
    """

    arrays: Any = cupy

    def __init__(self, device: Device, element_type: str) -> None:
        self._device = device
        module = compiled(_SOURCE, f"GRADIENT={ELEMENT_TYPES[element_type].cuda}")
        state = address_of(device.scratch("rows state", ctypes.sizeof(RowState), np.uint8))
        self._report = device.view("rows", RowsSummed)
        report = device.address("rows")
        # launches keep their parameters, of which a step sets those that change
        self._pack = Kernel(module, "pack_rows").prepare(state=state)
        self._merge = Kernel(module, "merge_rows").prepare(state=state)
        self._mark = Kernel(module, "mark_rows").prepare(state=state, report=report)
        self._sum = Kernel(module, "sum_rows").prepare(state=state, report=report)
        self._sum_hot = PreparedLaunch(Kernel(module, "sum_hot_rows"), self._sum.params)
        self._room = 0
        self._keys: Any = None
        self._marks: Any = None

    def coalesce(
        self, rows: CuArray, values: CuArray, length: int, scale: float, room: Rows | None = None
    ) -> tuple[Rows, int]:
        """As the host's; the sums are in `room` where it is large enough."""
        if not len(rows):
            return Rows(self.empty(0, rows).astype(row_type(length)), self.empty(0, values)), 0
        with self._device.gpu, self._device.stream:
            lists = [(0, address_of(values))]
            try:
                self._sort(cupy.ascontiguousarray(rows), length)
                sums = self._add_up(lists, len(rows), len(rows), row_type(length), values, scale, room)
            except MemoryError:
                # what a kernel noted is for one that did not run
                self._device.zero(self._mark.params.state, ctypes.sizeof(RowState))
                raise
        if self._report.outside:
            check_rows(rows, length)
        return sums, self._report.nonfinite

    def merge(
        self, rows: CuArray, values: CuArray, firsts: NDArray[np.int64], scale: float
    ) -> tuple[Rows, int]:
        firsts = firsts[np.diff(firsts, append=len(rows)) > 0]
        if len(firsts) > MOST_PEERS:
            return self.coalesce(rows, values, MAX_LENGTH if rows.itemsize == 4 else LONGEST_ON_GPU, scale)
        ids, base, row_bytes = address_of(rows), address_of(values), values.shape[1] * values.itemsize
        lists = [(first, ids + first * rows.itemsize, base + first * row_bytes) for first in firsts.tolist()]
        return self.merge_into(None, lists, len(rows), Rows(rows, values), scale)

    def merge_into(
        self, room: Rows | None, lists: Sequence[tuple[int, int, int]], count: int, like: Rows, scale: float
    ) -> tuple[Rows, int]:
        """As `merge`; the sums are in `room` where it is large enough.

        Args:
            lists: MOST_PEERS at most, none of them empty. Of each how many rows are before it, and the addresses of its ids and
                its values, which may be in another rank's memory.
            count: rows of all lists.
            like: its types and width are those of the lists.
        """
        if not count:
            return Rows(self.empty(0, like.rows), self.empty(0, like.values)), 0
        with self._device.gpu, self._device.stream:
            merge = self._prepare(self._merge, count)
            for i, (first, ids, _) in enumerate(lists):
                merge.firsts[i], merge.ids[i] = first, ids
            merge.lists, merge.wide = len(lists), like.rows.itemsize == 8
            self._launch(self._merge, self._blocks(count))
            values = [(first, address) for first, _, address in lists]
            sums = self._add_up(values, count, len(lists), like.rows.dtype, like.values, scale, room)
        return sums, self._report.nonfinite

    def _sort(self, rows: CuArray, length: int) -> None:
        """Put on the stream: keys of rows in the order of their ids."""
        pack = self._prepare(self._pack, len(rows), length)
        pack.ids, pack.length, pack.wide = address_of(rows), length, rows.itemsize == 8
        self._launch(self._pack, self._blocks(len(rows)))
        self._keys[: len(rows)].sort()  # by a radix sort

    def _prepare(self, launch: PreparedLaunch, count: int, length: int = LONGEST_ON_GPU) -> Any:
        """Make room for so many keys, and set them in the kernels after `launch`; returns that one's parameters, to be completed.

        Raises:
            ValueError: so many rows, or those of so long a table, do not fit in keys.
        """
        if count > MOST_ON_GPU or length > LONGEST_ON_GPU:
            raise ValueError(
                f"a GPU adds up at most {MOST_ON_GPU} rows of a table of at most {LONGEST_ON_GPU}, not {count} of {length}"
            )
        mark, sums = self._mark.params, self._sum.params
        if count > self._room:
            room = max(count, self._room * 3 // 2)
            keys = self._device.allocate(room, np.uint64)
            marks = self._device.allocate(room + room // HOT_ROWS + 2, np.uint32)
            self._room, self._keys, self._marks = room, keys, marks  # all of them, or none where memory lacks
            for params in (self._pack.params, self._merge.params, mark, sums):
                params.keys = address_of(self._keys)
            mark.starts = sums.starts = address_of(self._marks)
            mark.hot = sums.hot = mark.starts + 4 * (room + 1)
        params = launch.params
        params.n = mark.n = count
        params.shift = mark.shift = max(1, (count - 1).bit_length())
        sums.position = (1 << params.shift) - 1
        return params

    def _add_up(
        self,
        lists: Sequence[tuple[int, int]],
        count: int,
        most: int,
        id_type: Any,
        like: CuArray,
        scale: float,
        room: Rows | None,
    ) -> Rows:
        """Sums of so many rows, whose keys lie in order; an id has `most` of them at most. Waits for the stream."""
        report = self._report
        if room is not None:
            self._launch_mark(room.rows)
            self._launch_sums(lists, count, most, room.values, scale)
            self._device.synchronize()
            if report.count <= len(room) or report.outside:
                return Rows(room.rows[: report.count], room.values[: report.count])
            self._device.zero(self._mark.params.state, ctypes.sizeof(RowState))
        ids = cupy.empty(count, id_type)
        self._launch_mark(ids)
        self._device.synchronize()
        sums = cupy.empty((report.count, like.shape[1]), like.dtype)
        self._launch_sums(lists, count, most, sums, scale)
        self._device.synchronize()
        return Rows(ids[: report.count], sums)

    def _launch_mark(self, ids: CuArray) -> None:
        """Put on the stream: where each id begins in the order, and the ids."""
        mark = self._mark.params
        tiles = -(-mark.n // COMPACT_TILE)
        mark.ids, mark.capacity, mark.wide = address_of(ids), len(ids), ids.itemsize == 8
        mark.scan = self._device.scan("rows", tiles)
        self._launch(self._mark, tiles, COMPACT_THREADS)

    def _launch_sums(
        self, lists: Sequence[tuple[int, int]], count: int, most: int, sums: CuArray, scale: float
    ) -> None:
        """Put on the stream: the sums, if there is room for all."""
        params, width, itemsize = self._sum.params, sums.shape[1], sums.itemsize
        params.sums, params.capacity, params.width, params.scale = address_of(sums), len(sums), width, scale
        vectors = width % 4 == 0 and params.sums % (4 * itemsize) == 0
        for i, (first, address) in enumerate(lists):
            params.firsts[i], params.values[i] = first, address - first * width * itemsize
            vectors = vectors and address % (4 * itemsize) == 0
        params.lists, params.vectors = len(lists), vectors
        if min(count, most) > HOT_ROWS:
            self._launch(self._sum_hot, self._blocks(32 * (count // HOT_ROWS) * -(-width // 32)))
        self._launch(self._sum, self._blocks(32 * count * -(-width // (512 if vectors else 128))))

    def _blocks(self, threads: int) -> int:
        return min(-(-threads // _THREADS), 16 * self._device.processors)

    def _launch(self, launch: PreparedLaunch, blocks: int, threads: int = _THREADS) -> None:
        self._device.pending = True
        launch(blocks, threads, self._device.stream.ptr)

    def at(self, rows: CuArray, places: NDArray[np.int64]) -> NDArray[np.int64]:
        with self._device.gpu, self._device.stream:
            return rows[cupy.asarray(places)].get().astype(np.int64)

    def offsets(self, rows: CuArray, boundaries: NDArray[np.int64]) -> NDArray[np.int64]:
        with self._device.gpu, self._device.stream:
            at: NDArray[np.int64] = cupy.searchsorted(rows, cupy.asarray(boundaries.astype(rows.dtype))).get()
        return at.astype(np.int64)

    def empty(self, count: int, like: CuArray) -> CuArray:
        with self._device.gpu, self._device.stream:
            self._device.pending = True  # memory of the pool may still be in use on the stream
            return cupy.empty((count, *like.shape[1:]), like.dtype)

    def copy(self, target: CuArray, source: CuArray) -> None:
        if target.nbytes:
            self._device.copy(address_of(target), address_of(source), target.nbytes)
