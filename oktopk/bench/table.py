"""What was measured, as text of at most 100 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oktopk.plan.table import paragraph

_HINDERED = 0.1
"""Of the time of a byte: what it takes longer where two send to each other, above which the table says so."""


def size_of(nbytes: float) -> str:
    """Bytes as nccl-tests shows them, with the unit."""
    for unit in ("B", "KB", "MB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.0f} GB"


def links_table(title: str, level: dict[str, Any] | None) -> str:
    """The sizes of a level: size, time, algbw, busbw."""
    if level is None:
        return ""
    model = level["model"]
    text = (
        f"{title}: latency {1e6 * level['latency']:.1f} us, {1e6 * model['o']:.1f} us to send a "
        f"message, {1e-9 / model['G']:.3f} GB/s"
    )
    if model["D"] > _HINDERED * model["G"]:
        text += f", {1e-9 / (model['G'] + model['D']):.3f} where two send each other long messages"
    lines = [
        paragraph(text + ". Both directions busy:"),
        f"{'size':>10} {'time us':>12} {'algbw GB/s':>12} {'busbw GB/s':>12}",
    ]
    for row in level["sizes"]:
        rates = f"{row['algbw']:>12.4f} {row['busbw']:>12.4f}"
        lines.append(f"{size_of(row['bytes']):>10} {1e6 * row['seconds']:>12.1f} {rates}")
    return "\n".join(lines)


def pairs_table(pairs: Sequence[dict[str, Any]], slow: Sequence[tuple[str, str]]) -> str:
    """The fastest and the slowest pair of hosts, and those that are slow."""
    if not pairs:
        return ""
    by_rate = sorted(pairs, key=lambda pair: pair["bytes_per_second"])
    lines = [f"{len(pairs)} pairs of hosts, in rounds:"]
    for what, pair in (("slowest", by_rate[0]), ("fastest", by_rate[-1])):
        lines.append(
            f"  {what}: {' - '.join(pair['hosts'])}, {pair['bytes_per_second'] / 1e9:.4f} GB/s, "
            f"{1e6 * pair['latency']:.1f} us"
        )
    for one, other in slow:
        lines.append(f"  SLOW: {one} - {other} carries less than half of the others' median")
    return "\n".join(paragraph(line) for line in lines)


_STEP = "{:<16} {:>8} {:<8} {:<5} {:>12} {:>10} {:>9} {:>8}"


def steps_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each method."""
    if not rows:
        return ""
    heads = "step", "density", "wire", "level", "n", "time ms", "MB/rank", "select"
    lines = [_STEP.format(*heads)]
    for row in rows:
        select = row["parts"].get("select")
        lines.append(
            _STEP.format(
                row["method"],
                "-" if row["density"] == 1 else f"{100 * row['density']:g} %",
                row["wire"],
                row["levels"],
                f"{row['length']:,}",
                f"{1e3 * row['seconds']:.2f}",
                f"{row['bytes'] / 1e6:.3f}",
                "-" if select is None else f"{1e3 * select:.2f}",
            )
        )
    return "\n".join(lines)
