"""Staging: what a device sends through pinned memory is what it would have sent itself, bit for bit and word for word.

The device is a double (tests/fake_device.py): memory that MPI must not be given, and a stream as late as it may be.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from collectives.mpi import MpiTransport
from collectives.staging import StagingBuffers, size_class
from collectives.traffic import Traffic
from collectives.transport import Round
from oktopk import METHODS, GradientAllreduce
from tests.collectives.test_transport import BATCHES, exchange_in_batches, ring
from tests.fake_cupy import fake_cupy, on_fake
from tests.fake_device import POISON, FakeDeviceTransport, LateStream, StagedBackend

pytestmark = pytest.mark.also(ranks=8)


@pytest.fixture
def transport(comm: MPI.Intracomm) -> Iterator[FakeDeviceTransport]:
    made = FakeDeviceTransport(comm)
    yield made
    made.close()


@pytest.mark.mpi
def test_a_round_sends_its_array_anew_and_shares_its_buffers(
    transport: FakeDeviceTransport,
) -> None:
    dest, source = ring(transport)
    outgoing, incoming = np.zeros(4, np.float32), np.zeros(4, np.float32)
    rounds = [transport.persistent(Round(dest, outgoing, source, incoming)) for _ in range(5)]
    arrived = []
    for step, exchange in enumerate(rounds + rounds):
        outgoing[:] = 10 * step + transport.rank
        exchange.run()
        transport.stream.run()
        arrived.append(incoming.tolist())
    assert arrived == [[10.0 * step + source] * 4 for step in range(10)]
    assert transport.traffic == Traffic(160, 10)
    # one that goes out, one that comes in, and one that the stream may still be reading
    assert len(transport.stream.pinned_memory) <= 3
    for exchange in rounds:
        exchange.free()


@pytest.mark.mpi
@BATCHES
def test_rounds_arrive_batch_by_batch_with_one_wait_for_the_stream_each(
    transport: FakeDeviceTransport, count: int, in_flight: int
) -> None:
    exchange_in_batches(transport, count, in_flight)
    assert transport.stream.waits <= -(-count // in_flight)
    taken = transport.buffers.take(80)
    assert np.all(taken == POISON), "a buffer was handed back before it was done with"


@pytest.mark.mpi
def test_a_device_array_may_be_sent_on_once_waited_for(transport: FakeDeviceTransport) -> None:
    # as the rounds of an allgather do, with nothing in between that waits for the stream
    dest, source = ring(transport)
    outgoing, incoming = np.full(100, transport.rank), np.zeros(100, np.int64)
    for _ in range(transport.size):
        transport.wait(transport.receive(incoming, source) + transport.send(outgoing, dest))
        outgoing, incoming = incoming, outgoing
    transport.stream.run()
    assert outgoing.tolist() == [transport.rank] * 100


@pytest.mark.mpi
@pytest.mark.parametrize("elements", [1, 1 << 20])
def test_ranks_that_stage_and_ranks_that_do_not_understand_each_other(
    comm: MPI.Intracomm, elements: int
) -> None:
    made = FakeDeviceTransport(comm) if comm.rank % 2 else MpiTransport(comm)
    dest, source = ring(made)
    first, second = (np.arange(elements) * (comm.rank + 1) + step for step in range(2))
    arrived = [np.zeros(elements, np.int64) for _ in range(2)]
    requests = made.receive(arrived[0], source) + made.receive(arrived[1], source)
    made.wait(requests + made.send_all([(first, dest), (second, dest)]))
    if isinstance(made, FakeDeviceTransport):
        made.stream.run()
    for step in range(2):
        assert np.array_equal(arrived[step], np.arange(elements) * (source + 1) + step)
    made.close()


@pytest.mark.mpi
def test_what_was_prepared_is_copied_once_and_sent_without_another_wait(
    transport: FakeDeviceTransport,
) -> None:
    dest, source = ring(transport)
    outgoing, incoming = np.full(50, transport.rank), np.zeros(50, np.int64)
    transport.prepare_sends([outgoing, outgoing[:0]])
    transport.stream.synchronize()  # behind whatever comes between
    outgoing[:] = POISON  # has been copied
    waits = transport.stream.waits
    transport.wait(transport.receive(incoming, source) + transport.send(outgoing, dest))
    assert transport.stream.waits == waits
    transport.stream.run()
    assert incoming.tolist() == [source] * 50


@pytest.mark.mpi
def test_what_was_prepared_in_vain_is_forgotten(transport: FakeDeviceTransport) -> None:
    dest, source = ring(transport)
    incoming = np.zeros(50, np.int64)
    for step in range(6):
        transport.prepare_sends([np.full(50, POISON)])  # as in a step that some rank gives up
        outgoing = np.full(50, 10 * step + transport.rank)
        transport.prepare_sends([outgoing])
        transport.wait(transport.receive(incoming, source) + transport.send(outgoing, dest))
        transport.stream.run()
        assert incoming.tolist() == [10 * step + source] * 50
    # no more with every step
    assert len(transport.stream.pinned_memory) <= 5


@pytest.mark.mpi
@pytest.mark.parametrize("method", METHODS)
def test_steps_alike_allocate_no_pinned_memory_after_the_first(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    backend = StagedBackend()
    monkeypatch.setattr("oktopk.construction.make_backend", lambda *_, **__: backend)
    staged = GradientAllreduce(
        comm, 20_011, method, density=0.02, threshold_interval=100, boundary_interval=100
    )
    gradient = np.random.default_rng(comm.rank).standard_normal(20_011).astype(np.float32)
    buffers = staged.transport.buffers  # type: ignore[attr-defined]
    held = []
    for _ in range(8):
        if staged.residual is not None:
            staged.residual.fill(0)
        staged.step(gradient)
        held.append(buffers.nbytes)
    assert held[3] == held[-1], held
    staged.close()


# one process


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 40_000, 2**20, 2**20 + 1, 58_800_000, 2**31 + 5])
def test_a_buffer_is_large_enough_and_at_most_a_quarter_too_large(nbytes: int) -> None:
    size = size_class(nbytes)
    assert nbytes <= size <= max(4096, nbytes + max(4096, nbytes // 4))
    assert size_class(size) == size


def test_sizes_of_one_octave_share_four_classes() -> None:
    assert {size_class(nbytes) for nbytes in range(2**20 + 1, 2**21 + 1, 1000)} == {
        2**20 + quarter * 2**18 for quarter in (1, 2, 3, 4)
    }


def test_a_buffer_that_the_stream_still_reads_is_not_given_out() -> None:
    stream = LateStream()
    buffers = StagingBuffers(stream)
    array = np.zeros(3, np.float32)
    first = buffers.take(12)
    first[:12] = 1
    stream.copy_in(array, first[:12])
    buffers.give_after_copy(first)
    second = buffers.take(12)
    assert not np.shares_memory(first, second)
    assert np.all(second == POISON)
    stream.synchronize()
    assert np.shares_memory(first, buffers.take(12))
    assert buffers.nbytes == 2 * 4096


def test_a_rank_that_receives_and_never_sends_does_not_pile_up_buffers() -> None:
    stream = LateStream()
    buffers = StagingBuffers(stream)
    array = np.zeros(3, np.float32)
    for number in range(10):
        buffer = buffers.take(12)
        buffer[:12].view(np.float32)[:] = number
        stream.copy_in(array, buffer[:12])
        buffers.give_after_copy(buffer)
    assert buffers.nbytes == 2 * 4096
    stream.run()
    assert array.tolist() == [9, 9, 9]


def test_a_gpu_copies_in_the_right_direction_on_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[tuple[int, ...]] = []
    cupy = fake_cupy()
    cupy.cuda.runtime.memcpyAsync = lambda *copy: copies.append(copy)
    cupy.cuda.runtime.memcpyDeviceToHost, cupy.cuda.runtime.memcpyHostToDevice = 2, 1
    cupy.cuda.alloc_pinned_memory = bytearray
    with on_fake(cupy, monkeypatch):
        module = importlib.import_module("collectives.cuda.device")
        device = object.__new__(module.Device)
        device.pending, device._stream = False, 77
        host = device.pinned(4096)[:24]
        array = SimpleNamespace(data=SimpleNamespace(ptr=1000))
        entries = module.DeviceEntries(None, 2000, 3, None)
        assert not device.pending
        device.copy_out(host, array)
        assert device.pending
        device.copy_in(entries[1:], host[:16])
    assert copies == [
        (host.ctypes.data, 1000, 24, 2, 77),
        (2008, host.ctypes.data, 16, 1, 77),
    ]
