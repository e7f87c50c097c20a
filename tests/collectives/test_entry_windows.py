"""Entries that GPUs of a host copy from each other's windows: what arrives, what is counted, and windows that grow or cannot."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives.errors import NoPeerMemoryError
from collectives.sparse import ENTRY
from tests.devices import hold_up, on_gpus, staged_transport

pytestmark = [on_gpus, pytest.mark.mpi(min_size=2), pytest.mark.host_cuda(ranks=3)]


def make(comm: MPI.Intracomm) -> tuple[Any, Any]:
    """Windows of the ranks, which are told apart by GPUs or share one, and their transport."""
    transport = staged_transport(comm)
    from collectives.entry_windows import DeviceEntryWindows

    return DeviceEntryWindows(transport, transport.device), transport


def entries_of(rank: int, count: int, step: int) -> np.ndarray[Any, Any]:
    entries = np.empty(count, ENTRY)
    entries["index"] = np.arange(count)
    entries["value"] = np.random.default_rng((rank, count, step)).standard_normal(count)
    return entries


def write(windows: Any, transport: Any, entries: np.ndarray[Any, Any]) -> None:
    """Into this rank's window, and wait for it."""
    if len(entries):
        mine = transport.workspace.entries("mine", len(entries))
        transport.device.upload(mine.pointer, entries)
        windows.write(mine)
    transport.device.synchronize()


def test_what_all_ranks_wrote_arrives_in_their_order_also_in_larger_windows(comm: MPI.Intracomm) -> None:
    windows, transport = make(comm)
    late = comm.size - 1
    capacities = []
    for step, most in enumerate((0, 3, 4, 200_000, 0, 262_143, 262_145, 300_000, 7)):
        counts = np.array([most - (most > rank) * rank for rank in range(comm.size)])
        if most:
            assert windows.reserve(most) and windows.capacity >= most
        capacities.append(windows.capacity)
        write(windows, transport, entries_of(comm.rank, counts[comm.rank], step))
        comm.Barrier()
        transport.take_traffic()
        gathered = transport.workspace.entries("gathered", int(counts.sum()))
        if comm.rank == late:
            hold_up()  # its copies come late: nobody may write meanwhile
        windows.gather(gathered, counts)
        sent = transport.take_traffic()
        own = int(counts[comm.rank])
        assert (sent.bytes, sent.messages) == (8 * own * (comm.size - 1), (comm.size - 1) * (own > 0))
        assert sent.bytes_between == sent.control_messages == 0
        transport.device.synchronize()
        comm.Barrier()
        expected = [entries_of(rank, count, step) for rank, count in enumerate(counts)]
        assert gathered.get().tobytes() == b"".join(part.tobytes() for part in expected)
    # before, one whole allocation, and a larger one
    assert capacities[0] == 0 and len(set(capacities)) == 3
    windows.close()
    assert windows.capacity == 0
    transport.close()


def test_without_memory_no_room_is_made_ever_after(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows, transport = make(comm)
    from collectives import symmetric_memory

    assert windows.reserve(5)

    def none_left(*arguments: Any) -> None:
        raise NoPeerMemoryError("no peer memory: rank 1: out of memory")

    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        patch.setattr(symmetric_memory, "SymmetricMemory", none_left)
        assert not windows.reserve(400_000) and windows.capacity == 0
    texts = [str(one.message) for one in said if "travel as messages" in str(one.message)]
    assert comm.allgather(texts) == [
        [
            "entries of the GPUs of a host travel as messages, which is slower: no peer memory: rank 1: out of memory"
        ],
        *[[]] * (comm.size - 1),
    ]
    assert not windows.reserve(5)
    windows.close()
    transport.close()


def test_an_error_that_is_not_of_all_ranks_is_raised(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows, transport = make(comm)
    from collectives import symmetric_memory

    def ended(*arguments: Any) -> None:
        raise RuntimeError("a rank has closed its connections: it has ended or raised")

    monkeypatch.setattr(symmetric_memory, "SymmetricMemory", ended)
    with pytest.raises(RuntimeError, match="a rank has closed its connections"):
        windows.reserve(5)
    transport.close()
