"""How far the kernels of a step came, and what is to be done about it: one table."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from collectives.cuda.layouts import (
    BAD_REGIONS,
    BAD_SELECTION,
    BAD_SUMS,
    BAD_THRESHOLD,
    DECISION_WORDS,
    FEW_BIT,
    NOT_FINITE,
    PROCEED,
    SHORT_BIT,
    SKEWED,
)
from oktopk.cpu.kernels import Packing
from oktopk.thresholds import keeps_enough

STOPPED_BEFORE_SUMS = frozenset((BAD_SELECTION, NOT_FINITE, BAD_REGIONS))
"""Stops after which no rank has read a selected entry."""


def packing_of(words: list[int], ranks: int) -> Packing:
    """What the kernels of this rank selected, from the words that `put_selected` of p2p.cuh posts."""
    nnz, nonfinite, *rest = words
    offsets, (candidates, bits, *splits) = rest[: ranks + 1], rest[ranks + 1 :]
    nnz, nonfinite = nnz % (1 << SHORT_BIT), nonfinite % (1 << FEW_BIT)
    return Packing(nnz, nonfinite, offsets, np.array(splits, np.int64), candidates, bits)


class Outcome(NamedTuple):
    """What all ranks decided alike, see `Decision` of `collectives.cuda.layouts`.

    Attributes:
        stop: why the kernels stopped; PROCEED where they ended the step.
        nearest: the candidate threshold whose count is nearest k.
        bits: the global threshold.
        total: entries applied; after BAD_THRESHOLD those that reach the nearest candidate.
        few: some rank selected fewer than k/2 and not all that is not zero: it may know no good threshold.
        counts: sums that each rank keeps; after NOT_FINITE its elements that are not finite, after ABORTED why it is behind that.
    """

    stop: int
    nearest: int
    bits: int
    total: int
    few: bool
    counts: Sequence[int]

    @classmethod
    def read(cls, words: list[int]) -> Outcome:
        """From the words that `post_decision` of p2p.cuh posts."""
        stop, nearest, bits, total, few = words[:DECISION_WORDS]
        return cls(stop, nearest, bits, total, bool(few), words[DECISION_WORDS:])

    @property
    def flagged(self) -> list[int]:
        """The ranks whose elements are not finite; empty where only the sum over the ranks is not."""
        return [rank for rank, bad in enumerate(self.counts) if bad] if self.stop == NOT_FINITE else []


class Action(Enum):
    """What the hosts of all ranks do after the kernels of a step."""

    APPLY = auto()
    """Nothing: the kernels ended the step."""
    LAUNCH_AGAIN = auto()
    """Make selections right that were too long or too short, and launch what follows the selection."""
    GO_EXACT = auto()
    """Launch what computes the exact global threshold."""
    GATHER = auto()
    """Sum the lists of the regions, keep and gather over messages."""
    EXCHANGE = auto()
    """Exchange the selections over messages."""
    FLAG = auto()
    """Apply nothing: a gradient or a sum is not finite."""
    GIVE_UP = auto()
    """Apply nothing: the gradient stays in the residual."""


_ACTIONS = {
    # stop: of a step that is waited for, of one that has computed the exact global threshold, of a deferred one
    PROCEED: (Action.APPLY, Action.APPLY, Action.APPLY),
    BAD_SELECTION: (Action.LAUNCH_AGAIN, Action.LAUNCH_AGAIN, Action.GIVE_UP),
    BAD_REGIONS: (Action.EXCHANGE, Action.EXCHANGE, Action.GIVE_UP),
    BAD_THRESHOLD: (Action.GO_EXACT, Action.GATHER, Action.GIVE_UP),
    SKEWED: (Action.GATHER, Action.GATHER, Action.GIVE_UP),
    NOT_FINITE: (Action.FLAG, Action.FLAG, Action.FLAG),
    BAD_SUMS: (Action.FLAG, Action.FLAG, Action.FLAG),
}


def next_action(outcome: Outcome, *, exact: bool, deferred: bool) -> Action:
    """What follows the kernels of a step; the same on all ranks.

    Args:
        exact: they were to compute the exact global threshold.
        deferred: no host helps this step.
    """
    return _ACTIONS[outcome.stop][2 if deferred else int(exact)]


def could_be_deferred(outcome: Outcome, k: int) -> bool:
    """Whether a deferred step with this outcome had been applied, and the next one knows good thresholds on all ranks.

    Args:
        outcome: of the first launch of a step that was applied in the end.
    """
    applies = outcome.stop == PROCEED or (outcome.stop == BAD_THRESHOLD and keeps_enough(outcome.total, k))
    return applies and not outcome.few
