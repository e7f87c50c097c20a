"""Columns, cells and figures of the bench's tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tabulate import tabulate

MISSING = "–"
Record = dict[str, Any]
Cell = Callable[[Record], str]
Column = tuple[str, Cell]
"""Its head, and the cell of a record."""


def columns_table(
    columns: Sequence[Column], records: Iterable[Record], form: str = "simple", align: str = "left"
) -> str:
    """A row for each record; form, align: as `table`."""
    rows = [[cell(record) for _, cell in columns] for record in records]
    return table(rows, [head for head, _ in columns], form, align)


def table(rows: list[list[str]], heads: list[str], form: str = "simple", align: str = "left") -> str:
    """A table in a format of tabulate's; align: of the first column, the others are aligned to the right."""
    aligned = (align, *("right" for _ in heads[1:]))
    return tabulate(rows, headers=heads, tablefmt=form, colalign=aligned, disable_numparse=True)


def at(record: Record | None, path: str) -> Any:
    """The value at a path such as "seconds.all.mean"; None where a part of it is missing."""
    found: Any = record
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def figure(path: str, form: str = "{:,.0f}", scale: float = 1.0) -> Cell:
    """Cells of a figure, in another unit if need be."""
    return lambda record: shown(at(record, path), form, scale)


def shown(value: Any, form: str = "{:,.0f}", scale: float = 1.0) -> str:
    """A figure that may be missing."""
    return MISSING if value is None else form.format(value if scale == 1.0 else scale * value)


def ratio(above: float | None, below: float | None) -> float | None:
    """Their quotient, None where one is missing."""
    return None if above is None or below is None else above / below


def over(above: str, below: str, form: str = "{:.2f}") -> Cell:
    """Cells of the quotient of two figures of a record, by their paths."""
    return lambda record: shown(ratio(at(record, above), at(record, below)), form)


def cell_title(run: Record) -> str:
    """Length, density and gradient type of a run, in a few words."""
    length = f"{run['length'] / 1e6:.1f} M" if run["length"] >= 1e6 else f"{run['length']:,}"
    return f"{length}, {100 * run['density']:g} %, {run['gradient_type']}"


def ordered(stages: Iterable[str]) -> list[str]:
    """Stages as they ran, then what was left of a step."""
    found = list(stages)
    last = [name for name in ("finish", "between") if name in found]
    return [*(name for name in found if name not in last), *last]


def not_held(transfer: Record, told: str) -> str:
    """A warning about a transfer that ran faster than the links' rate, in a sentence."""
    return (
        f"{transfer['bytes']:,} bytes after a pause ran at {transfer['share']:.2f} times {told}: "
        "part of them passed unshaped, and floors by that rate are too high"
    )
