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


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--methods", "dense"], "--methods is not for the table of hooks"),
        (["--table=gpu"], "--table=gpu is not for the table of hooks"),
        (["--length", "20,30"], "--length: the table of hooks takes one"),
        (["--density", "2"], "density 2.0 is not in (0, 0.25]"),
        (["--draw", "x.svg"], "takes documents of the table of hooks"),
        (["--draw", "x.svg", "nowhere.json"], "nowhere.json cannot be read"),
        (["--draw", "x.svg", str(RESULTS / "gpu-4xh200.json")], "takes documents of the table of hooks"),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else "",
)
def test_what_it_does_not_take_is_refused(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hook.main(words) == 2
    assert answer in capsys.readouterr().err


@pytest.mark.pictures
@pytest.mark.parametrize("name", ["nowhere/h.svg", "h.foo"])
def test_a_picture_that_cannot_be_written_is_named(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hook.main(["--draw", str(tmp_path / name), str(RESULTS / "hook-4.json")]) == 2
    assert f"docs.results.hook: {tmp_path / name} cannot be written: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_bars_say_where_links_were_unshaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = read(RESULTS / "hook-1gbit.json")
    document["runs"][0]["network"] = "4 hosts, TCP over unshaped links"
    labels: list[str] = []

    def write(figure: Any, axes: Any, *_: Any) -> None:
        labels.extend(label.get_text() for label in axes.get_yticklabels())

    monkeypatch.setattr(hook, "write", write)
    hook.draw([document], tmp_path / "h.svg")
    assert labels and all(label.endswith(", unshaped links") for label in labels)


@pytest.mark.pictures
def test_the_picture_of_the_page_is_drawn_from_its_documents(tmp_path: Path) -> None:
    files = [str(RESULTS / f"hook-{name}.json") for name in ("1gbit", "4")]
    assert hook.main(["--draw", str(tmp_path / "hook.svg"), *files]) == 0
    assert (tmp_path / "hook.svg").read_bytes() == (RESULTS / "hook.svg").read_bytes()
