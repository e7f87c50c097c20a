"""What follows the kernels of a step through peer memory: every row of the table, and what their words mean."""

from __future__ import annotations

import pytest

from collectives.cuda.layouts import (
    ABORTED,
    BAD_REGIONS,
    BAD_SELECTION,
    BAD_SUMS,
    BAD_THRESHOLD,
    NOT_FINITE,
    PROCEED,
    SHORT_BIT,
    SKEWED,
)
from oktopk.cuda.p2p_outcome import Action, Outcome, could_be_deferred, next_action, packing_of

K = 100
STOPS = range(ABORTED + 1)


def outcome(stop: int, total: int = K, few: bool = False, counts: tuple[int, ...] = (3, 0, 5)) -> Outcome:
    return Outcome(stop, 0, 1, total, few, counts)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("stop", STOPS)
def test_a_deferred_step_is_applied_flagged_or_given_up(stop: int, exact: bool) -> None:
    known = {PROCEED: Action.APPLY, NOT_FINITE: Action.FLAG, BAD_SUMS: Action.FLAG, ABORTED: Action.RAISE}
    assert next_action(outcome(stop), exact=exact, deferred=True) is known.get(stop, Action.GIVE_UP)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("stop", "action"),
    [
        (PROCEED, Action.APPLY),
        (BAD_SELECTION, Action.LAUNCH_AGAIN),
        (SKEWED, Action.GATHER),
        (NOT_FINITE, Action.FLAG),
        (BAD_REGIONS, Action.EXCHANGE),
        (BAD_SUMS, Action.FLAG),
        (ABORTED, Action.RAISE),
    ],
)
def test_a_step_that_is_waited_for_goes_on(stop: int, action: Action, exact: bool) -> None:
    assert next_action(outcome(stop), exact=exact, deferred=False) is action


def test_a_threshold_that_missed_is_made_exact_once() -> None:
    assert next_action(outcome(BAD_THRESHOLD), exact=False, deferred=False) is Action.GO_EXACT
    assert next_action(outcome(BAD_THRESHOLD), exact=True, deferred=False) is Action.GATHER


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize(("total", "enough"), [(49, False), (50, True), (125, True), (126, False)])
def test_a_step_is_trusted_where_a_deferred_one_had_been_applied(stop: int, total: int, enough: bool) -> None:
    applied = stop == PROCEED or (stop == BAD_THRESHOLD and enough)
    assert could_be_deferred(outcome(stop, total), K) == applied
    assert not could_be_deferred(outcome(stop, total, few=True), K)


def test_only_elements_name_ranks_that_are_not_finite() -> None:
    assert outcome(NOT_FINITE).flagged == [0, 2]
    assert outcome(BAD_SUMS).flagged == []


def test_words_are_read_in_the_order_in_which_kernels_post_them() -> None:
    assert Outcome.read([SKEWED, 7, 8, 9, 1, 10, 11]) == Outcome(SKEWED, 7, 8, 9, True, [10, 11])
    packing = packing_of([40 | 1 << SHORT_BIT, 2, 0, 10, 20, 40, 50, 77, 100, 200], 3)
    assert (packing.nnz, packing.nonfinite, packing.candidates, packing.cut_bits) == (40, 2, 50, 77)
    assert (packing.offsets, packing.splits.tolist()) == ([0, 10, 20, 40], [100, 200])
    assert packing_of([5, 0, 0, 5, 0, 0], 1).splits.tolist() == []
