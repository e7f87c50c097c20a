"""The script that counts what sums of rows send beside docs/results/rows.md: how rows are drawn, and what a sum sends."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

volume: Any = importlib.import_module("docs.results.rows.volume")


@pytest.mark.parametrize("skew", volume.SKEWS)
def test_bytes_are_those_of_own_rows_and_sums(skew: str) -> None:
    for ranks in (2, 3, 4, 5, 6, 8, 16, 32, 64):
        counted = volume.row_volume(volume.RowSource(skew, 20_000, 2000, seed=1), 20_000, ranks)
        assert counted["mean"] <= 1.05, counted
        assert counted["busiest"] <= 1.3, counted


def test_the_table_of_volumes_has_the_pages_heads() -> None:
    lines = volume.volume_table(50, 9, (2, 3)).splitlines()
    assert len(lines) == 2 + 2 * len(volume.SKEWS)
    page = (Path(volume.__file__).parent.parent / "rows.md").read_text(encoding="utf-8")
    assert lines[0].split() in [line.split() for line in page.splitlines()]


def test_drawn_rows_lie_in_the_table_low_ones_by_zipf() -> None:
    for skew in volume.SKEWS:
        rows = volume.RowSource(skew, 1000, 5000, seed=3).draw(2, 7)
        assert rows.min() >= 0 and rows.max() < 1000
        assert np.array_equal(rows, volume.RowSource(skew, 1000, 5000, seed=3).draw(2, 7))
        assert ((rows == 0).sum() > 500) == (skew == "zipf")  # 1/H(1000) = 13 % of them
