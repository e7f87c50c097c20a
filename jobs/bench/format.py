"""Formatting that the bench's tables share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tabulate import tabulate

MISSING = "–"


def table(rows: list[list[str]], headers: list[str], form: str = "simple") -> str:
    """A table in a format of tabulate's; the first column is aligned to the left, the others to the right."""
    align = ("left", *("right" for _ in headers[1:]))
    return tabulate(rows, headers=headers, tablefmt=form, colalign=align, disable_numparse=True)


def cell_title(run: dict[str, Any]) -> str:
    """Length, density and gradient type of a run, in a few words."""
    length = f"{run['length'] / 1e6:.1f} M" if run["length"] >= 1e6 else f"{run['length']:,}"
    return f"{length}, {100 * run['density']:g} %, {run['gradient_type']}"


def ordered(stages: Iterable[str]) -> list[str]:
    """Stages as they ran, then what was left of a step."""
    found = list(stages)
    last = [name for name in ("finish", "between") if name in found]
    return [*(name for name in found if name not in last), *last]
