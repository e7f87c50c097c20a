"""Tables and the picture of dense allreduces, from made-up times."""

from __future__ import annotations

from typing import Any

import pytest
from mpi4py import MPI

from jobs.bench.dense_table import bandwidth, dense_table, draw_dense, size
from jobs.bench.nccl import on_all


def times(graph: float | None) -> dict[str, float | None]:
    return {"graph": graph, "launched": 2e-5, "waited": 4e-5}


def run(kinds: tuple[str, ...] = ("float32", "bfloat16")) -> dict[str, Any]:
    cells = [
        {
            "type": kind,
            "nbytes": nbytes,
            "choice": choice,
            "times": {"oktopk, out": times(seconds), "nccl, in": times(None)},
        }
        for kind in kinds
        for nbytes, choice, seconds in ((4096, "one_shot", 5e-6), (4 << 20, "two_shot", 2e-5))
    ]
    cells[0]["times"]["torch-two-shot, in"] = times(7e-6)  # of no other length
    return {
        "ranks": 4, "device": "a GPU", "nccl": "2.28.9", "left_out": {"torch": "no symmetric memory"},
        "floors": {"copy": 3.5e11, "round_trip": 1.5e-6}, "cells": cells,
        "errors": {kind: {"oktopk, out": 1.5e-8} for kind in kinds},
    }  # fmt: skip


def test_a_row_has_microseconds_a_choice_and_the_bus_bandwidth() -> None:
    text = dense_table(run())
    lines = text.splitlines()
    assert lines[0] == "4 ranks, a GPU, NCCL 2.28.9"
    assert "without torch: no symmetric memory" in lines
    assert "a copy to the next GPU, while all copy: 350 GB/s" in lines
    assert "a flag to another GPU and back: 1.50 us" in lines
    rows = [line.split() for line in lines if line.lstrip().startswith(("4 KB", "4 MB"))]
    assert len(rows) == 2 * 3 * 2  # types, modes, lengths
    # 2 (P - 1) / P of 4 MB in 20 us
    assert rows[:2] == [
        ["4", "KB", "5.0", "–", "7.0", "one_shot", "1"],
        ["4", "MB", "20.0", "–", "–", "two_shot", "315"],
    ]
    assert rows[2] == ["4", "KB", "20.0", "20.0", "20.0", "one_shot"]
    assert "bfloat16, error against float64: oktopk, out 1.5e-08" in lines


def test_the_bandwidth_is_that_of_nccl_tests() -> None:
    cell = run()["cells"][1]
    assert bandwidth(cell, 4) == pytest.approx(1.5 * (4 << 20) / 2e-5)
    assert bandwidth(cell, 2) == pytest.approx((4 << 20) / 2e-5)
    assert bandwidth({"nbytes": 4096, "times": {"oktopk, out": times(None)}}, 2) is None
    assert bandwidth({"nbytes": 4096, "times": {}}, 2) is None


def test_sizes_are_powers_of_two() -> None:
    assert [size(nbytes) for nbytes in (4096, 1 << 19, 1 << 20, 256 << 20)] == [
        "4 KB",
        "512 KB",
        "1 MB",
        "256 MB",
    ]


@pytest.mark.parametrize("kinds", [("float32",), ("float32", "bfloat16")])
def test_the_picture_has_a_panel_a_type_and_a_line_a_contestant_with_times(kinds: tuple[str, ...]) -> None:
    figure = draw_dense(run(kinds))
    assert [axes.get_title() for axes in figure.axes] == list(kinds)
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert set(lines) == {"Ok-Topk", "torch, two shots"}  # none of NCCL in a graph
    assert list(lines["Ok-Topk"].get_xdata()) == [4096, 4 << 20]
    assert list(lines["Ok-Topk"].get_ydata()) == pytest.approx([5, 20])
    assert list(lines["torch, two shots"].get_xdata()) == [4096]


@pytest.mark.mpi
def test_what_one_rank_lacks_all_leave_out(comm: MPI.Intracomm) -> None:
    def attempt() -> dict[str, int]:
        if comm.rank == comm.size - 1:
            raise OSError("no such library\nand more")
        return {"window": 1}

    left_out: dict[str, str] = {}
    assert on_all(comm, "there", lambda: {"vector": 2}, left_out) == {"vector": 2}
    assert not left_out
    assert on_all(comm, "windows", attempt, left_out) == {}
    assert left_out == {"windows": f"rank {comm.size - 1}: no such library"}
