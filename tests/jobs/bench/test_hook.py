"""The table of communication hooks."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi4py import MPI

from jobs.bench.arguments import parse
from jobs.bench.document import BenchError, read
from jobs.bench.hook import Contestant, measure_hooks
from jobs.bench.job import run
from jobs.bench.tables import document_tables

SHORT = [
    "--table",
    "hook",
    "--length",
    "3000",
    "--steps",
    "9",
    "--warmup",
    "3",
    "--set",
    "threshold_interval=8",
]

pytestmark = pytest.mark.mpi


def test_a_step_with_each_hook_and_without_communication(comm: MPI.Intracomm, tmp_path: Path) -> None:
    path = Path(comm.bcast(str(tmp_path / "hook.json")))
    options = parse([*SHORT, "--json", str(path), "--quiet"], launched=True)
    assert run(options, comm) == 0
    content = comm.bcast(read(path) if comm.rank == 0 else None)
    assert content["kind"] == "hook table"
    assert "oktopk-mpi" in document_tables(content)
    (entry,) = content["runs"]
    assert list(entry["left_out"]) == ["bf16"]
    methods = {method["name"]: method for method in entry["methods"]}
    assert list(methods) == ["compute", "ddp", "powersgd", "oktopk", "oktopk-mpi"]
    for method in methods.values():
        assert len(method["series"]) == 9
        assert min(method["series"]) > 0
    assert [method["carrier"] for method in entry["methods"][3:]] == ["gloo", "MPI"]
    n, ranks = entry["length"], comm.size
    assert methods["ddp"]["bytes"] == pytest.approx(8 * n * (ranks - 1) / ranks, abs=4)
    assert (methods["oktopk"]["bytes"] > 0) == (ranks > 1)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_end_with_different_parameters_are_refused(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Contestant, "digest", lambda one: f"{one.name} {one.name == 'ddp' and comm.rank}")
    with pytest.raises(BenchError, match="different parameters: ddp$"):
        measure_hooks(parse([*SHORT, "--quiet"], launched=True), comm)
