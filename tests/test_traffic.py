"""The formulas that counted traffic is held against, from numbers worked out by hand."""

from __future__ import annotations

import pytest

from collectives.traffic import Traffic, dense_words, lower_bound, step_limit, upper_bound


@pytest.mark.parametrize(
    ("ranks", "lower", "upper", "limit"),
    [(1, 0, 0, 0), (2, 100, 300, 375), (4, 150, 450, 562.5), (5, 160, 480, 600)],
)
def test_bounds_for_a_hundred_entries(ranks: int, lower: float, upper: float, limit: float) -> None:
    assert lower_bound(100, ranks) == pytest.approx(lower)
    assert upper_bound(100, ranks) == pytest.approx(upper)
    assert step_limit(100, ranks) == pytest.approx(limit)


@pytest.mark.parametrize(
    ("ranks", "words"),
    # P = 3: ranks send 5/2, 1 and 1 vectors. P = 5: the pair sends 2 + 3/2 + 3/2 and 1, three others 3/2 each.
    # P = 6: two pairs at 5/2 beside 4 x 3/2. P = 7: three pairs.
    [(1, 0), (2, 1), (3, 4.5 / 3), (4, 1.5), (5, 8.5 / 5), (6, 11 / 6), (7, 13.5 / 7), (8, 1.75)],
)
def test_dense_words_per_element(ranks: int, words: float) -> None:
    assert dense_words(1000, ranks) == pytest.approx(1000 * words)


def test_traffic_adds_field_by_field_and_leaves_its_terms_alone() -> None:
    first, second = Traffic(1, 2, 3, 4), Traffic(50, 60, 70, 80)
    assert first + second == Traffic(51, 62, 73, 84)
    assert (first, second) == (Traffic(1, 2, 3, 4), Traffic(50, 60, 70, 80))


def test_fresh_counters_are_zero() -> None:
    assert Traffic() == Traffic(words=0, messages=0, control_words=0, control_messages=0)
