"""The bench's steps on several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from collectives.connect import connect
from oktopk.bench import steps
from oktopk.bench.__main__ import main
from oktopk.bench.steps import gradients, kernels, step_row
from oktopk.replay.links import read
from oktopk.replay.valueless import WORK

CODED = {f"code {wire}" for wire in ("bfloat16", "int8", "int4")}
pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are timed on fewer elements."""
    monkeypatch.setattr(steps, "_KERNELS_LENGTH", 1 << 18)


def test_the_bench_measures_links_kernels_and_steps(
    comm: MPI.Intracomm, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(comm.bcast(str(tmp_path_factory.mktemp("bench") / "links.json")))
    words = ["--length", "50000", "--ranks-per-host", "1", "--seconds", "0.4", "--wire", "int4"]
    assert main(["--json", str(path), *words]) == 0
    shown = capsys.readouterr().out
    assert bool(shown) == (comm.rank == 0)
    assert all(len(line) <= 100 for line in shown.splitlines())
    comm.Barrier()
    links = read(path)
    assert len(links.hosts) == comm.size and links.kernels is not None
    assert {*links.kernels.times} == {*WORK, *CODED} - {"peer"}
    assert all(each > 0 for _, each in links.kernels.times.values())
    rows = json.loads(path.read_text(encoding="utf-8"))["steps"]
    assert [row["method"] for row in rows] == ["MPI allreduce", "dense", "oktopk", "union"]
    assert [row["wire"] for row in rows[2:]] == ["int4", "int4"]
    dense, sparse = rows[1]["bytes"], rows[2]["bytes"]
    assert (
        dense == pytest.approx(8 * 50000 * (comm.size - 1) / comm.size, rel=0.5) and 0 < sparse < dense / 10
    )
    # a row is collective: every rank has the same times
    assert len({*comm.allgather(json.dumps([row["seconds"] for row in rows]))}) == 1


def test_a_row_has_the_stages_of_the_slowest_rank(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal on all ranks: all wait for the last one, whose selection takes a second longer here."""
    last, taken = comm.size - 1, steps.GradientAllreduce.step

    def step(reducer: Any, gradient: Any) -> Any:
        report = taken(reducer, gradient)
        report.seconds["select"] += comm.rank == last
        return report

    monkeypatch.setattr(steps.GradientAllreduce, "step", step)
    transport = connect(comm)
    row = step_row(transport, 50_000, "oktopk", gradients(50_000, comm.rank), density=0.05)
    transport.close()
    assert 1 <= row["slowest"]["select"] < 2
    assert (row["parts"]["select"] >= 1) == (comm.rank == last)
    assert len({*comm.allgather(json.dumps(row["slowest"]))}) == 1


@pytest.mark.mpi(min_size=4)
@pytest.mark.also(ranks=8)
def test_elements_of_other_ranks_are_measured_where_hosts_have_several(comm: MPI.Intracomm) -> None:
    if comm.size % 2:
        pytest.skip("hosts of two ranks")
    transport = connect(comm)
    transport.group_by_host(2)
    found = kernels(transport, 2)
    transport.close()
    assert {*found} == {*WORK, *CODED} and found["peer"][1] > 0


def test_a_document_that_cannot_be_written_is_refused_on_every_rank(
    comm: MPI.Intracomm, capsys: pytest.CaptureFixture[str]
) -> None:
    words: list[Any] = ["--no-steps", "--seconds", "0.1", "--json", "/nowhere/links.json"]
    assert main(words) == 2
    problem = "oktopk-bench: /nowhere/links.json cannot be written: there is no folder /nowhere\n"
    assert capsys.readouterr().err == (problem if comm.rank == 0 else "")


def test_a_density_that_is_none_is_refused_on_every_rank(
    comm: MPI.Intracomm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--seconds", "0.1", "--length", "1000", "--density", "2"]) == 2
    assert ("density 2.0 is not in (0, 1]" in capsys.readouterr().err) == (comm.rank == 0)
