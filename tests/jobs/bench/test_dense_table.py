"""Tables and the picture of dense allreduces, from published times."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi4py import MPI

from jobs.bench.dense_table import bandwidth, dense_charts
from jobs.bench.document import read
from jobs.bench.nccl import on_all

(RUN,) = read(Path(__file__).parents[3] / "docs" / "results" / "dense-2xh100.json")["runs"]
TYPES = ["float32", "bfloat16", "float16"]


def test_the_bandwidth_is_that_of_nccl_tests() -> None:
    cell = {"nbytes": 4 << 20, "times": {"oktopk, out": {"graph": 2e-5}}}
    assert bandwidth(cell, 4) == pytest.approx(1.5 * (4 << 20) / 2e-5)
    assert bandwidth(cell, 2) == pytest.approx((4 << 20) / 2e-5)
    for times in ({"oktopk, out": {"graph": None}}, {}):
        assert bandwidth({"nbytes": 4096, "times": times}, 2) is None


def test_the_picture_has_a_panel_a_type_and_a_line_a_contestant() -> None:
    charts = dense_charts(RUN)
    assert [chart.title for chart in charts] == TYPES
    lengths = [cell["nbytes"] for cell in RUN["cells"] if cell["type"] == "float32"]
    assert charts[0].lines[0].x.tolist() == lengths
    assert [len(chart.lines) for chart in charts] == [4, 4, 2]  # torch sums no float16


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
