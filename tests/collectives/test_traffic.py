"""The formulas that counted traffic is held against, from numbers worked out by hand."""

from __future__ import annotations

import pytest

from collectives.dense_allreduce import dense_words
from collectives.traffic import Traffic, lower_bound, step_limit, upper_bound


@pytest.mark.parametrize(
    ("ranks", "lower", "upper", "limit"),
    [(1, 0, 0, 0), (2, 100, 300, 375), (4, 150, 450, 562.5), (5, 160, 480, 600)],
)
def test_bounds_for_a_hundred_entries(ranks: int, lower: float, upper: float, limit: float) -> None:
    assert (upper_bound(100, 4, "grid"), step_limit(100, 4, "grid")) == (600, 750)
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


def test_bytes_and_messages_add_up_and_words_round_up() -> None:
    traffic = Traffic()
    assert (traffic.words, traffic.control_words) == (0, 0)
    traffic.count(8)
    traffic.count(5, messages=3)
    traffic.count_control(12)
    traffic.count_control(2, messages=0)
    assert traffic == Traffic(bytes=13, messages=4, control_bytes=14, control_messages=1)
    assert (traffic.words, traffic.control_words) == (4, 4)
