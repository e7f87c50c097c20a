"""Draws rows of a table, and counts what a sum of them sends, in threads, for any number of ranks.

python -m docs.results.rows.volume
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.cpu.rows import HostRowKernels
from collectives.rows import Rows, row_sparse_allreduce
from collectives.transport import Transport
from data.command import command_parser
from jobs.render.table import Column, figure, table

_WAIT = 120.0
"""Seconds that a thread waits for another."""


SKEWS = ("uniform", "zipf")


class RowSource:
    """Draws the rows that a rank touches, with repetition: uniformly, or row i with a chance in proportion to 1/(i + 1).

    Args:
        skew: a name in SKEWS.
        length: rows of the table.
        touched: rows drawn a rank and step.
    """

    def __init__(self, skew: str, length: int, touched: int, seed: int) -> None:
        self._length, self._touched, self._seed = length, touched, seed
        self._chances = np.cumsum(1.0 / np.arange(1, length + 1)) if skew == "zipf" else None

    def draw(self, rank: int, step: int) -> NDArray[np.int64]:
        """int64[touched], not ascending; the same for the same arguments."""
        rng = np.random.default_rng((self._seed, step, rank))
        if self._chances is None:
            return rng.integers(0, self._length, self._touched)
        drawn = np.searchsorted(self._chances, rng.random(self._touched) * self._chances[-1])
        return np.minimum(drawn, self._length - 1)


class _ThreadTransport:
    """What `row_sparse_allreduce` needs of a transport, between threads. Counts payload bytes."""

    send_all, exchange = Transport.send_all, Transport.exchange

    def __init__(
        self, rank: int, mail: list[list[Any]], board: list[Any], barrier: threading.Barrier
    ) -> None:
        self.rank, self.size, self.bytes = rank, len(board), 0
        self._mail, self._board, self._barrier = mail, board, barrier

    def send(self, array: NDArray[Any], dest: int) -> list[Any]:
        if array.size:
            self.bytes += array.nbytes
            self._mail[self.rank][dest].put(array)
        return []

    def receive(self, array: NDArray[Any], source: int) -> list[Any]:
        return [(array, source)] if array.size else []

    def wait(self, requests: list[Any]) -> None:
        for array, source in requests:
            array[:] = self._mail[source][self.rank].get(timeout=_WAIT)

    def allgather_control(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        self._board[self.rank] = row
        self._barrier.wait(_WAIT)
        everyones = np.stack(self._board)
        self._barrier.wait(_WAIT)
        return everyones

    def alltoall_control(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.allgather_control(rows)[:, self.rank]

    def allreduce_control(self, array: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.allgather_control(array).sum(axis=0)


def row_volume(source: RowSource, length: int, ranks: int) -> dict[str, Any]:
    """Rows that `row_sparse_allreduce` sends in a step.

    Returns:
        "ranks"; "own", distinct rows a rank, on average; "summed"; "mean" and "busiest", rows that a rank sends, each as a part
        of (own + summed)(P-1)/P.
    """
    kernels, row_bytes = HostRowKernels(), 8  # a number and one float32
    mail: list[list[Any]] = [[queue.SimpleQueue() for _ in range(ranks)] for _ in range(ranks)]
    board: list[Any] = [None] * ranks
    barrier = threading.Barrier(ranks)

    def run(rank: int) -> tuple[int, int, int]:
        rows = np.unique(source.draw(rank, 0)).astype(np.int32)
        transport: Any = _ThreadTransport(rank, mail, board, barrier)
        sums = row_sparse_allreduce(
            Rows(rows, np.ones((len(rows), 1), np.float32)), length, transport, kernels
        )
        assert sums.values.sum() == sum(transport.allgather_control(np.array([len(rows)])))
        return len(rows), len(sums), transport.bytes

    with ThreadPoolExecutor(ranks) as pool:
        own, summed, sent = np.array(list(pool.map(run, range(ranks)))).T
    least = (own.mean() + summed[0]) * (ranks - 1) / ranks * row_bytes
    return {
        "ranks": ranks,
        "own": float(own.mean()),
        "summed": int(summed[0]),
        "mean": float(sent.mean() / least),
        "busiest": float(sent.max() / least),
    }


def volume_table(length: int, touched: int, ranks: tuple[int, ...] = (2, 3, 4, 6, 8, 16, 32, 64)) -> str:
    """`row_volume` of each skew and number of ranks, in Markdown."""
    counted = [
        {"skew": skew} | row_volume(RowSource(skew, length, touched, seed=1), length, size)
        for skew in SKEWS
        for size in ranks
    ]
    columns = [Column("rows", figure("skew", "{}")), Column("ranks", figure("ranks"))]
    columns += [Column("distinct", figure("own")), Column("in the sum", figure("summed"))]
    columns += [Column(f"{part} / (r + u)(P−1)/P", figure(part, "{:.3f}")) for part in ("mean", "busiest")]
    return table(columns, counted).markdown()


if __name__ == "__main__":
    command_parser(
        "docs.results.rows.volume", "Count the bytes that sums of rows send, for 2 to 64 ranks.", ""
    ).parse_args()
    print(volume_table(1_000_000, 50_000))
