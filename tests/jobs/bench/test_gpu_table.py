"""The script of the table beside docs/results/gpu.md: its cells, and what is written of them; without a GPU."""

from __future__ import annotations

import dataclasses
import importlib
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from jobs.bench.document import BenchError, read
from jobs.bench.measure import in_turn
from jobs.bench.run import measure_run, run_all
from jobs.bench.tables import cells_table, document_tables

ROOT = Path(__file__).parents[3]
script: Any = importlib.import_module("docs.results.gpu_table")  # without types
TINY = (script.Cell(3000, 0.05, 4, 8), script.Cell(2000, 0.05, 8, 8))


def test_cells_are_measured_in_the_steady_state() -> None:
    todo = script.cells([])
    assert len(todo) == 10
    for options in todo:
        assert (options.device, options.module) == ("cuda", "docs.results.gpu_table")
        assert options.methods == ("oktopk", "oktopk-mpi", "nccl", "nccl-bf16")
        assert options.threshold_interval == (128 if options.length > 10**8 else 32)
        # exact steps have their share in the mean, and error feedback has settled
        assert options.steps % options.threshold_interval == 0
        assert options.warmup >= 2 / options.density


def test_rows_and_types_of_the_table_can_be_chosen() -> None:
    todo = script.cells(["--rows", "5,1", "--gradient-type", "bfloat16", "--seed", "3"])
    assert [(options.density, options.gradient_type) for options in todo] == [
        (0.001, "bfloat16"),
        (0.02, "bfloat16"),
    ]
    assert {options.seed for options in todo} == {3}
    for words, message in (
        (["--rows", "2,6"], "--rows 6 is not in [1, 5]"),
        (["--rows", "a"], "argument --rows: 'a' is not a list of numbers"),
        (["--gradient-type", "float16"], "invalid choice: 'float16'"),
        (["--length", "5"], "unrecognized arguments: --length 5"),
    ):
        with pytest.raises(BenchError, match=re.escape(message)):
            script.cells(words)


def test_everyone_is_first_in_turn() -> None:
    orders = [in_turn("abc", step) for step in range(-2, 4)]
    assert ["".join(order) for order in orders] == ["bca", "cab", "abc", "bca", "cab", "abc"]


def without_figures(text: str) -> str:
    return re.sub(r" *[\d.,]+", " 0", text)


def test_all_cells_are_measured_and_end_in_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    own = script.cells(["--gradient-type", "float32", "--json", str(path)], TINY)
    cells = [dataclasses.replace(each, device="cpu", methods=("oktopk", "mpi")) for each in own]
    todo = [partial(measure_run, each, MPI.COMM_SELF) for each in cells]
    assert run_all(lambda: ("gpu table", todo), cells[0], MPI.COMM_SELF) == 0
    found = read(path)
    printed, table = capsys.readouterr().out, f"\n\n{cells_table(found).terminal()}\n"
    # the document has nanoseconds, so that a printed tenth of a microsecond may be another one
    assert without_figures(printed).endswith(without_figures(table))
    assert (found["kind"], found["cells"], len(found["runs"])) == ("gpu table", 2, 2)
    assert [(run["length"], run["k"], run["course"]["steps"]) for run in found["runs"]] == [
        (3000, 150, 8),
        (2000, 100, 8),
    ]
    for run in found["runs"]:
        assert [method["name"] for method in run["methods"]] == ["oktopk", "mpi"]
        assert set(run["methods"][0]["series"]) == {"seconds", "exact", "words", "global_nnz"}
        assert sum(run["methods"][0]["series"]["exact"]) >= 8 / run["settings"]["threshold_interval"]
        assert run["seconds_taken"] > 0
    assert "\n3,000, 5 %, float32 " in document_tables(found)
