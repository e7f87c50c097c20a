"""The records of all ranks as one program for the engine.

Up to RECORDED ranks each rank's step is recorded. Beyond, a few ranks' are, and their partners tell
the rule that holds for all: the same distance, or the same exclusive or, of places in the group.
Where neither fits (trees, Rabenseifner's allreduce on a number that is no power of two, grids whose
columns differ), every rank is recorded, too.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oktopk.replay.recording import Step, record_mean, record_step
from oktopk.replay.valueless import (
    ALLGATHER,
    ALLTOALL,
    CONTROL,
    RECEIVE,
    SEND,
    WAIT,
    Group,
    Op,
    Record,
)

RECORDED = 64
"""Ranks up to which every rank is recorded."""

SHIFT, XOR, RANK, AWAY = range(4)
"""Rules for partners: a distance in the group, a mask of places in it, or a rank's number; AWAY: on another host."""

_SPREAD = 0.05  # share by which a message's bytes may differ between ranks, for one rule


class Program(NamedTuple):
    """What all ranks do; entries of arrays are operations. Compiled code takes it as it is.

    Attributes:
        ranks: P.
        shared: whether all ranks run the same operations; else rank r runs those in [start[r],
            start[r + 1]).
        start: int64[P + 1]; of a shared program [0, operations].
        kind: int8, SEND, RECEIVE, WAIT or COMPUTE.
        rule, argument: int8 and int64: of a message its partner's rule, and distance, mask or rank;
            of COMPUTE the index in WORK.
        stride, group: int64, those of `Op.group`.
        amount: float64, bytes or elements.
        slot: int64, the number of a message on its rank; match: that of the other end on its own.
        waits: int64; WAIT i waits for the operations waits[first[i]:first[i + 1]].
        first: int64[operations + 1].
        slots: int64[P + 1], where each rank's slots begin.
        control: bool, messages of control exchanges.
        back: float64, of SEND the bytes that come from its receiver while it is on its way.
    """

    ranks: int
    shared: bool
    start: NDArray[np.int64]
    kind: NDArray[np.int8]
    rule: NDArray[np.int8]
    argument: NDArray[np.int64]
    stride: NDArray[np.int64]
    group: NDArray[np.int64]
    amount: NDArray[np.float64]
    slot: NDArray[np.int64]
    match: NDArray[np.int64]
    waits: NDArray[np.int64]
    first: NDArray[np.int64]
    slots: NDArray[np.int64]
    control: NDArray[np.bool_]
    back: NDArray[np.float64]

    @property
    def sent(self) -> float:
        """Payload bytes that a rank sends, in the mean."""
        total = float(self.amount[(self.kind == SEND) & ~self.control].sum())
        return total if self.shared else total / self.ranks

    def partners(self, rank: int) -> NDArray[np.int64]:
        """int64[operations], the rank at the other end of each message of a rank; of others anything.

        Args:
            rank: of a program that is not shared only its own operations count.
        """
        place = rank // self.stride % self.group
        there = np.where(self.rule == SHIFT, (place + self.argument) % self.group, place ^ self.argument)
        return np.where(self.rule >= RANK, self.argument, rank + (there - place) * self.stride)


@dataclass(slots=True)
class Entry:
    """An operation with the rule of its partner."""

    kind: int
    rule: int
    argument: int
    amount: float
    group: Group
    waits: tuple[int, ...] = ()
    control: bool = False


def program_of(step: Step) -> Program:
    """The program of all ranks of a step.

    Raises:
        ValueError: the step cannot be replayed.
    """
    if step.ranks > RECORDED:
        shared = _shared(step)
        if shared is not None:
            return make_program([shared], step.ranks)
    everyone = range(step.ranks)
    return make_program([_by_rank(record_step(step, rank), rank) for rank in everyone], step.ranks)


def of_one_host(program: Program, many: int) -> Program:
    """A shared program as one host's, where every host's ranks do the same at the same time; else as it is.

    What comes from the other hosts comes when this host's own messages come to them: these go to its own ranks instead. So one
    host replays all.

    Args:
        many: ranks of a host.
    """
    is_message = program.slot >= 0
    rule, stride, size = (each[is_message].tolist() for each in (program.rule, program.stride, program.group))
    rules = {*zip(rule, stride, size, strict=True)}
    if not program.shared or not all(_alike_on_hosts(*rule, many=many) for rule in rules):
        return program
    partners = [program.partners(rank) for rank in range(many)]
    away = np.concatenate([np.where(each < many, RANK, AWAY) for each in partners])
    inside = np.concatenate([np.where(is_message, each % many, program.argument) for each in partners])
    places, operations = np.arange(many + 1), len(program.kind)
    firsts = [program.first[:-1] + rank * len(program.waits) for rank in range(many)]

    def of_all(values: NDArray[Any]) -> NDArray[Any]:
        return np.tile(values, many)

    return program._replace(
        ranks=many,
        shared=False,
        start=operations * places,
        kind=of_all(program.kind),
        rule=away.astype(np.int8),
        argument=inside,
        stride=of_all(program.stride),
        group=of_all(program.group),
        amount=of_all(program.amount),
        slot=of_all(program.slot),
        match=of_all(program.match),
        waits=of_all(program.waits) + np.repeat(operations * places[:-1], len(program.waits)),
        first=np.concatenate([*firsts, [many * len(program.waits)]]),
        slots=program.slots[1] * places,
        control=of_all(program.control),
        back=of_all(program.back),
    )


def _alike_on_hosts(rule: int, stride: int, size: int, many: int) -> bool:
    """Whether partners of ranks with one place on their hosts have one place, too, all inside the host or none.

    Args:
        rule, stride, size: of a message's partner.
        many: ranks of a host.
    """
    block = stride * size
    if stride % many == 0 or many % block == 0:  # one rank of each host, or a part of a host
        return True
    if many % stride or block % many:
        return False
    places = many // stride
    return rule == SHIFT or places & (places - 1) == 0


def program_of_mean(step: Step) -> Program:
    """The program of one host's ranks, which take the mean of their gradients."""
    ranks = step.ranks_per_host
    return make_program([_by_rank(record_mean(step, rank), rank) for rank in range(ranks)], ranks)


def _by_rank(record: Record, rank: int) -> list[Entry]:
    """A rank's operations, with the numbers of its partners."""
    entries = expanded([_entry(op, RANK, op.group.rank(op.peer, rank)) for op in record.ops])
    for entry in entries:
        if entry.rule == SHIFT:
            place = (entry.group.place(rank) + entry.argument) % entry.group.size
            entry.rule, entry.argument = RANK, entry.group.rank(place, rank)
    return entries


def _entry(op: Op, rule: int, argument: int) -> Entry:
    """An operation; the rule and its argument are of messages."""
    if op.kind not in (SEND, RECEIVE):
        rule, argument = RANK, op.peer
    return Entry(op.kind, rule, argument, op.amount, op.group, op.waits)


def expanded(entries: Sequence[Entry]) -> list[Entry]:
    """Operations with control exchanges as messages.

    The communication library has algorithms of its own for these, which cannot be seen. They are
    taken to be Bruck's: ceil(log2 P) rounds, in which an allgather passes on all rows that a rank
    has, an alltoall half of them, and an allreduce one.
    """
    messages: list[Entry] = []
    moved: list[int] = []
    for entry in entries:
        moved.append(len(messages))
        if entry.kind not in CONTROL:
            if entry.waits:
                entry.waits = tuple(moved[at] for at in entry.waits)
            messages.append(entry)
            continue
        size, group = entry.group.size, entry.group
        distance = 1
        while distance < size:
            rows = min(distance, size - distance) if entry.kind == ALLGATHER else 1
            if entry.kind == ALLTOALL:
                rows = sum(bool(i & distance) for i in range(1, size))
            at, nbytes = len(messages), rows * entry.amount
            messages.append(Entry(RECEIVE, SHIFT, -distance % size, nbytes, group, control=True))
            messages.append(Entry(SEND, SHIFT, distance, nbytes, group, control=True))
            messages.append(Entry(WAIT, RANK, 0, 0, Group(1, 1), (at, at + 1), control=True))
            distance *= 2
    return messages


def merged(ops: Sequence[Op]) -> list[Op]:
    """Operations in which messages to one rank that follow each other directly are one."""
    joined: list[Op] = []
    moved: list[int] = []
    last = None
    for op in ops:
        if op.kind in (SEND, RECEIVE):
            to = op.kind, op.peer, op.group
            if to == last:
                joined[-1] = joined[-1]._replace(amount=joined[-1].amount + op.amount)
                moved.append(len(joined) - 1)
                continue
            last = to
        else:
            last = None
            if op.waits:
                op = op._replace(waits=tuple(dict.fromkeys(moved[at] for at in op.waits)))
        joined.append(op)
        moved.append(len(joined) - 1)
    return joined


def is_shared(step: Step) -> bool:
    """Whether a step of many ranks is replayed by the operations of a few; else each rank is recorded, which takes long."""
    return step.ranks > RECORDED and _shared(step) is not None


@lru_cache(8)
def _shared(step: Step) -> list[Entry] | None:
    """The operations of all ranks, by those of a few; None where partners keep to no rule."""
    ranks, many = step.ranks, step.ranks_per_host
    some = {0, 1, 2, 3, many, many + 1, ranks // 3, ranks // 2, ranks - 2, ranks - 1}
    few = sorted(some & {*range(ranks)})
    everyone = [merged(record_step(step, rank).ops) for rank in few]
    first, *others = ([(op.kind, op.group, op.waits) for op in ops] for ops in everyone)
    if any(other != first for other in others) or any(group.members for _, group, _ in first):
        return None
    strides, sizes = np.array([(group.stride, group.size) for _, group, _ in first]).T
    is_message = np.isin([kind for kind, *_ in first], (SEND, RECEIVE))
    peers = np.array([[op.peer for op in ops] for ops in everyone])
    amounts = np.array([[op.amount for op in ops] for ops in everyone])
    places = np.array(few)[:, None] // strides % sizes
    shifts, masks, mean = (peers - places) % sizes, peers ^ places, amounts.mean(axis=0)
    by_shift, by_mask = ((each == each[0]).all(axis=0) for each in (shifts, masks))
    one_rule = (by_shift | by_mask) & (np.ptp(amounts, axis=0) <= _SPREAD * mean)
    if not one_rule[is_message].all():
        return None
    rules = np.where(by_shift, SHIFT, XOR).tolist()
    arguments = np.where(by_shift, shifts[0], masks[0]).tolist()
    alike = (op._replace(amount=amount) for op, amount in zip(everyone[0], mean.tolist(), strict=True))
    return expanded([*map(_entry, alike, rules, arguments)])


def make_program(programs: Sequence[Sequence[Entry]], ranks: int) -> Program:
    """The operations as arrays, every message with its other end.

    Args:
        programs: one for all ranks, or one for each.

    Raises:
        ValueError: a message has no other end.
    """
    shared = len(programs) == 1
    start = np.cumsum([0, *map(len, programs)])
    entries = [entry for program in programs for entry in program]
    slot, slots = np.full(len(entries), -1, np.int64), []
    for first, program in zip(start, programs, strict=False):
        messages = [at for at, entry in enumerate(program) if entry.kind in (SEND, RECEIVE)]
        slot[first + np.array(messages, np.int64)] = np.arange(len(messages))
        slots.append(len(messages))
    match = _matches(programs, start, slot)
    waits, firsts = [], [0]
    for first, program in zip(start, programs, strict=False):
        for entry in program:
            waits += [int(first) + at for at in entry.waits]
            firsts.append(len(waits))
    of_ranks = slots * ranks if shared else slots
    return Program(
        ranks,
        shared,
        start,
        np.array([entry.kind for entry in entries], np.int8),
        np.array([entry.rule for entry in entries], np.int8),
        np.array([entry.argument for entry in entries], np.int64),
        np.array([entry.group.stride for entry in entries], np.int64),
        np.array([entry.group.size for entry in entries], np.int64),
        np.array([entry.amount for entry in entries], np.float64),
        slot,
        match,
        np.array(waits, np.int64),
        np.array(firsts, np.int64),
        np.cumsum([0, *of_ranks]),
        np.array([entry.control for entry in entries], np.bool_),
        np.array([nbytes for program in programs for nbytes in _back(program)], np.float64),
    )


def _back(program: Sequence[Entry]) -> list[float]:
    """Of each SEND of a rank the bytes that it receives from the same rank between the SEND and its WAIT; else 0.

    Both ranks hinder each other by what they have in flight at once, which the code decides, not when it runs.
    """
    ends = [len(program)] * len(program)
    for at, entry in enumerate(program):
        for message in entry.waits:
            ends[message] = at
    received: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for at, entry in enumerate(program):
        if entry.kind == RECEIVE:
            received[entry.group, entry.rule, entry.argument].append(at)
    amounts = [0.0] * len(program)
    for at, entry in enumerate(program):
        if entry.kind == SEND:
            matching = received.get((entry.group, entry.rule, entry.argument), ())
            amounts[at] = sum(program[i].amount for i in matching if i < ends[at] and at < ends[i])
    return amounts


def _matches(
    programs: Sequence[Sequence[Entry]], start: NDArray[np.int64], slot: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The slot of each message's other end; messages between two ranks arrive in order, as they were sent."""
    waiting: dict[tuple[object, ...], deque[tuple[int, float]]] = defaultdict(deque)
    match = np.full(len(slot), -1, np.int64)
    for kind in (SEND, RECEIVE):
        for rank, program in enumerate(programs):
            for at, entry in enumerate(program, int(start[rank])):
                if entry.kind != kind:
                    continue
                argument, size = entry.argument, entry.group.size
                key: tuple[object, ...] = entry.group, entry.rule, argument
                if entry.rule == SHIFT and kind == RECEIVE:
                    key = entry.group, SHIFT, -argument % size
                elif entry.rule == RANK:
                    key = (rank, argument) if kind == SEND else (argument, rank)
                if kind == SEND:
                    waiting[key].append((at, entry.amount))
                elif waiting[key]:
                    other, nbytes = waiting[key].popleft()
                    match[at], match[other] = slot[other], slot[at]
                    entry.amount = nbytes  # the receiver has expected what it would send itself
                else:
                    raise ValueError(f"operation {at} waits for a message that no rank sends")
    if any(waiting.values()):
        raise ValueError("a message is sent that no rank receives")
    return match
