"""Dense allreduces over peer memory: the error of a call that was aborted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collectives.cuda.dense_algorithms import ALGORITHMS
from collectives.cuda.layouts import DIFFERS, MISSING
from collectives.element_types import ELEMENT_TYPES
from collectives.errors import MissingRanksError
from collectives.symmetric_memory import abort_reasons

_BELOW = 39
"""Bits of a word of a call below the call's number, see `compares_calls` of dense.cuh."""


def last_calls(words: Sequence[int], rank: int) -> str:
    """What the ranks called last, as far as they have sent it to this one.

    Args:
        words: uint32[2 parities, P, 4], what they sent.
        rank: this one, whose own call is there, too.
    """
    slots = np.array(words, np.uint32).view(np.uint64).reshape(2, -1, 2)
    latest = slots[int(np.argmax(slots[:, rank, 0] >> np.uint64(_BELOW)))].tolist()
    number = latest[rank][0] >> _BELOW
    calls, scales = [], []
    for first, second in latest:
        if (first >> _BELOW, second >> _BELOW) != (number, number):
            calls.append("has not called")
            continue
        length, kind, algorithm = first & (1 << _BELOW) - 1, second >> 32 & 3, second >> 34 & 15
        calls.append(f"sums {length} elements of {tuple(ELEMENT_TYPES)[kind]} by {ALGORITHMS[algorithm]}")
        scales.append(float(np.uint32(second & 0xFFFFFFFF).view(np.float32)))
    if len(set(scales)) > 1:
        calls = [each if each == "has not called" else f"{each} times {scales.pop(0):.9g}" for each in calls]
    return ", ".join(f"rank {other} {call}" for other, call in enumerate(calls))


def abort_error(reasons: Sequence[int], words: Sequence[int], rank: int, timeout: float) -> RuntimeError:
    """Why no call can follow.

    Args:
        reasons: of `SymmetricMemory.reasons`.
        words, rank: as `last_calls`.
        timeout: seconds that ranks wait.
    """
    if DIFFERS in reasons:
        return RuntimeError(
            f"ranks disagree on a dense allreduce over peer memory: {last_calls(words, rank)}"
        )
    what = "a dense allreduce over peer memory was aborted"
    if missing := [other for other, reason in enumerate(reasons) if reason == MISSING]:
        return MissingRanksError(what, missing, timeout, "No other can follow.")
    return RuntimeError(f"{what}: {abort_reasons(reasons, timeout)}")
