"""The codec seam: patterns send what a codec makes of the entries, count its bytes, and give out what it decodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.allgatherv import balance_and_allgatherv
from collectives.codec import PLAIN, Counts
from collectives.mpi import MpiTransport, connect
from collectives.sparse import ENTRY, SparseVector
from collectives.split_and_reduce import split_and_reduce

SEVEN = np.dtype([("index", "<i4"), ("value", "<i2"), ("check", "u1")])


class SevenBytes:
    """An index counted from the region's begin, a value of 16 bits, and a byte more, so that sizes are odd."""

    name = "seven bytes"

    def wire_bytes(self, count: Counts) -> Counts:
        return count * SEVEN.itemsize

    def encode(self, entries: NDArray[np.void], lower: int, upper: int) -> NDArray[Any]:
        assert np.all((entries["index"] >= lower) & (entries["index"] < upper))
        wire = np.zeros(len(entries), SEVEN)
        wire["index"], wire["value"], wire["check"] = entries["index"] - lower, entries["value"], 77
        return wire.view(np.uint8)

    def receive_buffer(self, out: NDArray[np.void]) -> NDArray[Any]:
        return np.zeros(self.wire_bytes(len(out)), np.uint8)

    def decode(self, wire: NDArray[Any], lower: int, upper: int, out: NDArray[np.void]) -> None:
        coded = wire.view(SEVEN)
        assert np.all(coded["check"] == 77)
        out["index"], out["value"] = coded["index"] + lower, coded["value"]


@pytest.fixture
def transport(comm: MPI.Intracomm) -> Iterator[MpiTransport]:
    made = connect(comm)
    yield made
    made.close()


def selection(transport: MpiTransport, length: int) -> SparseVector:
    rng = np.random.default_rng((transport.rank, length))
    indices = np.flatnonzero(rng.random(length) < 0.3)
    return SparseVector.from_pairs(indices, rng.integers(-99, 99, len(indices)).astype(np.float32), length)


@pytest.mark.mpi
@pytest.mark.parametrize("bucket_rounds", [1, 8])
def test_regions_are_sent_in_the_codecs_bytes(transport: MpiTransport, bucket_rounds: int) -> None:
    length = 1000
    packed = selection(transport, length)
    boundaries = length * np.arange(transport.size + 1, dtype=np.int64) // transport.size
    sums, sent = [], []
    for codec in (PLAIN, SevenBytes()):
        transport.take_traffic()
        lists = split_and_reduce(packed, boundaries, transport, bucket_rounds=bucket_rounds, codec=codec)
        sums.append(lists.sums().tobytes())
        sent.append(transport.take_traffic())
    assert sums[0] == sums[1]
    assert 7 * sent[0].bytes == 8 * sent[1].bytes
    assert sent[0].messages == sent[1].messages


@pytest.mark.mpi
@pytest.mark.parametrize("trigger", [0.0, 100.0], ids=["balanced", "as it is"])
def test_blocks_are_gathered_in_the_codecs_bytes(transport: MpiTransport, trigger: float) -> None:
    length, rank = 1000, transport.rank
    everything = np.zeros(length, ENTRY)
    everything["index"], everything["value"] = np.arange(length), np.arange(length)
    counts = np.array([length - 10 * (transport.size - 1), *[10] * (transport.size - 1)], np.int64)
    stop = int(counts[: rank + 1].sum())
    kept, gathered, sent = everything[stop - counts[rank] : stop], [], []
    for codec in (PLAIN, SevenBytes()):
        transport.take_traffic()
        gathered.append(
            balance_and_allgatherv(kept, counts, length, transport, trigger, codec).entries.tobytes()
        )
        sent.append(transport.take_traffic())
    assert gathered == [everything.tobytes()] * 2
    assert sent[0].messages == sent[1].messages
    if trigger or transport.size < 3:
        assert 7 * sent[0].bytes == 8 * sent[1].bytes
    else:  # what moves to balance the blocks is plain
        assert 7 * sent[0].bytes <= 8 * sent[1].bytes < 8 * sent[0].bytes


def test_plain_entries_are_neither_copied_nor_changed() -> None:
    entries = np.zeros(5, ENTRY)
    assert PLAIN.encode(entries, 0, 9) is entries
    assert PLAIN.receive_buffer(entries) is entries
    assert PLAIN.wire_bytes(5) == entries.nbytes
    assert PLAIN.wire_bytes(np.array([2, 0])).tolist() == [16, 0]
