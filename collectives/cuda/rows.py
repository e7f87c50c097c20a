"""Rows on a GPU: sort them by their id, and add up equal ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
"""Of a block that adds up rows."""
_STATE_BYTES = RowState.nonfinite.offset + 4


@dataclass(frozen=True)
class _Order:
    """The keys of rows in the order of their ids, as `rows.cu` has them, and what its kernels need beside them.

    Attributes:
        array: uint64[count], of CuPy.
        shift: bits of a key that say where a row was.
        may_be_hot: whether an id may have more than HOT_ROWS rows.
        keys, starts, hot, state: addresses.
    """

    array: Any
    count: int
    shift: int
    may_be_hot: bool
    keys: int
    starts: int
    hot: int
    state: int


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
        names = ("pack_rows", "merge_rows", "mark_rows", "sum_hot_rows", "sum_rows")
        kernels = (Kernel(module, name) for name in names)
        self._pack_rows, self._merge_rows, self._mark_rows, self._sum_hot_rows, self._sum_rows = kernels

    def coalesce(self, rows: Any, values: Any, length: int, scale: float) -> tuple[Rows, int]:
        return self.coalesce_into(None, rows, values, length, scale)

    def coalesce_into(
        self, room: Rows | None, rows: Any, values: Any, length: int, scale: float
    ) -> tuple[Rows, int]:
        """As `coalesce`; the sums are in `room` where it is large enough."""
        if not len(rows):
            return Rows(self.empty(0, rows).astype(row_type(length)), self.empty(0, values)), 0
        with self._device.gpu, self._device.stream:
            order = self._sort(rows, length)
            lists = [(0, address_of(values))]
            sums, report = self._add_up(order, row_type(length), lists, values, scale, room)
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
            order = self._merge(rows, firsts)
            sums, report = self._add_up(order, rows.dtype, lists, like, scale, room)
        return sums, report.nonfinite

    def _sort(self, rows: Any, length: int) -> _Order:
        """Rows in the order of their ids."""
        order = self._prepare(len(rows), len(rows))
        fields = {"ids": address_of(rows), "keys": order.keys, "state": order.state, "length": length}
        fields |= {"wide": rows.itemsize == 8, "shift": order.shift}
        self._device.launch_for(self._pack_rows, order.count, **fields)
        order.array.sort()  # by a radix sort
        return order

    def _merge(self, rows: Any, firsts: NDArray[np.int64]) -> _Order:
        """Rows in the order of their ids, which lie in lists that ascend strictly from these places on."""
        if len(firsts) > MOST_PEERS:
            return self._sort(rows, LONGEST_ON_GPU)
        order = self._prepare(len(rows), len(firsts))
        fields = {"ids": address_of(rows), "keys": order.keys, "lists": len(firsts), "shift": order.shift}
        self._device.launch_for(
            self._merge_rows, order.count, firsts=firsts.tobytes(), wide=rows.itemsize == 8, **fields
        )
        return order

    def _prepare(self, count: int, most: int) -> _Order:
        """Memory for an order of so many rows, of which an id has `most` at most."""
        device = self._device
        state = address_of(device.scratch("rows state", _STATE_BYTES, np.uint8))
        keys = device.scratch("row keys", count, np.uint64)[:count]
        starts = address_of(device.scratch("row marks", count + count // HOT_ROWS + 2, np.uint32))
        shift = max(1, (count - 1).bit_length())
        device.zero(state, _STATE_BYTES)
        return _Order(
            keys, count, shift, most > HOT_ROWS, address_of(keys), starts, starts + 4 * (count + 1), state
        )

    def _add_up(
        self,
        order: _Order,
        id_type: Any,
        lists: Sequence[tuple[int, int]],
        like: Any,
        scale: float,
        room: Rows | None,
    ) -> tuple[Rows, Any]:
        """Sums of rows in an order, and what the kernels report. Waits for the stream."""
        report = self._device.view("rows", RowsSummed)
        if room is not None:
            self._launch_mark(order, room.rows)
            self._launch_sum(order, lists, room.values, scale)
            self._device.synchronize()
            if report.count <= len(room) or report.outside:
                return Rows(room.rows[: report.count], room.values[: report.count]), report
            self._device.zero(order.state, _STATE_BYTES)
        ids = cupy.empty(order.count, id_type)
        self._launch_mark(order, ids)
        self._device.synchronize()
        sums = cupy.empty((report.count, like.shape[1]), like.dtype)
        self._launch_sum(order, lists, sums, scale)
        self._device.synchronize()
        return Rows(ids[: report.count], sums), report

    def _launch_mark(self, order: _Order, ids: Any) -> None:
        """Put on the stream: where each id begins in the order, and the ids."""
        tiles = -(-order.count // COMPACT_TILE)
        fields = {"keys": order.keys, "starts": order.starts, "hot": order.hot, "state": order.state}
        fields |= {"n": order.count, "shift": order.shift, "ids": address_of(ids), "capacity": len(ids)}
        self._device.launch(
            self._mark_rows,
            tiles,
            COMPACT_THREADS,
            scan=self._device.scan("rows", tiles),
            wide=ids.itemsize == 8,
            report=self._device.address("rows"),
            **fields,
        )

    def _launch_sum(self, order: _Order, lists: Sequence[tuple[int, int]], sums: Any, scale: float) -> None:
        """Put on the stream: the sums, if there is room for all."""
        width, four = sums.shape[1], 4 * sums.itemsize
        bases = [address - first * width * sums.itemsize for first, address in lists]
        firsts = [first for first, _ in lists]
        aligned = address_of(sums) % four == 0 and all(address % four == 0 for _, address in lists)
        vectors = width % 4 == 0 and aligned
        fields = {"keys": order.keys, "starts": order.starts, "hot": order.hot, "state": order.state}
        fields |= {"position": (1 << order.shift) - 1, "lists": len(lists), "vectors": vectors}
        fields |= {"sums": address_of(sums), "capacity": len(sums), "width": width, "scale": scale}
        fields |= {
            "values": np.array(bases, np.int64).tobytes(),
            "firsts": np.array(firsts, np.int64).tobytes(),
        }
        fields |= {"report": self._device.address("rows")}
        if order.may_be_hot:
            self._launch_warps(self._sum_hot_rows, order.count // HOT_ROWS * -(-width // 32), fields)
        self._launch_warps(self._sum_rows, order.count * -(-width // (512 if vectors else 128)), fields)

    def _launch_warps(self, kernel: Kernel, most: int, fields: dict[str, Any]) -> None:
        """Put a kernel on the stream that gives so many warps work at most."""
        blocks = min(-(-most * 32 // _THREADS), 16 * self._device.processors)
        self._device.launch(kernel, blocks, _THREADS, **fields)

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
