"""The door to MPI: what arrives, what is counted, how much is in flight, and agreement at construction."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.host_transport import HostTransport
from collectives.mpi import MpiTransport
from collectives.sparse import ENTRY
from collectives.traffic import Traffic
from collectives.transport import Round
from tests.fake_device import FakeDevice, FakeDeviceTransport

pytestmark = [pytest.mark.mpi, pytest.mark.also(ranks=8)]


def listened_on() -> set[str]:
    """The addresses that this process listens on, in the kernel's hexadecimal digits."""
    sockets = set()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of the walk itself
            sockets.add(os.readlink(file))
    lines = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    listening = [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets]
    return {address.partition(":")[0] for address in listening}


@pytest.mark.skipif("Open MPI" not in MPI.Get_library_version(), reason="as the site configures it")
def test_ranks_of_one_host_listen_to_no_other_host(comm: MPI.Intracomm) -> None:
    """The first test of this file: those over gloo have torch's store, which listens for all."""
    opened = MpiTransport(comm)
    opened.barrier()
    assert listened_on() <= {"0100007F"}
    opened.close()


def test_a_word_is_taken_along_once_and_ends_with_its_block(comm: MPI.Intracomm) -> None:
    transport, row = MpiTransport(comm), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="reshape"), transport.carrying(5):
        row.reshape(2)
    assert transport.allgather_control(row).shape == (comm.size, 1) and not transport.tokens
    with transport.carrying(5 + comm.rank):
        for _ in range(2):
            assert not transport.allgather_control(row).any()
    assert transport.tokens == tuple(range(5, 5 + comm.size))
    transport.close()


def connected(kind: str, request: pytest.FixtureRequest, comm: MPI.Intracomm) -> HostTransport:
    if kind == "MPI":
        return MpiTransport(comm)
    if kind == "staged MPI":
        return FakeDeviceTransport(comm)
    if comm.size == 1:
        pytest.skip("gloo does not send to itself, which no pattern asks for")
    if comm.size > 5:
        pytest.skip("fewer ranks show it, and each imports torch")
    group = request.getfixturevalue("group")
    from collectives import process_group

    over_gloo = process_group.connect(group)
    if kind == "gloo":
        return over_gloo

    class Staged(FakeDevice, process_group.ProcessGroupTransport):
        pass

    return Staged(over_gloo.comm)


@pytest.fixture(params=["MPI", "gloo"])
def transport(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> Iterator[HostTransport]:
    opened = connected(request.param, request, comm)
    yield opened
    opened.close()


@pytest.fixture(params=["MPI", "staged MPI", "gloo", "staged gloo"])
def either(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> Iterator[HostTransport]:
    opened = connected(request.param, request, comm)
    yield opened
    opened.close()


def run_stream(transport: HostTransport) -> None:
    """Copies to a staged array are done now, not before; to a host array they were when they were waited for."""
    if isinstance(transport, FakeDevice):
        transport.stream.run()


def ring(transport: HostTransport, step: int = 1) -> tuple[int, int]:
    """(dest, source) at a distance."""
    return (transport.rank + step) % transport.size, (transport.rank - step) % transport.size


@pytest.mark.parametrize(("dtype", "words"), [(np.float32, 1), (np.int32, 1), (ENTRY, 2), (np.int64, 2)])
def test_what_is_sent_arrives_and_is_counted_word_by_word(
    either: HostTransport, dtype: Any, words: int
) -> None:
    dest, source = ring(either)
    outgoing, incoming = np.zeros(5, dtype), np.ones(5, dtype)
    outgoing.view(np.int32)[:] = 100 * either.rank + np.arange(5 * words)
    expected = (100 * source + np.arange(5 * words)).tolist()
    either.wait(either.receive(incoming, source) + either.send(outgoing, dest))
    run_stream(either)
    assert incoming.view(np.int32).tolist() == expected
    assert either.traffic == Traffic(20 * words, 1)


def test_a_slice_arrives_where_it_was_asked_for_and_nowhere_else(either: HostTransport) -> None:
    dest, source = ring(either)
    outgoing, incoming = np.zeros(9, ENTRY), np.zeros(9, ENTRY)
    outgoing["index"], outgoing["value"] = np.arange(9), either.rank + np.arange(9) / 8
    either.wait(either.receive(incoming[3:5], source) + either.send(outgoing[6:8], dest))
    run_stream(either)
    assert incoming[3:5].tolist() == [(6, source + 0.75), (7, source + 0.875)]
    assert not incoming[[0, 1, 2, 5, 6, 7, 8]]["value"].any()


def test_nothing_is_sent_for_an_empty_array(either: HostTransport) -> None:
    dest, source = ring(either)
    empty = np.empty(0, ENTRY)
    assert either.send(empty, dest) == []
    assert either.receive(empty, source) == []
    either.persistent(Round(dest, empty, source, empty)).run()
    assert list(either.exchange([], 3)) == []
    assert either.traffic == Traffic()
    if isinstance(either, FakeDevice):
        assert (either.stream.waits, either.buffers.nbytes) == (0, 0)


@pytest.mark.parametrize("count", [0, 1, 6])
def test_a_list_of_unknown_length_says_how_long_it_is(either: HostTransport, count: int) -> None:
    dest, source = ring(either)
    outgoing = np.full(count, np.array((3, 0.5), ENTRY))
    incoming = np.full(6, np.array((9, 9.0), ENTRY))
    sends = either.send(outgoing, dest, even_if_empty=True)
    received = either.receive_counted(incoming, source)
    either.wait(sends)
    run_stream(either)
    assert received == count
    assert incoming.tolist() == [(3, 0.5)] * count + [(9, 9.0)] * (6 - count)
    told = either.library == "gloo"  # it does not know lengths: 8 bytes before the message
    assert either.traffic == (Traffic(8 * count, int(count > 0), 8, 1) if told else Traffic(8 * count, 1))


def test_a_persistent_round_sends_its_buffer_anew_and_is_counted_each_time(
    transport: HostTransport,
) -> None:
    dest, source = ring(transport)
    outgoing, incoming = np.zeros(4, np.float32), np.zeros(4, np.float32)
    exchange = transport.persistent(Round(dest, outgoing, source, incoming))
    arrived = []
    for step in range(3):
        outgoing[:] = 10 * step + transport.rank
        exchange.run()
        arrived.append(incoming.tolist())
        if not step:
            assert transport.take_traffic() == Traffic(4 * 4, 1)
            assert transport.take_traffic() == Traffic()
    exchange.free()
    assert arrived == [[10 * step + source] * 4 for step in range(3)]
    assert transport.take_traffic() == Traffic(2 * 4 * 4, 2)


class InFlight(MpiTransport):
    """Knows how many messages have been started and not been waited for."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        super().__init__(comm)
        self.started: dict[str, int] = {"sends": 0, "receives": 0}
        self.most = {"sends": 0, "receives": 0}
        self._kind: dict[int, str] = {}
        self._alive: list[MPI.Request] = []  # so that no id is used twice

    def send(self, array: NDArray[Any], dest: int, even_if_empty: bool = False) -> list[MPI.Request]:
        return self._note("sends", super().send(array, dest, even_if_empty))

    def receive(self, array: NDArray[Any], source: int) -> list[MPI.Request]:
        return self._note("receives", super().receive(array, source))

    def wait(self, requests: list[MPI.Request]) -> None:
        super().wait(requests)
        for request in requests:
            self.started[self._kind[id(request)]] -= 1

    def _note(self, kind: str, requests: list[MPI.Request]) -> list[MPI.Request]:
        self._alive += requests
        for request in requests:
            self._kind[id(request)] = kind
            self.started[kind] += 1
        self.most[kind] = max(self.most[kind], self.started[kind])
        return requests


def exchange_in_batches(transport: HostTransport, count: int, in_flight: int) -> None:
    """Exchange so many rounds, every third one empty, checked as they are handed over."""
    rounds = []
    for i in range(count):
        dest, source = ring(transport, i)
        length = 0 if i % 3 == 2 else 10 + i
        outgoing, incoming = np.full(length, 100 * transport.rank + i), np.zeros(length, np.int64)
        rounds.append(Round(dest, outgoing, source, incoming))
    arrived: list[int] = []
    complete = True
    for batch in transport.exchange(rounds, in_flight):
        run_stream(transport)
        arrived += batch
        complete &= len(batch) <= in_flight
        complete &= all(np.all(rounds[i].incoming == 100 * rounds[i].source + i) for i in batch)
    assert complete, "a round was handed over before it had arrived"
    assert arrived == list(range(count))


BATCHES = pytest.mark.parametrize(
    ("count", "in_flight"), [(1, 1), (7, 1), (7, 2), (12, 2), (12, 5), (12, 100)]
)


@BATCHES
def test_rounds_arrive_batch_by_batch_with_a_bounded_number_in_flight(
    comm: MPI.Intracomm, count: int, in_flight: int
) -> None:
    transport = InFlight(comm)
    exchange_in_batches(transport, count, in_flight)
    most, left = transport.most, transport.started
    transport.close()
    assert left == {"sends": 0, "receives": 0}, "not waited for at the end"
    assert max(most.values()) <= 2 * in_flight


def test_an_exchange_sends_the_next_batch_while_one_is_worked_on(comm: MPI.Intracomm) -> None:
    transport = InFlight(comm)
    buffers = [(np.full(3, i), np.zeros(3, np.int64)) for i in range(4)]
    dest, source = ring(transport)
    rounds = [Round(dest, outgoing, source, incoming) for outgoing, incoming in buffers]
    ahead = [transport.started["receives"] for _ in transport.exchange(rounds, 1)]
    transport.close()
    assert ahead == [1, 1, 1, 0]


def test_an_alltoall_delivers_rows_and_counts_the_peers(transport: HostTransport) -> None:
    rank, size = transport.rank, transport.size
    rows = np.array([[100 * rank + q, -rank] for q in range(size)], np.int64)
    received = transport.alltoall_control(rows)
    assert received.tolist() == [[100 * q + rank, -q] for q in range(size)]
    assert transport.traffic == Traffic(0, 0, 16 * (size - 1), 1)


def test_an_allgather_delivers_rows_and_counts_the_peers(transport: HostTransport) -> None:
    size = transport.size
    received = transport.allgather_control(np.array([transport.rank, 2**40, 7], np.int64))
    assert received.tolist() == [[q, 2**40, 7] for q in range(size)]
    assert transport.traffic == Traffic(0, 0, 24 * (size - 1), 1)


@pytest.mark.parametrize("count", [0, 1, 5, 2048])
def test_an_allreduce_sums_and_counts_two_passes_over_its_words(transport: HostTransport, count: int) -> None:
    size = transport.size
    total = transport.allreduce_control(np.arange(count, dtype=np.int64) + 2**40 * transport.rank)
    assert total.tolist() == [size * i + 2**40 * (size * (size - 1) // 2) for i in range(count)]
    words = 2 * count  # of 4 bytes
    assert transport.traffic == Traffic(0, 0, 4 * -(-2 * words * (size - 1) // size), 1)


def test_a_flag_of_any_rank_is_seen_by_all(transport: HostTransport) -> None:
    rank, size = transport.rank, transport.size
    for raised in range(-1, size):
        assert transport.any_control(rank == raised) == (raised >= 0)
    assert transport.any_control(True)
    once = Traffic(0, 0, 4 * -(-4 * (size - 1) // size), 1)
    assert transport.traffic == sum([once] * (size + 2), Traffic())


def test_transports_side_by_side_do_not_take_each_others_messages(transport: HostTransport) -> None:
    first, second = transport, transport._like_this(transport.comm)
    dest, source = ring(first)
    mine = np.array([first.rank, 10], np.int64), np.array([first.rank, 20], np.int64)
    received = np.zeros(2, np.int64), np.zeros(2, np.int64)
    # received in the other order than sent
    sends = first.send(mine[0], dest) + second.send(mine[1], dest)
    second.wait(second.receive(received[1], source))
    first.wait(first.receive(received[0], source))
    first.wait(sends)
    traffic = first.traffic, second.traffic
    second.close()
    assert [array.tolist() for array in received] == [[source, 10], [source, 20]]
    assert traffic == (Traffic(4 * 4, 1), Traffic(4 * 4, 1))
    assert first.workspace is not second.workspace


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_a_broadcast_and_a_bitwise_or_reach_all(transport: HostTransport, kind: Any) -> None:
    last = transport.size - 1
    array = np.arange(5, dtype=kind) + transport.rank
    transport.broadcast(array, last)
    assert array.tolist() == [last, last + 1, last + 2, last + 3, last + 4]
    bits = np.zeros(9, np.uint8)
    bits[transport.rank] = 1 << transport.rank % 8
    transport.allreduce_or(bits)
    assert bits.tolist() == [1 << rank % 8 if rank < transport.size else 0 for rank in range(9)]


def test_parts_hold_the_ranks_of_a_color_in_order(transport: HostTransport) -> None:
    rank, size = transport.rank, transport.size
    transport.group_by_host(2)
    assert transport.hosts == [other // 2 for other in range(size)]
    assert transport.ranks_on_this_host() == size
    part = transport.split(None if rank == 1 else rank % 2)
    members = [other for other in range(size) if other % 2 == rank % 2 and other != 1]
    if rank == 1:
        assert part is None
    else:
        assert part is not None
        assert (part.size, part.rank, part.ranks) == (len(members), members.index(rank), members)
        assert part.hosts == [other // 2 for other in members]
        assert part.allgather_objects(str(rank)) == [str(other) for other in members]
        part.close()
    again = transport.split(0)  # though the ranks are in different numbers of parts
    assert again is not None and again.allgather_objects(rank) == list(range(size))
    again.close()


def test_closing_twice_is_harmless(comm: MPI.Intracomm) -> None:
    transport = MpiTransport(comm)
    transport.close()
    transport.close()
    assert transport.comm == MPI.COMM_NULL
    assert comm.allreduce(1) == comm.size


def refusal(transport: HostTransport, mine: dict[str, Any], problem: str = "") -> str:
    """The one message with which all ranks refuse; "" when none does."""
    try:
        transport.agree(mine, problem)
        message = ""
    except ValueError as error:
        message = str(error)
    messages = transport.allgather_objects(message)
    assert messages == [messages[0]] * transport.size
    return messages[0]


def test_ranks_that_agree_go_on(transport: HostTransport) -> None:
    assert refusal(transport, {"length": 5, "method": "dense", "density": 0.5}) == ""
    assert refusal(transport, {}) == ""


def test_a_problem_on_one_rank_is_raised_on_all_and_names_it(transport: HostTransport) -> None:
    last = transport.size - 1
    problem = "density 2 is not in (0, 1]" if transport.rank == last else ""
    assert refusal(transport, {"length": 5}, problem) == f"rank {last}: density 2 is not in (0, 1]"


@pytest.mark.parametrize(
    ("raised", "here"),
    [(TypeError, ValueError), (MemoryError, ValueError), (KeyError, KeyError)],
)
def test_an_error_in_a_block_is_raised_on_all_ranks(
    transport: HostTransport, raised: type[Exception], here: type[Exception]
) -> None:
    last = transport.rank == transport.size - 1
    with (
        pytest.raises(here if last else ValueError, match="a mistake"),
        transport.together(TypeError) as alike,
    ):
        alike["size"] = transport.size
        if last:
            raise raised("a mistake")
    with transport.together():  # the next one begins anew
        pass


def test_an_error_in_a_block_is_raised_as_the_wanted_kind(
    transport: HostTransport,
) -> None:
    last = transport.size - 1
    with (
        pytest.raises(OSError, match=rf"^no tea: rank {last}: KeyError$"),
        transport.together_or("no tea", OSError),
    ):
        if transport.rank == last:
            raise KeyError
    with transport.together_or("no tea", OSError):  # the next one begins anew
        pass


def test_problems_on_several_ranks_are_all_named(transport: HostTransport) -> None:
    message = refusal(transport, {"length": 5}, f"trouble {transport.rank}")
    assert message == "; ".join(f"rank {rank}: trouble {rank}" for rank in range(transport.size))


@pytest.mark.mpi(min_size=2)
def test_a_disagreement_is_raised_on_all_with_every_ranks_value(transport: HostTransport) -> None:
    odd = transport.rank == transport.size - 1
    message = refusal(transport, {"method": "dense", "length": 7 if odd else 5})
    values = [5] * (transport.size - 1) + [7]
    listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
    assert message == f"ranks disagree on length: {listed}"


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("holder", [0, 1])
def test_a_name_that_one_rank_alone_has_is_a_disagreement(transport: HostTransport, holder: int) -> None:
    mine = {"length": 5} | ({"density": 0.5} if transport.rank == holder else {})
    message = refusal(transport, mine)
    assert message.startswith("ranks disagree on density: ")
    assert f"rank {holder}: 0.5" in message
    assert f"rank {1 - holder}: not given" in message


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize(("without", "who"), [(None, "all ranks"), (0, "ranks 1, 2"), (1, "ranks 0, 2")])
def test_a_problem_that_several_ranks_share_is_said_once(
    transport: HostTransport, without: int | None, who: str
) -> None:
    named = (
        who
        if transport.size == 3 or without is None
        else who + "".join(f", {r}" for r in range(3, transport.size))
    )
    message = refusal(transport, {}, "" if transport.rank == without else "no GPU")
    assert message == f"{named}: no GPU"
