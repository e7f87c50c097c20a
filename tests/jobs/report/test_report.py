from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from jobs.report.__main__ import main
from jobs.report.summary import read_runs
from jobs.report.write import report
from jobs.run.columns import EVALUATION_COLUMNS, MEASURE_COLUMNS, STEP_COLUMNS
from jobs.run.file import RunFile, RunInfo
from jobs.watch import main as watch

RESULTS = Path(__file__).parents[3] / "docs" / "results"
LENGTH = 1000
K = 20
DENSE_WORDS = 1500.0  # 2n(P-1)/P on 4 ranks
SPARSE_WORDS = 60.0  # between 2k(P-1)/P = 30 and 6k(P-1)/P = 90


def write_run(
    path: Path,
    *,
    method: str = "oktopk",
    seed: int = 0,
    settings: dict[str, Any] | None = None,
    accuracy: float = 0.9,
    character_error_rate: float = math.nan,
    xi: tuple[float, ...] = (),
    balance: float | tuple[float, ...] = math.nan,
    steps: int = 50,
    ranks: int = 4,
    dense_steps: int = 0,
    status: str = "complete",
    batch: int = 16,
    time_stages: bool = False,
    cuda_graph: bool = False,
    held_out_loss: float = 0.5,
    positions: int = 0,
    stages: dict[str, NDArray[Any]] | None = None,
    **replaced: NDArray[Any],
) -> Path:
    """A run whose figures can be worked out by hand: constant but for the loss and the first step's time."""
    config = json.dumps(
        {
            "training": {"seed": seed, "batch_size": batch, **({"cuda_graph": True} if cuda_graph else {})},
            "reduction": {"method": method, **(settings or {})},
            "run": {"time_stages": time_stages},
            **({"model": {"positions": positions}, "data": {"name": "text"}} if positions else {}),
        }
    )
    info = RunInfo(
        config,
        '{"python": "3.11"}',
        method,
        ranks,
        LENGTH,
        K,
        batch,
        seed,
        "here",
        "0123456789abcdef",
        "2026-01-01T00:00:00+00:00",
        '{"cpu": "a processor", "cores": 2, "gpus": ["a GPU", "a GPU"]}',
        f"jobs.train {path.stem}.toml",
    )
    dense = (np.arange(steps) < dense_steps) | (method == "dense")
    words = np.where(dense, DENSE_WORDS, SPARSE_WORDS) * (ranks > 1)
    columns: dict[str, NDArray[Any]] = {name: np.zeros(steps) for name in STEP_COLUMNS}
    columns.update(
        step=np.arange(1, steps + 1),
        elapsed=np.arange(1, steps + 1) * 0.5,
        loss=2.0 * 0.9 ** np.arange(steps),
        words=words,
        words_busiest=words * 1.1,
        dense=dense,
        k=np.where(dense, LENGTH, K),
        global_nnz=np.where(dense, LENGTH, K * 1.25),
        seconds_forward=np.where(np.arange(steps) == 0, 9.0, 0.004),
        seconds_reduction=np.where(np.arange(steps) == 0, 9.0, 0.002),
    )
    columns.update(replaced)
    with RunFile(path, info) as file:
        if steps:
            file.append_steps(columns, stages or {"select": columns["seconds_reduction"]})
            first = {**dict.fromkeys(EVALUATION_COLUMNS, 0.0), "loss": 1.0, "accuracy": 0.5, "step": 1}
            file.append_evaluation(**first)
            last = {
                "loss": held_out_loss,
                "accuracy": accuracy,
                "character_error_rate": character_error_rate,
                "samples": 773,
                "step": steps,
            }
            file.append_evaluation(**{**dict.fromkeys(EVALUATION_COLUMNS, 0.5), **last})
        if xi:
            measures: dict[str, NDArray[Any]] = {name: np.full(len(xi), 0.25) for name in MEASURE_COLUMNS}
            measures |= {"xi": np.array(xi), "region_balance": np.resize(balance, len(xi))}
            file.append_measures({**measures, "step": np.arange(len(xi)) * 10 + 5})
        if status != "complete":
            file.close(status)
    return path


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_csv_files_hold_every_step_and_the_summary(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a.h5", method="dense"), write_run(tmp_path / "b.h5", steps=3)]
    folder = tmp_path / "out" / "deeper"
    assert re.search(r"^Method +Dense +Ok-Topk$", str(report(runs, folder)), re.MULTILINE)
    names = [f"{stem}-{series}.csv" for stem in "ab" for series in ("evaluations", "steps")]
    assert sorted(path.name for path in (folder / "runs").iterdir()) == names
    steps = rows(folder / "runs" / "b-steps.csv")
    assert [row["step"] for row in steps] == ["1", "2", "3"]
    assert [float(row["words_sent"]) for row in steps] == [60.0, 120.0, 180.0]
    assert [float(row["loss"]) for row in steps] == pytest.approx([2.0, 1.8, 1.62])
    assert {*STEP_COLUMNS, "words_sent", "training_seconds", "stage_select"} == steps[0].keys()
    assert [row["accuracy"] for row in rows(folder / "runs" / "b-evaluations.csv")] == ["0.5", "0.9"]
    summary = rows(folder / "summary.csv")
    assert [row["run"] for row in summary] == ["a", "b"]
    assert float(summary[1]["share_of_dense"]) == pytest.approx(60 / 1500)
    assert summary[0]["global_nnz_deviation"] == ""


def test_a_note_stands_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a.h5")
    assert main([str(run), "-o", str(tmp_path / "out"), "--note", "Of noise.", "--note", "Twice."]) == 0
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "Of noise." in page and "Twice." in page
    assert capsys.readouterr().out.endswith(f"\npage: {tmp_path / 'out' / 'index.html'}\n")


@pytest.mark.pictures
@pytest.mark.parametrize(("steps", "ranks"), [(0, 4), (1, 1)])
def test_the_smallest_runs_are_drawn(tmp_path: Path, steps: int, ranks: int) -> None:
    table = str(report([write_run(tmp_path / "a.h5", steps=steps, ranks=ranks)], tmp_path))
    assert "Ok-Topk" in table
    assert (tmp_path / "index.html").stat().st_size > 5_000


def test_runs_of_one_method_are_told_apart_by_their_files(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a.h5")
    (tmp_path / "other").mkdir()
    second = write_run(tmp_path / "other" / "a.h5")
    third = write_run(tmp_path / "c.h5", method="dense")
    runs = read_runs([first, second, third])
    assert [run.stem for run in runs] == ["a", "a-2", "c"]
    report([first, second, third], tmp_path / "out")
    assert (tmp_path / "out" / "runs" / "a-2-steps.csv").exists()


def test_a_file_given_twice_counts_once_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "a.h5")
    (tmp_path / "link.h5").symlink_to(path)
    for other in (path, tmp_path / "." / "a.h5", tmp_path / "link.h5"):
        assert main([str(path), str(other), "-o", str(tmp_path / "out")]) == 0
        assert f"\nleft out: {other} is given twice\n" in capsys.readouterr().out
        assert len(rows(tmp_path / "out" / "summary.csv")) == 1
    shutil.copy(path, tmp_path / "copy.h5")
    assert main([str(path), str(tmp_path / "copy.h5"), "-o", str(tmp_path / "out")]) == 0
    assert len(rows(tmp_path / "out" / "summary.csv")) == 2


def test_what_is_no_run_is_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_run(tmp_path / "a.h5")
    (tmp_path / "text.h5").write_text("no run")
    for bad, message in (("none.h5", "no such file"), ("text.h5", "is not a run file")):
        assert main([str(good), str(tmp_path / bad), "-o", str(tmp_path / "out")]) == 0
        said = capsys.readouterr().out
        assert re.search(rf"^left out: {re.escape(str(tmp_path / bad))}.*{message}", said, re.MULTILINE)
        assert bad in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.pictures
def test_control_characters_of_files_and_names_are_shown_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil, bad = "\x1b]0;title\x07\r\u202e\x9b31m", b"not utf-8 \xff".decode(errors="surrogateescape")
    folder = tmp_path / "a[" / "b]"  # no markup of rich's
    folder.mkdir(parents=True)
    config = json.dumps({"training": {"steps": 50, "note": evil}, "reduction": {"method": "oktopk"}})
    for name in (f"{evil}.h5", f"{bad}$x_.h5", "plain.h5"):
        write_run(folder / name)  # a command line may have such names, too
        with h5py.File(folder / name, "r+", libver="latest") as file:
            file.attrs["host"], file.attrs["config"] = evil, config
            file.attrs.create("commit", os.fsencode(bad), dtype=h5py.string_dtype())
            file.attrs["hardware"] = json.dumps({"cpu": evil, "cores": 2, "gpus": []})
    paths = [str(path) for path in sorted(folder.iterdir())]
    out = tmp_path / "out"
    assert main([*paths, str(folder / f"none{evil}.h5"), "-o", str(out)]) == 0
    assert watch(["--once", *paths]) == 0
    assert watch(["--once", str(folder / f"none{evil}.h5")]) == 2
    said = capsys.readouterr()
    files = [path for path in out.rglob("*") if path.is_file()]
    texts = [said.out, said.err, *(path.read_text(encoding="utf-8") for path in files), *map(str, files)]
    for text in texts:
        assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e\ud800-\udfff]", text), text[:300]
    assert r"\x1b]0;title\x07\r\u202e\x9b31m" in said.err
    assert any(r"not utf-8 \udcff" in text for text in texts)


def test_a_report_of_nothing_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_run(tmp_path / "a.h5")
    (tmp_path / "text.h5").write_text("no run")
    assert main([str(tmp_path / "text.h5"), "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"jobs.report: {tmp_path / 'text.h5'} is not a run file")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert main([str(good), "-o", str(tmp_path / "text.h5")]) == 2
    assert "text.h5 cannot be written" in capsys.readouterr().err
    assert main([str(good), "--target", "90", "-o", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "jobs.report: --target 90.0 is not in (0, 1]\n"


def test_documents_of_the_bench_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = [str(RESULTS / f"{name}.json") for name in ("sweep", "hook-2")]
    assert main([*documents, "-o", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert said.count("words per rank") == 6 and "oktopk-mpi" in said
    assert not (tmp_path / "out").exists()
    assert main([str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err
