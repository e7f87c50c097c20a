"""A table: columns of records, for a terminal, in Markdown and, by the page's template, in HTML; CSV files."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tabulate import tabulate

from data.durable import replaced

MISSING = "–"
LEFT_RIGHT = ("left", "right")


class Record(Protocol):
    """A mapping, or what gives its figures as one does."""

    def get(self, name: str, /) -> Any: ...


Form = str | Callable[[Any], str]
"""How a figure is written: a format string such as "{:,.0f}", or a function."""


@dataclass(frozen=True)
class Cell:
    """One cell of a table: a text, a smaller one below, and perhaps a swatch of colour; strong: its row is bold."""

    text: str
    small: str = ""
    colour: str = ""
    wrap: bool = False
    strong: bool = False

    def __str__(self) -> str:
        return f"{self.text} ({self.small})" if self.small else self.text


class Column(NamedTuple):
    """A column of a table: its head, the cell of a record, and what stands small below the head."""

    head: str
    cell: Callable[[Any], Cell | str]
    small: str = ""


@dataclass(frozen=True)
class Table:
    """A table; the first cell of each row names it.

    Attributes:
        title: its heading; the text below the table is `note`.
        align: "left" or "right", of the first column and of the others.
    """

    title: str
    heads: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    align: tuple[str, str] = LEFT_RIGHT

    def terminal(self) -> str:
        """A line for each row."""
        heads, *rows = self._texts()
        return self._tabulated(rows, heads, "simple")

    def turned(self) -> str:
        """For a terminal, under the title: a column for each row."""
        heads, *rows = zip(*self._texts(), strict=True)
        return f"{self.title}\n\n{self._tabulated(rows, heads, 'simple')}\n"

    def markdown(self) -> str:
        """For a Markdown file."""
        heads, *rows = [[text.replace("|", "\\|") for text in line] for line in self._texts()]
        return self._tabulated(rows, heads, "pipe")

    def _texts(self) -> list[list[str]]:
        return [[str(cell) for cell in line] for line in (self.heads, *self.rows)]

    def _tabulated(self, rows: Sequence[Sequence[str]], heads: Sequence[str], form: str) -> str:
        first, others = self.align
        align = (first, *(others for _ in heads[1:]))
        return str(tabulate(rows, heads, tablefmt=form, colalign=align, disable_numparse=True))


def table(
    columns: Sequence[Column],
    records: Iterable[Any],
    title: str = "",
    note: str = "",
    *,
    align: tuple[str, str] = LEFT_RIGHT,
    strong: Callable[[Any], bool] = lambda record: False,
) -> Table:
    """A row for each record; strong: whether that of a record is bold."""
    rows = []
    for record in records:
        cells = [column.cell(record) for column in columns]
        name, *rest = [Cell(cell) if isinstance(cell, str) else cell for cell in cells]
        rows.append([replace(name, strong=strong(record)), *rest])
    return Table(title, [Cell(column.head, column.small) for column in columns], rows, note, align)


Block = str | Table
"""A part of a text: a paragraph, or a table."""


def text(blocks: Iterable[Block]) -> str:
    """The blocks that are not empty, for a terminal, an empty line between them."""
    each = (block if isinstance(block, str) else block.terminal() for block in blocks)
    return "\n\n".join(filter(None, each))


def at(record: Record | None, path: str) -> Any:
    """The value at a path such as "seconds.all.mean"; None where a part of it is missing."""
    value: Any = record
    for name in path.split("."):
        value = value.get(name) if hasattr(value, "get") else None
    return value


def shown(value: Any, form: Form = "{:,.0f}", scale: float = 1.0, missing: str = MISSING) -> str:
    """A figure that may be missing, times `scale`."""
    if value is None:
        return missing
    scaled = value if scale == 1.0 else scale * value
    return form.format(scaled) if isinstance(form, str) else form(scaled)


def figure(
    path: str, form: Form = "{:,.0f}", scale: float = 1.0, missing: str = MISSING
) -> Callable[[Record], str]:
    """Cells of a figure, in another unit if need be."""
    return lambda record: shown(at(record, path), form, scale, missing)


def beside(first: Callable[[Record], str], small: Callable[[Record], str]) -> Callable[[Record], Cell]:
    """Cells of two figures, the second one small."""
    return lambda record: Cell(first(record), small(record))


def ratio(above: float | None, below: float | None) -> float | None:
    """Their quotient, None where one is missing."""
    return None if above is None or below is None else above / below


def over(above: str, below: str, form: Form = "{:.2f}") -> Callable[[Record], str]:
    """Cells of the quotient of two figures of a record, by their paths."""
    return lambda record: shown(ratio(at(record, above), at(record, below)), form)


def milliseconds(seconds: float) -> str:
    """A duration in milliseconds, without the unit."""
    return f"{seconds * 1e3:.2f}" if seconds < 0.1 else f"{seconds * 1e3:.1f}"


def write_columns(path: Path, columns: Mapping[str, Any]) -> None:
    """Write a CSV file, as long as the shortest column: a run that was killed may have a step whose stages are missing."""
    lists = [column.tolist() if hasattr(column, "tolist") else column for column in columns.values()]
    with replaced(path) as draft, open(draft, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*lists, strict=False))


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a CSV file of rows that need not have the same columns."""
    names = dict.fromkeys(name for row in rows for name in row)
    write_columns(path, {name: [row.get(name, "") for row in rows] for name in names})
