"""The event engine: programs of all ranks under LogGOPS, with links that the ranks of a host share.

A message takes its sender o + O·bytes, leaves when its host's outgoing link is free, keeps that for
max(g, G·bytes), and arrives L later at the incoming link of the other host, which it keeps as long.
While its receiver sends to its sender, too, bytes beyond S take D longer, as many as both send.
So links are served in the order of arrival, and several messages into one link queue. A wait takes
the receiver o + O·bytes for each message, from when that has come. One of more than S bytes leaves
only after its receiver is ready, one latency after both know. Inside a host each rank has a link of
its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba.extending import register_jitable
from numpy.typing import NDArray

from collectives.cpu.compiled import compiled
from oktopk.replay.network import Network
from oktopk.replay.program import AWAY, Program
from oktopk.replay.valueless import COMPUTE, RECEIVE, SEND, WORK

_NEVER = np.nan


@dataclass(frozen=True)
class Replayed:
    """What a step takes.

    Attributes:
        seconds: until the last rank has ended.
        ended: float64[P], when each rank has.
        computed: float64[P, kinds], in kernels, by the kinds of WORK.
        overhead: float64[P], o and O of messages, which take a processor.
        waited: float64[P], the rest.
        host_bytes: float64[hosts], bytes that left a host, control exchanges included.
        sent, arrived: float64[slots], of each message when its processor had sent it, and when its
            last byte arrived; at the slot of its sender. Empty unless asked for.
    """

    seconds: float
    ended: NDArray[np.float64]
    computed: NDArray[np.float64]
    overhead: NDArray[np.float64]
    waited: NDArray[np.float64]
    host_bytes: NDArray[np.float64]
    sent: NDArray[np.float64]
    arrived: NDArray[np.float64]


def replay(
    program: Program, network: Network, rates: NDArray[np.float64], *, trace: bool = False
) -> Replayed:
    """Run a program.

    Args:
        rates: float64[kinds, 2], seconds of a kernel's call and of each element, by the kinds of
            WORK.
        trace: keep the times of messages.

    Raises:
        RuntimeError: ranks wait for each other.
    """
    ranks = program.ranks
    hosts = np.arange(ranks, dtype=np.int64) // network.ranks_per_host
    slots = int(program.slots[-1])
    ended, overheads = np.zeros(ranks), np.zeros(ranks)
    computed = np.zeros((ranks, len(WORK)))
    host_bytes = np.zeros(int(hosts[-1]) + 1)
    sent, arrived = (np.full(slots if trace else 0, _NEVER) for _ in range(2))
    # of each slot, or of each slot of a rank where all share a program
    operation = np.flatnonzero(program.slot >= 0)
    times = ended, computed, overheads, host_bytes, sent, arrived
    stuck = _run(program, operation, hosts, network.levels, np.ascontiguousarray(rates), *times)
    if stuck:
        raise RuntimeError(f"{stuck} ranks wait for messages that do not come")
    waited = ended - overheads - computed.sum(axis=1)
    last = float(ended.max())
    return Replayed(last, ended, computed, overheads, waited, host_bytes, sent, arrived)


@register_jitable
def _push(times, codes, count, time, code):  # type: ignore[no-untyped-def]
    """Add an event to a heap of so many; there is room."""
    at = count
    while at > 0:
        parent = (at - 1) >> 1
        if times[parent] <= time:
            break
        times[at], codes[at] = times[parent], codes[parent]
        at = parent
    times[at], codes[at] = time, code


@register_jitable
def _with_room(times, codes, count):  # type: ignore[no-untyped-def]
    """A heap of so many events with room for eight more."""
    if count + 8 <= len(times):
        return times, codes
    grown, grown_codes = np.empty(2 * len(times)), np.empty(2 * len(times), np.int64)
    grown[: len(times)], grown_codes[: len(times)] = times, codes
    return grown, grown_codes


@register_jitable
def _pop(times, codes, count):  # type: ignore[no-untyped-def]
    """Take the first event of a heap of so many."""
    time, code = times[0], codes[0]
    last, last_code = times[count - 1], codes[count - 1]
    at, child = 0, 1
    while child < count - 1:
        if child + 1 < count - 1 and times[child + 1] < times[child]:
            child += 1
        if times[child] >= last:
            break
        times[at], codes[at] = times[child], codes[child]
        at, child = child, 2 * child + 1
    times[at], codes[at] = last, last_code
    return time, code


@register_jitable
def _partner(rank, rule, argument, stride, size):  # type: ignore[no-untyped-def]
    if rule > 1:
        return argument
    place = rank // stride % size
    other = (place + argument) % size if rule == 0 else place ^ argument
    return rank + (other - place) * stride


@register_jitable
def _level(rule, host, other):  # type: ignore[no-untyped-def]
    """1 of a message between hosts, 0 inside one."""
    return 1 if rule == AWAY or host != other else 0


@compiled()
def _run(  # type: ignore[no-untyped-def]
    program, operation, hosts, levels, rates, ended, computed, overheads, host_bytes, sent, arrived
):
    """As `replay`; returns how many ranks have not ended."""
    ranks, shared, start, slots = program.ranks, program.shared, program.start, program.slots
    kinds, rules, arguments = program.kind, program.rule, program.argument
    strides, groups, amounts = program.stride, program.group, program.amount
    slot, match, waits, first = program.slot, program.match, program.waits, program.first
    backs = program.back
    total = slots[ranks]
    per_rank = slots[1] if shared else 0
    # of each slot: NaN; -1 - t where its rank was ready at t; when it was complete
    done = np.full(total, np.nan)
    clock = np.zeros(ranks)
    at = np.empty(ranks, np.int64)
    stop = np.empty(ranks, np.int64)
    cursor = np.zeros(ranks, np.int64)
    blocked = np.full(ranks, -1, np.int64)
    entered = np.zeros(ranks)
    outgoing, incoming = np.zeros((2, ranks)), np.zeros((2, ranks))
    times, codes = np.empty(8 * ranks + 64), np.empty(8 * ranks + 64, np.int64)
    most = 0
    for i in range(len(first) - 1):
        most = max(most, first[i + 1] - first[i])
    came, spends = np.empty(most), np.empty(most)
    count = 0
    left = ranks
    for rank in range(ranks):
        at[rank] = 0 if shared else start[rank]
        stop[rank] = start[1] if shared else start[rank + 1]
        cursor[rank] = -1
        _push(times, codes, count, 0.0, rank)
        count += 1
    while count > 0:
        time, code = _pop(times, codes, count)
        count -= 1
        times, codes = _with_room(times, codes, count)
        if code >= ranks:  # a message at a link
            arrives = code >= ranks + total
            message = code - ranks - (total if arrives else 0)
            if shared:
                source, i = message // per_rank, operation[message % per_rank]
            else:
                i = operation[message]
                source = np.searchsorted(start, i, side="right") - 1
            dest = _partner(source, rules[i], arguments[i], strides[i], groups[i])
            level = _level(rules[i], hosts[source], hosts[dest])
            latency, gap, per_byte, eager = (
                levels[level, 0],
                levels[level, 2],
                levels[level, 3],
                levels[level, 5],
            )
            hindered = levels[level, 6] * max(0.0, min(amounts[i], backs[i]) - eager)
            spent = per_byte * amounts[i] + hindered
            long = max(gap, spent)
            if not arrives:
                link = hosts[source] if level else source
                begin = max(time, outgoing[level, link])
                outgoing[level, link] = begin + long
                if level:
                    host_bytes[link] += amounts[i]
                _push(times, codes, count, begin + latency, ranks + total + message)
                count += 1
                continue
            link = hosts[dest] if level else dest
            begin = max(time, incoming[level, link])
            incoming[level, link] = begin + long
            end = begin + spent
            there = slots[dest] + match[i]
            done[there] = end
            if len(arrived):
                arrived[message] = end
            if blocked[dest] == there:
                blocked[dest] = -1
                _push(times, codes, count, max(end, clock[dest]), dest)
                count += 1
            if amounts[i] > eager:
                done[message] = end
                if blocked[source] == message:
                    blocked[source] = -1
                    _push(times, codes, count, max(end, clock[source]), source)
                    count += 1
            continue
        rank = code
        now = max(clock[rank], time)
        i = at[rank]
        while True:
            if i == stop[rank]:
                ended[rank] = now
                left -= 1
                break
            if count > 0 and now > times[0]:  # others come first
                _push(times, codes, count, now, rank)
                count += 1
                break
            times, codes = _with_room(times, codes, count)
            kind = kinds[i]
            if kind == COMPUTE:
                work = arguments[i]
                spent = rates[work, 0] + rates[work, 1] * amounts[i]
                computed[rank, work] += spent
                now += spent
            elif kind in (SEND, RECEIVE):
                other = _partner(rank, rules[i], arguments[i], strides[i], groups[i])
                level = _level(rules[i], hosts[rank], hosts[other])
                latency, overhead, per_byte, eager = (
                    levels[level, 0],
                    levels[level, 1],
                    levels[level, 4],
                    levels[level, 5],
                )
                here, there = slots[rank] + slot[i], slots[other] + match[i]
                meets = amounts[i] > eager
                if kind == SEND:
                    spent = overhead + per_byte * amounts[i]
                    overheads[rank] += spent
                    now += spent
                    if len(sent):
                        sent[here] = now
                    if not meets:
                        done[here] = now
                        _push(times, codes, count, now, ranks + here)
                        count += 1
                    elif done[there] <= -1:
                        ready = max(now + latency, -1 - done[there]) + latency
                        _push(times, codes, count, ready, ranks + here)
                        count += 1
                    else:
                        done[here] = -1 - now
                elif not done[here] >= 0:
                    if meets and done[there] <= -1:
                        ready = max(-1 - done[there] + latency, now) + latency
                        _push(times, codes, count, ready, ranks + there)
                        count += 1
                    done[here] = -1 - now
            else:
                if cursor[rank] < 0:
                    cursor[rank] = first[i]
                    entered[rank] = now
                while cursor[rank] < first[i + 1]:
                    here = slots[rank] + slot[waits[cursor[rank]]]
                    if not done[here] >= 0:
                        blocked[rank] = here
                        break
                    cursor[rank] += 1
                if blocked[rank] >= 0:
                    break
                # all are complete; the processor took them in the order in which they came
                several = first[i + 1] - first[i]
                for n in range(several):
                    j = waits[first[i] + n]
                    spent = 0.0
                    if kinds[j] == RECEIVE:
                        other = _partner(rank, rules[j], arguments[j], strides[j], groups[j])
                        level = _level(rules[j], hosts[rank], hosts[other])
                        spent = levels[level, 1] + levels[level, 4] * amounts[j]
                    end, m = done[slots[rank] + slot[j]], n
                    while m > 0 and came[m - 1] > end:
                        came[m], spends[m] = came[m - 1], spends[m - 1]
                        m -= 1
                    came[m], spends[m] = end, spent
                now = entered[rank]
                for n in range(several):
                    now = max(now, came[n]) + spends[n]
                    overheads[rank] += spends[n]
                cursor[rank] = -1
            i += 1
        at[rank], clock[rank] = i, now
    return left
