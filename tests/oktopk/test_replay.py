"""The replay's records are those of real steps: who sends to whom in which round, what is waited for, and how many bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from collectives.allgatherv import balance_and_allgatherv
from collectives.codec import make_codec
from collectives.grid import connect_grid
from collectives.sparse import ENTRY
from oktopk.backend import Backend
from oktopk.error_feedback import ErrorFeedback
from oktopk.message_executor import MessageExecutor
from oktopk.methods import METHODS
from oktopk.replay import program
from oktopk.replay.program import RANK, Program, program_of
from oktopk.replay.recording import Step, record_step
from oktopk.replay.valueless import (
    COMPUTE,
    RECEIVE,
    SEND,
    WAIT,
    Extent,
    Group,
    Op,
    Record,
    ValuelessKernels,
    ValuelessTransport,
    Workload,
    independent,
)
from oktopk.results import StageTimer
from oktopk.settings import Settings, entries_kept
from oktopk.step import Plan
from tests.threads import ThreadTransport, on_threads

PER_PAIR = 48  # entries that one rank selects of another's region: no message is empty
DENSITY = 0.02
FEW = (2, 3, 4, 5, 8, 13)
ROWS = (
    ("oktopk", "float32"),
    ("oktopk", "int4"),
    ("union", "float32"),
    ("dense", "plain"),
    ("topka", "plain"),
    ("topkdsa", "plain"),
    ("gtopk", "plain"),
    ("gaussiank", "plain"),
)
LEAST = 768  # entries that a rank selects at least: thresholds of fewer miss by chance
# shares by which the bytes of all ranks may differ from what is expected of their data. An exact step of a method that sends k
# entries a rank does not differ. Coded lists of 48 entries differ as they are rounded up to pairs of words. How many entries of a
# region are distinct differs by chance.
EXACT = {"oktopk": 0.08, "union": 0.04, "topkdsa": 0.04}
DEVIATION = 0.1  # of a regular step's selection from k, in all others


def step_of(method: str, wire: str, ranks: int, exact: bool = False, **more: Any) -> Step:
    k = ranks * max(PER_PAIR, -(-LEAST // ranks))
    length = round(k / DENSITY) if METHODS[method].sparse else 1000 + ranks
    settings = Settings(density=DENSITY, wire=wire, levels="flat", **more)  # type: ignore[arg-type]
    return Step(method, length, ranks, 1, settings, exact)


def real_steps(step: Step) -> list[list[list[Op]]]:
    """The records of an exact step and of a regular one, of each rank, with values."""
    k = entries_kept(step.settings.density, step.length)
    length = step.length

    def run(transport: ThreadTransport) -> list[list[Op]]:
        backend = Backend()
        settings = step.settings
        if settings.exchange == "grid":
            transport.grid = connect_grid(transport)
        method = METHODS[step.method](length, transport, backend.kernels, settings)
        vectors = ErrorFeedback(backend, length, settings, method.sparse)
        executor = MessageExecutor(method, vectors)
        drawn = np.random.default_rng(transport.rank)
        records = []
        for exact in (True, True, False):  # the first step has no regions to renew
            transport.ops = []
            gradient = (drawn.standard_normal(length) * 10 ** drawn.uniform(-2, 0, length)).astype(np.float32)
            plan = Plan(k, exact, exact, 1 / transport.size, StageTimer())
            executor.begin(gradient, plan).result()
            records.append(transport.ops)
            if vectors.residual is not None:
                vectors.residual.fill(0)  # so that the thresholds of the first step fit the second
        executor.close()
        return records[1:]

    return [*map(list, zip(*on_threads(step.ranks, run), strict=True))]


def shape(ops: list[Op]) -> list[tuple[Any, ...]]:
    """A record but for its kernels and the bytes of payload: every message with its partner, every wait, in order."""
    kept = [number for number, op in enumerate(ops) if op.kind != COMPUTE]
    places = {number: place for place, number in enumerate(kept)}
    found: list[tuple[Any, ...]] = []
    for op in (ops[number] for number in kept):
        waits = tuple(places[number] for number in op.waits)
        fixed = 0 if op.kind in (SEND, RECEIVE) else op.amount
        found.append((op.kind, op.peer, fixed, op.group, waits))
    return found


def sent(ops: list[Op]) -> int:
    return sum(op.amount for op in ops if op.kind == SEND)


def check(method: str, wire: str, ranks: int, **more: Any) -> None:
    """Both steps of all ranks against the records of the same code without values."""
    step = step_of(method, wire, ranks, **more)
    for exact, real in zip((True, False), real_steps(step), strict=True):
        ours = [record_step(step_of(method, wire, ranks, exact, **more), rank).ops for rank in range(ranks)]
        for rank in range(ranks):
            assert shape(ours[rank]) == shape(real[rank]), (method, ranks, rank, exact)
        bytes_real, bytes_ours = (sum(map(sent, each)) for each in (real, ours))
        bound = EXACT.get(method, 0) if exact else EXACT.get(method, 0) + DEVIATION * METHODS[method].sparse
        assert abs(bytes_ours - bytes_real) <= bound * bytes_real, (method, ranks, exact)
        assert bytes_ours > 0


@pytest.mark.parametrize(("method", "wire"), ROWS)
def test_a_step_without_values_sends_and_waits_as_one_with_values(method: str, wire: str) -> None:
    for ranks in FEW:
        check(method, wire, ranks)


@pytest.mark.long("every number of ranks from 2 to 64; `make test` has some of them")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("method", "wire"), ROWS)
def test_so_it_does_on_every_number_of_ranks(method: str, wire: str) -> None:
    for ranks in range(2, 65):
        check(method, wire, ranks)


def test_so_it_does_over_a_grid() -> None:
    for ranks, wire in zip((3, 4, 5, 6, 7, 11, 12, 13), ("float32", "int4") * 4, strict=True):
        check("oktopk", wire, ranks, exchange="grid")
        program_of(step_of("oktopk", wire, ranks, exchange="grid"))  # every message has its other end


@pytest.mark.long("every number of ranks from 2 to 64; `make test` has some of them")
@pytest.mark.timeout(900)
def test_so_it_does_over_every_grid() -> None:
    for ranks in range(2, 65):
        check("oktopk", "float32", ranks, exchange="grid")


@pytest.mark.parametrize("wire", ["plain", "float32", "int4"])
def test_bytes_of_long_messages_are_as_expected(wire: str) -> None:
    step = Step("oktopk", 400_000, 4, 1, Settings(density=0.02, wire=wire), exact=True)  # type: ignore[arg-type]
    real = sum(map(sent, real_steps(step)[0]))
    assert sum(sent(record_step(step, rank).ops) for rank in range(4)) == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("more", [{"rotate": False}, {"bucket_rounds": 2}, {"bucket_rounds": 1}])
def test_settings_of_rounds_act_on_a_record(more: dict[str, Any]) -> None:
    for method in ("oktopk", "union"):
        check(method, "float32", 6, **more)
    rotating, other = (record_step(step_of("oktopk", "float32", 6, **each), 2).ops for each in ({}, more))
    assert shape(rotating) != shape(other)


def test_balancing_sends_the_same_messages_without_values() -> None:
    counts = np.array([5, 0, 90, 3, 2], np.int64)
    boundaries = np.arange(6, dtype=np.int64) * 100

    def run(transport: ThreadTransport) -> list[Op]:
        block = np.zeros(counts[transport.rank], ENTRY)
        block["index"] = boundaries[transport.rank] + np.arange(len(block))
        block["value"] = 1
        codec = make_codec("float32", transport.kernels, transport.workspace, transport.size)
        whole = balance_and_allgatherv(block, counts, 500, transport, 1.0, codec, boundaries)
        assert len(whole.entries) == counts.sum()
        return transport.ops

    real = on_threads(5, run)
    for rank in range(5):
        record = Record()
        kernels = ValuelessKernels(record, Workload(20, 4))
        transport: Any = ValuelessTransport(rank, Group(1, 5), record, kernels)
        codec = make_codec("float32", kernels, transport.workspace, 5)
        block: Any = Extent(int(counts[rank]))
        balance_and_allgatherv(block, counts, 500, transport, 1.0, codec, boundaries)
        assert shape(record.ops) == shape(real[rank])
        assert sent(record.ops) == sent(real[rank])
    assert sum(op.kind == SEND for op in real[2]) > 2 + 3, "nothing was balanced"


def messages(made: Program) -> Counter[tuple[int, int, float]]:
    """(source, destination, bytes) -> how often, of payload; messages of a wait to one rank count as one."""
    found: Counter[tuple[int, int, float]] = Counter()
    for rank in range(made.ranks):
        begin, end = (0, len(made.kind)) if made.shared else made.start[rank : rank + 2]
        burst: Counter[int] = Counter()
        for i in range(begin, end):
            if made.kind[i] == WAIT:
                found.update({(rank, dest, float(nbytes)): 1 for dest, nbytes in burst.items()})
                burst.clear()
            elif made.kind[i] == SEND and not made.control[i]:
                burst[partner(made, rank, i)] += int(made.amount[i])
        assert not burst
    return found


def partner(made: Program, rank: int, i: int) -> int:
    argument, stride, size = int(made.argument[i]), int(made.stride[i]), int(made.group[i])
    if made.rule[i] == RANK:
        return argument
    place = rank // stride % size
    other = (place + argument) % size if made.rule[i] == program.SHIFT else place ^ argument
    return rank + (other - place) * stride


@pytest.mark.parametrize(
    ("method", "hosts", "many"),
    [
        (method, hosts, many)
        for method in ("oktopk", "grid", "union", "topka", "topkdsa")
        for hosts, many in ((8, 1), (12, 1), (13, 1), (4, 2), (6, 4))
        if (method, hosts) != ("grid", 13)  # of such grids every rank is recorded
    ],
)
def test_a_few_ranks_tell_what_all_send(
    method: str, hosts: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a multiple of all numbers of ranks, so that every block is equal
    exchange: Any = "grid" if method == "grid" else "auto"
    settings = Settings(density=0.01, wire="auto", exchange=exchange)
    step = Step("oktopk" if method == "grid" else method, 24 * 13 * 4 * 100, hosts, many, settings)
    every = program_of(step)
    monkeypatch.setattr(program, "RECORDED", 1)
    few = program_of(step)
    assert (every.shared, few.shared) == (False, True)
    if method != "grid":
        assert messages(few) == messages(every)
        return
    # how many entries are distinct in a sum is no multiple of the ranks of a column
    assert few.sent == pytest.approx(every.sent, rel=1e-3)
    pairs = (
        Counter((source, dest) for source, dest, _ in messages(each).elements()) for each in (few, every)
    )
    assert next(pairs) == next(pairs)


@pytest.mark.parametrize("method", ["gtopk", "dense"])
def test_where_no_rule_holds_every_rank_is_recorded(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "RECORDED", 1)
    assert not program_of(Step(method, 10_000, 6, 1, Settings(density=0.02))).shared


def test_two_levels_send_a_hosts_bytes_between_hosts_alone() -> None:
    settings = Settings(density=0.01, wire="float32")
    flat = Step("oktopk", 1_000_000, 4, 2, Settings(density=0.01, wire="float32", levels="flat"))
    hosts = Step("oktopk", 1_000_000, 4, 2, settings)
    assert hosts.two_levels and not flat.two_levels

    def between(step: Step) -> int:
        total = 0
        for rank in range(step.ranks):
            for op in record_step(step, rank).ops:
                if op.kind == SEND:
                    other = op.group.rank(op.peer, rank)
                    total += op.amount * (other // 2 != rank // 2)
        return total

    assert between(hosts) / between(flat) == pytest.approx(0.5, abs=0.03)


def test_what_cannot_be_replayed_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="^one rank exchanges nothing: give several hosts"):
        record_step(Step("oktopk", 1000, 1), 0)
    with pytest.raises(ValueError, match="^density 0.01 of 1000 elements are fewer entries than 16 ranks"):
        record_step(Step("oktopk", 1000, 16), 0)
    grid = Settings(exchange="grid")
    with pytest.raises(ValueError, match="^exchange 'grid' is not for union: it is a way of oktopk"):
        record_step(Step("union", 100_000, 4, 1, grid), 0)
    with pytest.raises(ValueError, match="^density 0.5 is above 0.25: steps are dense"):
        record_step(Step("oktopk", 1000, 4, 1, Settings(density=0.5)), 0)


@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_what_is_expected_of_independent_choices_is_what_random_ones_give(ranks: int) -> None:
    drawn = np.random.default_rng(1)
    length, k = 100_000, 1000
    chosen = np.concatenate([drawn.choice(length, k, replace=False) for _ in range(ranks)])
    assert independent(np.full(ranks, k), length) == pytest.approx(len(np.unique(chosen)), rel=0.01)


def test_levels_and_wires_are_those_that_a_reducer_takes() -> None:
    assert Step("oktopk", 1000, 2, 2).two_levels and not Step("oktopk", 1000, 4, 1).two_levels
    assert not Step("topka", 1000, 2, 2).two_levels and not Step("oktopk", 1000, 1, 4).two_levels
    with pytest.raises(ValueError, match="^levels 'hosts': topka has flat steps only"):
        _ = Step("topka", 1000, 2, 2, Settings(levels="hosts")).two_levels
    assert [Step("oktopk", 1000, hosts, 2).wire for hosts in (1, 2)] == ["plain", "float32"]
    assert Step("topka", 1000, 2).wire == "plain"
    assert Step("union", 1000, 1, 2, Settings(wire="int4")).wire == "int4"
