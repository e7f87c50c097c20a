"""The event engine against closed forms of LogGOPS; every byte is sent once, and arrives after it was sent."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.replay.engine import Replayed, replay
from oktopk.replay.network import Level, Network
from oktopk.replay.prediction import Kernels, predict, ring_seconds
from oktopk.replay.program import (
    AWAY,
    RANK,
    SHIFT,
    XOR,
    Entry,
    Program,
    _alike_on_hosts,
    make_program,
    merged,
    of_one_host,
    program_of,
)
from oktopk.replay.recording import Step
from oktopk.replay.valueless import COMPUTE, RECEIVE, SEND, WAIT, WORK, Group, Op
from oktopk.settings import Settings

LINK = Level(L=5e-6, o=1e-6, g=2e-6, G=1e-9, O=1e-10, S=1 << 16)
INSIDE = Level(L=1e-6, o=5e-7, g=1e-7, G=1e-11)
ALONE = Group(1, 1)
NOTHING = np.zeros((len(WORK), 2))
SMALL, LARGE = 1000, 1 << 20


def network(ranks_per_host: int = 1, link: Level = LINK) -> Network:
    return Network(INSIDE, link, ranks_per_host)


def run(program: Program, where: Network | None = None) -> Replayed:
    return replay(program, where or network(), NOTHING, trace=True)


def message(kind: int, other: int, nbytes: float, rule: int = RANK, size: int = 1) -> Entry:
    return Entry(kind, rule, other, nbytes, Group(1, size))


def wait(*numbers: int) -> Entry:
    return Entry(WAIT, RANK, 0, 0, ALONE, numbers)


def rounds(count: int, ranks: int, partners: list[tuple[int, int, int]], nbytes: list[float]) -> Program:
    """One program for all ranks; in round j all send by (rule, argument) to another and receive from the one of that rule."""
    entries: list[Entry] = []
    for j in range(count):
        rule, send_to, from_ = partners[j]
        at = len(entries)
        entries.append(message(RECEIVE, from_, nbytes[j], rule, ranks))
        entries.append(message(SEND, send_to, nbytes[j], rule, ranks))
        entries.append(wait(at, at + 1))
    return make_program([entries], ranks)


@pytest.mark.parametrize("nbytes", [1, SMALL, LARGE])
@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_one_message_takes_what_the_model_says(nbytes: int, ranks_per_host: int) -> None:
    made = make_program([[message(SEND, 1, nbytes), wait(0)], [message(RECEIVE, 0, nbytes), wait(0)]], 2)
    level = LINK if ranks_per_host == 1 else INSIDE
    expected = 2 * (level.o + level.O * nbytes) + level.L + level.G * nbytes
    if nbytes > level.S:  # both ends know that the other is ready
        expected += 2 * level.L
    done = run(made, network(ranks_per_host))
    assert done.seconds == pytest.approx(expected, rel=1e-12)
    assert level.message(nbytes) == pytest.approx(expected, rel=1e-12)
    assert done.host_bytes.sum() == (nbytes if ranks_per_host == 1 else 0)


@pytest.mark.parametrize("ranks", [2, 3, 8, 100])
def test_a_ring_takes_its_rounds_one_after_the_other(ranks: int) -> None:
    count = 2 * (ranks - 1)
    made = rounds(count, ranks, [(SHIFT, 1, ranks - 1)] * count, [SMALL] * count)
    one = 2 * (LINK.o + LINK.O * SMALL) + LINK.L + LINK.G * SMALL
    assert run(made).seconds == pytest.approx(count * one, rel=1e-9)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_recursive_doubling_takes_log_p_rounds_of_twice_the_bytes(ranks: int) -> None:
    count = ranks.bit_length() - 1
    sizes = [100.0 * 2**j for j in range(count)]
    made = rounds(count, ranks, [(XOR, 1 << j, 1 << j) for j in range(count)], sizes)
    expected = sum(2 * (LINK.o + LINK.O * s) + LINK.L + LINK.G * s for s in sizes)
    assert run(made).seconds == pytest.approx(expected, rel=1e-9)


def test_messages_into_one_link_queue() -> None:
    ranks, nbytes = 9, 60_000  # eager, and longer on the link than at a processor
    incast = [[message(RECEIVE, r, nbytes) for r in range(1, ranks)] + [wait(*range(ranks - 1))]]
    made = make_program([*incast, *([[message(SEND, 0, nbytes), wait(0)]] * (ranks - 1))], ranks)
    spent = LINK.o + LINK.O * nbytes
    expected = spent + LINK.L + (ranks - 1) * LINK.G * nbytes + spent
    assert run(made).seconds == pytest.approx(expected, rel=1e-9)


def test_ranks_of_a_host_share_its_link_out_and_the_gap_bounds_small_messages() -> None:
    """Four ranks of host 0 each send to one of host 1: bytes one after the other, or a message each g."""
    for nbytes in (60_000, 8):
        send = [[message(SEND, r + 4, nbytes), wait(0)] for r in range(4)]
        made = make_program([*send, *([message(RECEIVE, r, nbytes), wait(0)] for r in range(4))], 8)
        spent = LINK.o + LINK.O * nbytes
        between = max(LINK.g, LINK.G * nbytes)
        expected = spent + 3 * between + LINK.L + LINK.G * nbytes + spent
        assert run(made, network(4)).seconds == pytest.approx(expected, rel=1e-9)


def test_a_late_receiver_holds_up_long_messages_alone() -> None:
    rates = NOTHING.copy()
    rates[0] = 0, 1e-3  # a second for 1,000 elements
    for nbytes, late in ((SMALL, False), (LARGE, True)):
        late_one = [Entry(COMPUTE, RANK, 0, 1000, ALONE), message(RECEIVE, 0, nbytes), wait(1)]
        made = make_program([[message(SEND, 1, nbytes), wait(0)], late_one], 2)
        done = replay(made, network(), rates)
        assert bool(done.ended[0] > 1) is late
        assert done.computed[1, 0] == pytest.approx(1) and done.waited.min() >= -1e-12
        assert done.ended[1] >= 1 + (LINK.G * LARGE if late else LINK.o)


def test_ranks_that_wait_for_each_other_are_an_error() -> None:
    each = [[message(SEND, 1 - r, LARGE), wait(0), message(RECEIVE, 1 - r, LARGE), wait(2)] for r in range(2)]
    with pytest.raises(RuntimeError, match="^2 ranks wait for messages that do not come"):
        run(make_program(each, 2))


def test_a_message_without_its_other_end_is_an_error() -> None:
    with pytest.raises(ValueError, match="that no rank sends"):
        make_program([[message(RECEIVE, 1, 8), wait(0)], []], 2)
    with pytest.raises(ValueError, match="that no rank receives"):
        make_program([[message(SEND, 1, 8), wait(0)], []], 2)


HINDERED = replace(LINK, D=9e-10)


@pytest.mark.parametrize(
    ("there", "back", "hindered"), [(LARGE, LARGE, LARGE), (LARGE, LARGE // 2, LARGE // 2), (LARGE, SMALL, 0)]
)
def test_bytes_that_two_ranks_send_each_other_at_once_take_longer(
    there: int, back: int, hindered: int
) -> None:
    """D for each byte beyond the first S, as many as both send; directions of two connections take none."""
    sizes = there, back
    both = [
        [message(RECEIVE, 1 - r, sizes[1 - r]), message(SEND, 1 - r, sizes[r]), wait(0, 1)] for r in (0, 1)
    ]
    made, more = make_program(both, 2), HINDERED.D * max(0, hindered - LINK.S)
    alone, together = (run(made, network(1, link)) for link in (LINK, HINDERED))
    assert together.arrived[1] - alone.arrived[1] == pytest.approx(more, abs=1e-12)
    assert together.seconds == pytest.approx(HINDERED.message(there, back), rel=1e-12)
    assert alone.seconds == pytest.approx(LINK.message(there), rel=1e-12)
    # ranks of a host have links of their own
    assert run(made, network(2, HINDERED)).seconds == run(made, network(2)).seconds
    around = rounds(1, 3, [(SHIFT, 1, 2)], [there])
    assert run(around, network(1, HINDERED)).seconds == run(around).seconds


def test_directions_that_the_code_separates_do_not_hinder_each_other() -> None:
    """A rank that waits for what it has sent before it receives has one direction in flight."""
    first = [message(SEND, 1, LARGE), wait(0), message(RECEIVE, 1, LARGE), wait(2)]
    second = [message(RECEIVE, 0, LARGE), wait(0), message(SEND, 0, LARGE), wait(2)]
    made = make_program([first, second], 2)
    assert made.back.tolist() == [0.0] * 8
    assert run(made, network(1, HINDERED)).seconds == run(made).seconds
    # what is posted before that wait is in flight, too
    early = make_program([[first[2], first[0], wait(0, 1)], [second[2], second[0], wait(0, 1)]], 2)
    assert early.back.tolist() == [0.0, LARGE, 0.0, LARGE, 0.0, 0.0]


def test_all_that_is_in_flight_between_ranks_shares_hindered_links() -> None:
    """Each rank sends to all others and receives from all, in rotation: a link takes (P - 1)·(G + D) a byte beyond S."""
    ranks, nbytes = 5, LARGE
    entries = [message(RECEIVE, -d % ranks, nbytes, SHIFT, ranks) for d in range(1, ranks)]
    entries += [message(SEND, d, nbytes, SHIFT, ranks) for d in range(1, ranks)]
    made = make_program([[*entries, wait(*range(2 * (ranks - 1)))]], ranks)
    assert (made.back[ranks - 1 : -1] == nbytes).all() and made.back.sum() == (ranks - 1) * nbytes
    on_link = (ranks - 1) * (LINK.G * nbytes + HINDERED.D * (nbytes - LINK.S))
    more = 2 * ranks * (LINK.o + LINK.O * nbytes) + 3 * LINK.L
    assert on_link < run(made, network(1, HINDERED)).seconds < on_link + more


@pytest.mark.parametrize("method", ["dense", "oktopk", "union"])
def test_hindered_steps_are_the_same_by_the_rules_of_a_few_ranks_and_of_one_host(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oktopk.replay import program

    step = Step(method, 4_000_000, 16, 1, Settings(density=0.05))
    where = network(1, HINDERED)
    every = run(program_of(step), where).seconds
    assert every > 1.05 * run(program_of(step)).seconds
    monkeypatch.setattr(program, "RECORDED", 1)
    shared = program_of(step)
    assert shared.shared and run(shared, where).seconds == pytest.approx(every, rel=0.02)
    assert run(of_one_host(shared, 1), where).seconds == pytest.approx(every, rel=0.02)


@given(
    st.integers(2, 9),
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 99), st.integers(1, 200_000))),
    st.integers(1, 3),
)
@settings(max_examples=30)
def test_every_byte_is_sent_once_and_arrives_after(
    ranks: int, drawn: list[tuple[int, int, int]], ranks_per_host: int
) -> None:
    """Whatever the messages: all ranks post what they receive, send in the order drawn, and wait for all."""
    each: list[list[Entry]] = [[] for _ in range(ranks)]
    pairs = [(a % ranks, (a + 1 + b % (ranks - 1)) % ranks, n) for a, b, n in drawn]
    for source, dest, nbytes in pairs:
        each[dest].append(message(RECEIVE, source, nbytes))
    for source, dest, nbytes in pairs:
        each[source].append(message(SEND, dest, nbytes))
    for entries in each:
        entries.append(wait(*range(len(entries))))
    made = make_program(each, ranks)
    where = network(ranks_per_host)
    done = run(made, where)
    check_conservation(made, where, done)
    hosts = [rank // ranks_per_host for rank in range(ranks)]
    sent = [sum(n for a, b, n in pairs if hosts[a] == h != hosts[b]) for h in range(hosts[-1] + 1)]
    assert done.host_bytes.tolist() == sent
    # nothing stands still: at most all messages take their time one after the other
    both = where.inside, where.between
    assert done.seconds <= sum(max(longest(level, n) for level in both) for _, _, n in pairs) + 1e-12
    # no link is faster than its rate
    for host, nbytes in enumerate(sent):
        assert done.seconds >= LINK.G * nbytes, host
    assert done.waited.min() >= -1e-12


def longest(level: Level, nbytes: int) -> float:
    """Seconds of a message alone, where both its links keep the gap to another one."""
    return level.message(nbytes) + 2 * max(level.g, level.G * nbytes)


def check_conservation(made: Program, where: Network, done: Replayed) -> None:
    """Every message of a rank has left and arrived, after the least time that its bytes take."""
    for rank in range(made.ranks):
        begin, end = (0, len(made.kind)) if made.shared else made.start[rank : rank + 2]
        for i in range(begin, end):
            if made.kind[i] == SEND:
                at = made.slots[rank] + made.slot[i]
                least = min(x.L + x.G * made.amount[i] for x in (where.inside, where.between))
                assert done.arrived[at] - done.sent[at] >= least * (1 - 1e-9)
    assert np.isnan(done.sent).sum() == np.isnan(done.arrived).sum() == len(done.sent) // 2
    assert done.ended.max() == done.seconds and done.ended.min() >= 0


@pytest.mark.parametrize("method", ["oktopk", "union", "gtopk", "dense"])
@pytest.mark.parametrize(("hosts", "many"), [(5, 1), (4, 3), (70, 1)])
def test_steps_conserve_bytes_and_keep_to_the_links(method: str, hosts: int, many: int) -> None:
    step = Step(method, 3_000_000, hosts, many, Settings(density=0.01))
    made = program_of(step)
    where = network(many)
    done = run(made, where)
    check_conservation(made, where, done)
    assert done.seconds >= LINK.G * done.host_bytes.max()
    assert done.host_bytes.sum() > 0 and made.sent > 0


def test_a_shared_program_takes_as_long_as_that_of_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from oktopk.replay import program

    step = Step("oktopk", 1_200_000, 12, 2, Settings(density=0.01))
    every = run(program_of(step), network(2)).seconds
    monkeypatch.setattr(program, "RECORDED", 1)
    assert run(program_of(step), network(2)).seconds == pytest.approx(every, rel=0.02)


def test_a_dense_ring_is_that_of_the_engine() -> None:
    """Two ranks send to each other, more do not."""
    for ranks, nbytes in ((2, 1 << 22), (4, 1 << 22), (10, 1000)):
        count, where = 2 * (ranks - 1), network(1, HINDERED)
        made = rounds(count, ranks, [(SHIFT, 1, ranks - 1)] * count, [nbytes / ranks] * count)
        assert ring_seconds(where, ranks, nbytes) == pytest.approx(run(made, where).seconds, rel=1e-9)
        assert (ring_seconds(network(), ranks, nbytes) < ring_seconds(where, ranks, nbytes)) is (ranks == 2)


def test_rings_between_hosts_share_a_link_and_take_fewer_rounds() -> None:
    """Two hosts of four: whichever is faster, and no less than a host's bytes take."""
    small, large = (ring_seconds(network(4), 16, nbytes) for nbytes in (1000, 1 << 30))
    assert small < 2 * 63 * LINK.message(1000 / 64)
    assert large >= 2 * (1 << 30) * 15 / 16 * LINK.G
    assert ring_seconds(network(), 1, 1000) == 0


def test_a_prediction_adds_up() -> None:
    step = Step("oktopk", 4_000_000, 8, 1, Settings(density=0.01))
    kernels = Kernels({"select": (1e-4, 1e-9), "sum": (0, 1e-8)}, "made up")
    found = predict(step, network(), kernels)
    assert found.select == pytest.approx(1e-4 + 4e-3)
    parts = found.select + found.kernels + found.overhead + found.waited
    assert parts == pytest.approx(found.seconds, rel=0.02)  # of the mean rank, and of the last one
    assert not found.extrapolated
    assert predict(Step("oktopk", 4_000_000, 65, 1, Settings(density=0.01)), network(), kernels).extrapolated
    two = Step("oktopk", 4_000_000, 64, 2, Settings(density=0.01))
    assert not predict(two, network(2), kernels).extrapolated
    # k entries of a float32 wire: between those of half and of all bounds of a step
    assert 2 * 40_000 * 4 * 7 / 8 < found.rank_bytes < 6 * 40_000 * 4 * 7 / 8


@pytest.mark.parametrize(
    ("name", "value"), [("L", 0.0), ("L", -1.0), ("L", float("nan")), ("G", 0.0), ("o", -1.0)]
)
def test_a_level_needs_a_latency_and_a_rate(name: str, value: float) -> None:
    given = {"L": 1e-6, "o": 0.0, "g": 0.0, "G": 1e-9} | {name: value}
    with pytest.raises(ValueError, match="is not"):
        Level(**given)


@pytest.mark.parametrize("each_alone", [False, True])
def test_a_wait_takes_messages_as_they_come(each_alone: bool) -> None:
    """Eight messages a second apart, of half a second at a processor: nine seconds, by one wait as by eight."""
    overhead, count = 0.5, 8
    link, rates = Level(L=1e-3, o=overhead, g=0.0, G=1e-12), NOTHING.copy()
    rates[0, 1] = 1.0  # seconds of an element
    received = [message(RECEIVE, r, 8) for r in range(1, count + 1)]
    waits = [wait(i) for i in range(count)] if each_alone else [wait(*range(count))]
    late = [[Entry(COMPUTE, RANK, 0, r, ALONE), message(SEND, 0, 8), wait(1)] for r in range(1, count + 1)]
    made = make_program([[*received, *waits], *late], count + 1)
    done = replay(made, Network(link, link), rates)
    assert done.ended[0] == pytest.approx(count + overhead + link.L + overhead)
    assert done.overhead[0] == pytest.approx(count * overhead)
    # and messages that came before the wait follow each other
    at_last = [Entry(COMPUTE, RANK, 0, 20, ALONE), *received, wait(*range(1, count + 1))]
    made = make_program([at_last, *late], count + 1)
    assert replay(made, Network(link, link), rates).ended[0] == pytest.approx(20 + count * overhead)


def test_a_gap_that_is_longer_than_a_message_decides_a_ring() -> None:
    for link in (replace(LINK, g=1e-3), LINK):
        made = rounds(6, 4, [(SHIFT, 1, 3)] * 6, [SMALL] * 6)
        expected = ring_seconds(network(1, link), 4, 4 * SMALL)
        assert run(made, network(1, link)).seconds == pytest.approx(expected, rel=1e-9)


def test_messages_to_one_rank_become_one_where_they_follow_each_other() -> None:
    ops = [
        Op(RECEIVE, 1, 100),
        Op(RECEIVE, 1, 8),
        Op(WAIT, 0, 0, waits=(0, 1)),
        Op(RECEIVE, 1, 8),
        Op(SEND, 1, 8),
    ]
    whole = [Op(RECEIVE, 1, 108), Op(WAIT, 0, 0, waits=(0,))]
    assert merged(ops) == [*whole, Op(RECEIVE, 1, 8), Op(SEND, 1, 8)]


RATES = np.array([[1e-6, 1e-9]] * len(WORK))


@pytest.mark.parametrize(
    ("method", "exchange"), [("oktopk", "direct"), ("oktopk", "grid"), ("union", "direct")]
)
@pytest.mark.parametrize("wire", ["plain", "float32"])
def test_one_rank_replays_all_where_each_has_a_host(method: str, exchange: Any, wire: Any) -> None:
    settings = Settings(density=0.01, wire=wire, exchange=exchange)
    for ranks in (66, 72, 128):
        made = program_of(Step(method, 2_000_000, ranks, 1, settings))
        one = of_one_host(made, 1)
        assert (made.shared, one.ranks, len(one.kind)) == (True, 1, len(made.kind))
        assert one.sent == pytest.approx(made.sent)
        for link in (LINK, replace(LINK, G=1e-7, S=0.0), replace(LINK, L=1e-3, G=1e-11)):
            every, alone = (replay(each, network(1, link), RATES) for each in (made, one))
            for name in ("ended", "computed", "overhead", "waited", "host_bytes"):
                each = getattr(every, name)
                assert each == pytest.approx(np.broadcast_to(getattr(alone, name), each.shape), abs=1e-9), (
                    name
                )


@pytest.mark.parametrize("levels", ["flat", "hosts"])
@pytest.mark.parametrize("exchange", ["direct", "grid"])
def test_hosts_in_step_with_each_other_are_hardly_later(levels: Any, exchange: Any) -> None:
    settings = Settings(density=0.01, wire="float32", levels=levels, exchange=exchange)
    for hosts, many in ((70, 1), (64, 2), (24, 4), (32, 8), (9, 8)):
        made = program_of(Step("oktopk", 2_000_000, hosts, many, settings))
        one = of_one_host(made, many)
        for link in (LINK, replace(LINK, G=1e-7), replace(LINK, L=1e-4, g=1e-5)):
            every, alone = (replay(each, network(many, link), RATES) for each in (made, one))
            assert alone.host_bytes.max() == pytest.approx(every.host_bytes.max())
            assert 0.8 * every.seconds < alone.seconds < 1.001 * every.seconds


@pytest.mark.parametrize("rule", [SHIFT, XOR])
def test_hosts_are_taken_for_alike_only_where_partners_are(rule: int) -> None:
    """Whether partners of ranks with one place are on one place, on the own host or another, by all ranks."""
    compared = 0
    for many, stride, size, blocks in product((1, 2, 3, 6), (1, 2, 3, 4), (2, 4, 8), (1, 3)):
        ranks = stride * size * blocks
        if ranks % many or not _alike_on_hosts(rule, stride, size, many):
            continue
        for argument in range(1, size):
            entries = [Entry(kind, rule, argument, 1.0, Group(stride, size)) for kind in (SEND, RECEIVE)]
            entries[1].argument = -argument % size if rule == SHIFT else argument
            made = make_program([entries], ranks)
            one = of_one_host(made, many)
            for rank in range(ranks):
                other, place = made.partners(rank)[0], rank % many
                assert other % many == one.partners(place)[2 * place]
                assert (other // many != rank // many) == (one.rule[2 * place] == AWAY)
            compared += 1
    assert compared > 100
