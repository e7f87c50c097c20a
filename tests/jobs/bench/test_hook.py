"""The script of communication hooks beside docs/results/hook.md."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from jobs.bench.document import BenchError, read
from jobs.bench.options import parse
from jobs.bench.tables import document_tables

SHORT = ["--length", "3000", "--steps", "9", "--warmup", "3", "--set", "threshold_interval=8", "--quiet"]
hook: Any = importlib.import_module("docs.results.hook")  # a script without types
RESULTS = Path(hook.__file__).parent


@pytest.mark.mpi
def test_a_step_with_each_hook_and_without_communication(comm: MPI.Intracomm, tmp_path: Path) -> None:
    path = comm.bcast(str(tmp_path / "hook.json"))
    assert hook.main([*SHORT, "--json", path], comm=comm) == 0
    content = comm.bcast(read(path) if comm.rank == 0 else None)
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
    monkeypatch.setattr(hook.Contestant, "digest", lambda one: f"{one.name == 'ddp' and comm.rank}")
    with pytest.raises(BenchError, match="different parameters: ddp$"):
        hook.measure_hooks(parse(SHORT), comm)


@pytest.mark.pictures
def test_the_picture_of_the_page_is_drawn_from_its_documents(tmp_path: Path) -> None:
    files = [str(RESULTS / f"hook-{name}.json") for name in ("1gbit", "4")]
    assert hook.main(["--draw", str(tmp_path / "hook.svg"), *files]) == 0
    assert (tmp_path / "hook.svg").read_bytes() == (RESULTS / "hook.svg").read_bytes()
