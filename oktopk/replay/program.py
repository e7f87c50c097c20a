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
from typing import NamedTuple

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

SHIFT, XOR, RANK = range(3)
"""Rules for partners: a distance in the group, a mask of places in it, or a rank's number."""

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

    @property
    def sent(self) -> float:
        """Payload bytes that a rank sends, in the mean."""
        total = float(self.amount[(self.kind == SEND) & ~self.control].sum())
        return total if self.shared else total / self.ranks


@dataclass
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


def program_of_mean(step: Step) -> Program:
    """The program of one host's ranks, which take the mean of their gradients."""
    ranks = step.ranks_per_host
    return make_program([_by_rank(record_mean(step, rank), rank) for rank in range(ranks)], ranks)


def _by_rank(record: Record, rank: int) -> list[Entry]:
    """A rank's operations, with the numbers of its partners."""
    entries = []
    for op, control in expanded(record.ops, rank):
        argument = op.peer
        if op.kind in (SEND, RECEIVE):
            argument = op.group.rank(op.peer, rank)
        entries.append(Entry(op.kind, RANK, argument, op.amount, op.group, op.waits, control))
    return entries


def expanded(ops: Sequence[Op], rank: int) -> list[tuple[Op, bool]]:
    """Operations with control exchanges as messages, each beside whether it is of one.

    The communication library has algorithms of its own for these, which cannot be seen. They are
    taken to be Bruck's: ceil(log2 P) rounds, in which an allgather passes on all rows that a rank
    has, an alltoall half of them, and an allreduce one.
    """
    made: list[tuple[Op, bool]] = []
    moved: dict[int, int] = {}
    for number, op in enumerate(ops):
        if op.kind not in CONTROL:
            moved[number] = len(made)
            made.append((op._replace(waits=tuple(moved[at] for at in op.waits)), False))
            continue
        size, place = op.group.size, op.group.place(rank)
        distance = 1
        while distance < size:
            rows = min(distance, size - distance) if op.kind == ALLGATHER else 1
            if op.kind == ALLTOALL:
                rows = sum(bool(i & distance) for i in range(1, size))
            at, nbytes = len(made), rows * op.amount
            made.append((Op(RECEIVE, (place - distance) % size, nbytes, op.group), True))
            made.append((Op(SEND, (place + distance) % size, nbytes, op.group), True))
            made.append((Op(WAIT, 0, 0, waits=(at, at + 1)), True))
            distance *= 2
    return made


def merged(ops: Sequence[tuple[Op, bool]]) -> list[tuple[Op, bool]]:
    """Operations in which messages to one rank that follow each other directly are one."""
    made: list[tuple[Op, bool]] = []
    moved: list[int] = []
    for op, control in ops:
        last, of_control = made[-1] if made else (None, False)
        if (
            last
            and op.kind in (SEND, RECEIVE)
            and (op.kind, op.peer, op.group) == (last.kind, last.peer, last.group)
            and control == of_control
        ):
            made[-1] = last._replace(amount=last.amount + op.amount), control
        else:
            waits = tuple(dict.fromkeys(moved[at] for at in op.waits))
            made.append((op._replace(waits=waits), control))
        moved.append(len(made) - 1)
    return made


def _shared(step: Step) -> list[Entry] | None:
    """The operations of all ranks, by those of a few; None where partners keep to no rule."""
    ranks, many = step.ranks, step.ranks_per_host
    some = {0, 1, 2, 3, many, many + 1, ranks // 3, ranks // 2, ranks - 2, ranks - 1}
    few = sorted(some & {*range(ranks)})
    everyone = [merged(expanded(record_step(step, rank).ops, rank)) for rank in few]
    if len({len(ops) for ops in everyone}) > 1:
        return None
    entries = []
    for same in zip(*everyone, strict=True):
        (op, control), amounts = same[0], [each.amount for each, _ in same]
        if len({(each.kind, each.group, each.waits) for each, _ in same}) > 1:
            return None
        rule, argument, amount = RANK, op.peer, sum(amounts) / len(amounts)
        if op.kind in (SEND, RECEIVE):
            places = [op.group.place(rank) for rank in few]
            peers = [each.peer for each, _ in same]
            pairs = [*zip(peers, places, strict=True)]
            shifts = {(peer - place) % op.group.size for peer, place in pairs}
            masks = {peer ^ place for peer, place in pairs}
            if max(amounts) - min(amounts) > _SPREAD * amount or min(len(shifts), len(masks)) > 1:
                return None
            rule, argument = (SHIFT, shifts.pop()) if len(shifts) == 1 else (XOR, masks.pop())
        entries.append(Entry(op.kind, rule, argument, amount, op.group, op.waits, control))
    return entries


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
    )


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
