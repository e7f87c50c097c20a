"""Rows that ranks touch of a table: how they are drawn, and what a sum of them sends, counted without ranks."""

from __future__ import annotations

import numpy as np
import pytest

from jobs.bench.gradients import SKEWS, RowSource
from tests.jobs.bench.row_volume import row_volume, volume_table


@pytest.mark.parametrize("skew", SKEWS)
def test_bytes_are_those_of_own_rows_and_sums_up_to_64_ranks(skew: str) -> None:
    for ranks in (2, 3, 4, 5, 6, 8, 16, 32, 64):
        counted = row_volume(RowSource(skew, 20_000, 2000, seed=1), 20_000, ranks)
        assert counted["mean"] <= 1.05, counted
        assert counted["busiest"] <= 1.3, counted


def test_the_table_of_volumes_has_a_line_for_each_skew_and_number() -> None:
    assert len(volume_table(50, 9, (2, 3)).splitlines()) == 2 + 2 * len(SKEWS)


def test_drawn_rows_lie_in_the_table_and_low_ones_come_more_often_by_zipf() -> None:
    for skew in SKEWS:
        rows = RowSource(skew, 1000, 5000, seed=3).draw(2, 7)
        assert rows.min() >= 0 and rows.max() < 1000
        assert np.array_equal(rows, RowSource(skew, 1000, 5000, seed=3).draw(2, 7))
        assert ((rows == 0).sum() > 500) == (skew == "zipf")  # 1/H(1000) = 13 % of them
