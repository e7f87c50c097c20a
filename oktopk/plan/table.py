"""A plan as text of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from oktopk.plan.rows import Row

WIDTH = 100
_HEADS = (
    ("method", 6),
    ("density", 7),
    ("wire", 8),
    ("level", 5),
    ("every", 5),
    ("step ms", 7),
    ("gain", 4),
    ("select", 6),
    ("exchange", 8),
    ("wait", 5),
    ("hides", 5),
    ("MB/host", 7),
    ("GB", 4),
)
_LEFT = 4  # columns of text


def number(value: float, width: int) -> str:
    """A number in at most so many characters, with three digits where there is room."""
    for digits in (2, 1, 0):
        text = f"{value:.{digits}f}"
        if len(text) <= width:
            return text
    return f"{value:.0e}".replace("e+0", "e")


def table(rows: Sequence[Row], dense: float) -> str:
    """Rows, a line each, under their heads; times in ms.

    Args:
        dense: seconds of the faster dense step, which `gain` is of.
    """
    lines = [" ".join(_pad(head, width, i) for i, (head, width) in enumerate(_HEADS)) + " loss"]
    for row in rows:
        cells: list[str] = [
            "grid" if row.grid else row.method,
            f"{100 * row.density:g} %" if row.method != "dense" else "-",
            row.wire,
            row.levels,
            str(row.every),
        ]
        figures = (
            1e3 * row.seconds,
            dense / row.seconds,
            *(1e3 * part for part in (row.select, row.exchange, row.wait, row.hides)),
            row.host_bytes / 1e6,
            row.memory / 1e9,
        )
        widths = [width for _, width in _HEADS[len(cells) :]]
        cells += [number(figure, width) for figure, width in zip(figures, widths, strict=True)]
        padded = [_pad(cell, _HEADS[i][1], i) for i, cell in enumerate(cells)]
        lines.append(" ".join(padded) + f" {row.loss}")
    return "\n".join(line.rstrip() for line in lines)


def _pad(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column < _LEFT else cell.rjust(width)


def paragraph(text: str) -> str:
    """Text in lines of at most WIDTH columns."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
