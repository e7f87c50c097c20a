"""The table of GPUs: its cells and targets, the launch that measures them, and what is written of it; without a GPU."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from jobs.bench.arguments import parse
from jobs.bench.document import BenchError, Output, read
from jobs.bench.floors import Speeds, Workload, stage_floors
from jobs.bench.gpu.markdown import gpu_tables, verdict
from jobs.bench.gpu.table import CELLS, Cell, chosen, measure_cell, target
from jobs.bench.job import measure_all
from jobs.bench.measure import in_turn
from jobs.bench.options import Options
from jobs.bench.summary import device_stages
from jobs.bench.tables import insert, main
from oktopk import METHODS
from oktopk.launch import launch_environment

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "results"
TINY = (Cell(3000, 0.05, 4, 8, {"float32": 2.0}), Cell(2000, 0.05, 8, 8, {"float32": 3.0}))


def gpu_options(*words: str) -> Options:
    return parse(["--table", "gpu", "--quiet", *words], launched=True)


def on_the_host(*words: str) -> Options:
    """A table that can be measured without a GPU."""
    return dataclasses.replace(
        gpu_options("--gradient-type", "float32", *words), device="cpu", methods=("oktopk", "mpi")
    )


def run_table(options: Options, output: Output) -> dict[str, Any]:
    todo = [partial(measure_cell, cell, own, MPI.COMM_SELF) for cell, own in chosen(options, TINY)]
    return measure_all("gpu table", todo, options, MPI.COMM_SELF, output)


def test_the_cells_are_those_of_the_issue() -> None:
    wanted = {
        (14_728_266, 0.02): (1.6, 1.0),
        (14_728_266, 0.01): (1.7, 1.1),
        (27_569_568, 0.02): (2.0, 1.2),
        (133_547_324, 0.01): (3.2, 2.0),
        (133_547_324, 0.001): (4.0, 2.5),
    }
    assert {(cell.length, cell.density): tuple(cell.targets.values()) for cell in CELLS} == wanted
    todo = chosen(gpu_options())
    assert len(todo) == 10
    for cell, options in todo:
        assert (options.length, options.density, options.device) == (cell.length, cell.density, "cuda")
        assert options.settings["threshold_interval"] == (128 if cell.length > 10**8 else 32)
        # exact steps have their share in the mean, and error feedback has settled
        assert options.steps % cell.threshold_interval == 0
        assert options.warmup >= 2 / options.density
    assert target(CELLS[0], "float32", 4) == {"against": "nccl", "at_least": 1.6}
    assert target(CELLS[4], "bfloat16", 4) == {"against": "nccl-bf16", "at_least": 2.5}
    assert target(CELLS[0], "float32", 8) is None
    assert target(CELLS[0], "float16", 4) is None


def test_rows_and_types_of_the_table_can_be_chosen() -> None:
    todo = chosen(gpu_options("--rows", "5,1", "--gradient-type", "bfloat16"))
    assert [(cell.density, options.gradient_type) for cell, options in todo] == [
        (0.001, "bfloat16"),
        (0.02, "bfloat16"),
    ]
    with pytest.raises(BenchError, match=re.escape("--rows 6 is not in [1, 5]")):
        chosen(gpu_options("--rows", "2,6"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--table", "gpu", "--length", "5"],
            "--length is not for --table gpu: it says how it is measured",
        ),
        (["--table", "gpu", "--set", "rotate=false"], "--set is not for --table"),
        (["--table", "gpu", "--no-memory"], "--no-memory is not for --table"),
        (["--table", "gpu", "--ablate"], "--ablate is not for --table"),
        (["--table", "gpu", "--steps", "64"], "--steps is not for --table"),
        (["--table", "gpu", "--device", "cpu"], "--table gpu is measured on --device cuda, not cpu"),
        (["--table", "gpu", "--gradient-type", "float16"], "'float16' is not one of float32, bfloat16"),
        (["--table", "gpu", "--rows", "0"], "argument --rows: 0 is not at least 1"),
        (["--table", "gpu", "--rows", "a"], "argument --rows: 'a' is not a list of numbers"),
        (["--table", "gpu", "--budget", "-1"], "argument --budget: -1 is not at least 0"),
        (["--table", "gpu", "--budget", "nan"], "argument --budget: nan is not at least 0"),
        (["--table", "cpu"], "invalid choice: 'cpu'"),
        (["--rows", "1"], "--rows is for --table"),
        (["--budget", "9"], "--budget is for --table"),
        (["--gradient-type", "bfloat16"], "gradient type 'bfloat16' is not one of float32 on --device cpu"),
        (["--methods", "nccl"], "method 'nccl' is not one of dense, oktopk, "),
        (["--methods", "oktopk-mpi"], "oktopk-hosts-int4 on --device cpu"),
        (["--device", "cuda", "--methods", "mpi"], "oktopk-hosts-int4 on --device cuda"),
    ],
)
def test_what_cannot_be_measured_on_gpus_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(BenchError, match=re.escape(message)):
        parse(words, launched=True)


def test_defaults_on_a_gpu_are_all_methods_and_nccl() -> None:
    options = parse(["--device", "cuda", "--gradient-type", "float16"], launched=True)
    assert options.methods == (*METHODS, "nccl", "nccl-bf16")
    assert gpu_options().budget == 300


def test_everyone_is_first_in_turn() -> None:
    orders = [in_turn("abc", step) for step in range(-2, 4)]
    assert ["".join(order) for order in orders] == ["bca", "cab", "abc", "bca", "cab", "abc"]


def test_floors_of_narrow_gradients_are_lower() -> None:
    speeds = Speeds(memory=1000.0, wire=100.0, message=0.5)
    wide = stage_floors("oktopk", Workload(1000, 4, selected=10, applied=20), speeds)
    narrow = stage_floors("oktopk", Workload(1000, 4, selected=10, applied=20, gradient_bytes=2), speeds)
    assert (wide["select"]["memory_bytes"], narrow["select"]["memory_bytes"]) == (12_000, 10_000)
    assert narrow["select"]["seconds"] == 10.0
    assert {name: floor for name, floor in narrow.items() if name != "select"} == {
        name: floor for name, floor in wide.items() if name != "select"
    }
    assert stage_floors("nccl", Workload(1000, 4, 1000, 1000), speeds) == {}


def test_stages_on_a_device_stand_beside_their_floors() -> None:
    floors = stage_floors("oktopk", Workload(1000, 4, selected=10, applied=20), Speeds(1000.0, 100.0, 0.5))
    ranks = {"select": [13.0, 15.0], "clear": [1.0], "gather and apply": [4.0, 8.0], "elsewhere": [1.0, 1.0]}
    found = device_stages(ranks, floors)
    assert found["select"] == {"seconds": 14.0, "slowest": 15.0, "floor": 12.0}
    # 20 entries: one element of 4 bytes each is cleared before, of 28 bytes an entry that `apply` counts
    assert found["clear"]["floor"] == pytest.approx(20 * 4 / 1000)
    together = floors["allgather"]["seconds"] + floors["apply"]["seconds"] - found["clear"]["floor"]
    assert found["gather and apply"] == {"seconds": 6.0, "slowest": 8.0, "floor": pytest.approx(together)}
    assert found["elsewhere"]["floor"] is None
    assert device_stages({}, floors) == {}


def test_stages_on_a_device_are_in_the_table_where_they_were_timed() -> None:
    stages = {
        "select": {"seconds": 40e-6, "slowest": 50e-6, "floor": 30e-6},
        "reduce": {"seconds": 7e-6, "slowest": 8e-6, "floor": None},
    }
    text = gpu_tables(recorded(methods=[method("oktopk", 1e-3, device_stages=stages)]))
    assert row(text, "133.5 M", 3)[1:] == ["40.0 (30.0)", "7.0 (–)", "47.0"]
    assert "on the device, by events" not in gpu_tables(recorded())


def test_all_cells_are_measured_and_written(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    content = run_table(on_the_host("--json", str(path)), Output(path))
    found = read(path)
    assert (found["kind"], found["cells"], len(found["runs"])) == ("gpu table", 2, 2)
    assert [(run["length"], run["k"], run["course"]["steps"]) for run in found["runs"]] == [
        (3000, 150, 8),
        (2000, 100, 8),
    ]
    for run in found["runs"]:
        assert [method["name"] for method in run["methods"]] == ["oktopk", "mpi"]
        assert set(run["methods"][0]["series"]) == {"seconds", "exact", "words", "global_nnz"}
        assert sum(run["methods"][0]["series"]["exact"]) >= 8 / run["settings"]["threshold_interval"]
        assert run["target"] is None  # one rank
        assert run["seconds_taken"] > 0
    assert content["runs"][0]["length"] == 3000
    tables = gpu_tables(found)
    assert "| 3,000, 5 %, float32 |" in tables
    assert "\n\n" in tables


def test_the_bench_starts_where_only_its_own_needs_are_installed() -> None:
    missing = ("matplotlib", "sklearn", "pydantic", "h5py", "torch", "cupy")
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); import jobs.bench.__main__, jobs.bench.gpu.table"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_library_is_imported_before_mpi_so_that_its_ucx_is() -> None:
    code = """
import sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("collectives", "mpi4py.MPI"):
            print(name)
sys.meta_path.insert(0, Watch())
from jobs.bench.__main__ import main
sys.exit(main(["--help"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=launch_environment(1, "openmpi"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[:2] == ["collectives", "mpi4py.MPI"], done.stderr


def test_a_table_over_its_budget_keeps_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    run_table(on_the_host("--budget", "1e-9"), Output(path))
    found = read(path)
    assert (len(found["runs"]), found["cells"]) == (1, 2)
    assert "1 of 2 cells were not begun" in capsys.readouterr().err
    assert "1 of 2 cells, " in gpu_tables(found)


def method(name: str, mean: float, **replaced: Any) -> dict[str, Any]:
    times = {"steps": 4, "median": mean, "mean": mean, "min": mean, "max": mean}
    stage = {"mean": 30e-6, "median": 20e-6, "slowest": 40e-6, "least": 10e-6}
    return {
        "name": name,
        "seconds": {
            "all": times,
            "regular": {**times, "median": mean / 2},
            "exact": {**times, "median": 2 * mean},
        },
        "stages": {"all": {}, "regular": {"between": stage, "select": stage, "finish": stage}, "exact": None},
        "floors": {"select": {"seconds": 5e-6}},
        "words": {"mean": 40.0, "busiest": 44.0, "largest_step": 44.0},
        "nnz": {"local_deviation": 0.0312, "global_deviation": 0.0041},
        "memory": {
            "regular": {"watched": 3, "allocated": 0, "resident": 0, "n_sized": False, "synchronizations": 2},
            "exact": None,
        },
        "agreed": True,
        **replaced,
    }


def recorded(**replaced: Any) -> dict[str, Any]:
    """A document of one cell: 100 us of ours to NCCL's 159.99, where 1.6x is asked for."""
    run = {
        "ranks": 4,
        "ranks_per_device": 1,
        "length": 133_547_324,
        "density": 0.001,
        "k": 133_548,
        "gradient_type": "float32",
        "baseline": "nccl",
        "left_out": {"oktopk-mpi": "there is but one transport"},
        "bounds": {"lower": 15.0, "upper": 45.0},
        "speeds": {"memory": 4e12, "wire": 300e9, "message": 1.5e-6},
        "target": {"against": "nccl", "at_least": 1.6},
        "select": {
            "nnz": 1,
            "seconds": 400e-6,
            "bytes": 1_400_000_000,
            "share": 0.875,
            "topk_seconds": 2398e-6,
        },
        "methods": [method("nccl", 159.99e-6), method("oktopk", 100e-6), method("oktopk-into-g", 125e-6)],
        "seconds_taken": 12.5,
        **replaced,
    }
    return {
        "kind": "gpu table",
        "command": "mpiexec -n 4 ...",
        "date": "2026-11-20T12:00:00+00:00",
        "commit": "0123456789abcdef",
        "dirty": False,
        "machine": {"cpu": "a processor"},
        "versions": {"torch": "2.11.0", "mpi4py": "4.1.2"},
        "mpi": "Open MPI v5.0.11, package: anything",
        "gpu": {
            "name": "NVIDIA H200",
            "count": 4,
            "driver": "580.95.05",
            "runtime_cuda": 13000,
            "cupy": "14.2.0",
            "nccl": "2.28.9",
            "ucx": "1.20.0",
        },
        "cells": 1,
        "runs": [run],
    }


def row(text: str, first: str, number: int = 0) -> list[str]:
    """The cells of one of the lines that begin with `first`."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {first}")]
    return [cell.strip() for cell in lines[number].strip("|").split("|")]


def test_the_table_says_ratio_target_and_whether_it_was_met() -> None:
    text = gpu_tables(recorded())
    cell = "133.5 M, 0.1 %, float32"
    assert row(text, cell) == [
        cell,
        "160.0",
        "–",
        "100.0",
        "50.0",
        "200.0",
        "1.59x",
        "≥ 1.6x",
        "missed",
        "1.27x",
        "–",
    ]
    assert verdict(recorded(target={"against": "nccl", "at_least": 1.5})["runs"][0])[1] is True
    assert row(gpu_tables(recorded(target=None)), cell)[6:9] == ["1.59x", "–", "–"]
    assert row(gpu_tables(recorded(methods=[method("oktopk", 1e-4)])), cell)[6:9] == ["–", "≥ 1.6x", "–"]


def test_the_table_says_what_else_the_contract_asks() -> None:
    text = gpu_tables(recorded())
    found = row(text, "133.5 M", 1)[1:]
    assert found == ["40", "15 … 45", "met", "3.12%", "0.41%", "2 (met)", "0 B", "0 B", "yes"]
    assert row(text, "133.5 M", 2)[1:] == [
        "400.0",
        "1,400",
        "3.50",
        "4.00",
        "87.5 %",
        "met",
        "2,398.0",
        "5.99x",
        "missed",
    ]
    assert row(text, "stage") == ["stage", "select", "finish", "between"]
    assert row(text, "133.5 M", 3)[1:] == ["20.0 (5.0)", "20.0", "20.0"]
    more = {"watched": 3, "allocated": 8, "resident": None, "n_sized": False, "synchronizations": 3}
    words = {"mean": 46.0, "busiest": 46.0, "largest_step": 46.0}
    ours = method("oktopk", 1e-4, words=words, memory={"regular": more, "exact": None}, agreed=False)
    found = row(gpu_tables(recorded(methods=[ours])), "133.5 M", 1)[3:]
    assert found == ["missed", "3.12%", "0.41%", "3 (missed)", "8 B", "–", "NO"]


def test_the_heading_says_where_the_figures_come_from() -> None:
    text = gpu_tables(recorded())
    heading = text.splitlines()[0]
    for word in (
        "4 x NVIDIA H200",
        "driver 580.95.05",
        "CUDA 13.0",
        "NCCL 2.28.9",
        "torch 2.11.0",
        "UCX 1.20.0",
    ):
        assert word in heading
    assert "commit 0123456789ab, 2026-11-20T12:00:00+00:00; 12 s. `mpiexec -n 4 ...`" in heading
    assert "Without `oktopk-mpi`: there is but one transport." in text
    assert "commit 0123456789ab with changes" in gpu_tables({**recorded(), "dirty": True})
    assert "commit 0123456789ab (as told)" in gpu_tables({**recorded(), "dirty": None})
    with pytest.raises(BenchError, match="the document is a 'sweep', not a 'gpu table'"):
        gpu_tables({**recorded(), "kind": "sweep"})


def test_tables_are_put_between_their_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, readme = tmp_path / "h200.json", tmp_path / "README.md"
    Output(path).write({"format": "oktopk bench 1", **recorded()})
    assert main([str(path)]) == 0
    tables = capsys.readouterr().out.rstrip("\n")
    assert tables == gpu_tables(read(path))
    readme.write_text("before\n<!-- h200.json -->\nold\n<!-- end of h200.json -->\nafter\n")
    for _ in range(2):
        assert main([str(path), "--into", str(readme)]) == 0
    expected = f"before\n<!-- h200.json -->\n\n{tables}\n\n<!-- end of h200.json -->\nafter\n"
    assert readme.read_text() == expected
    readme.write_text("no marks")
    assert main([str(path), "--into", str(readme)]) == 2
    assert (
        "does not hold the lines <!-- h200.json --> and <!-- end of h200.json -->" in capsys.readouterr().err
    )
    assert readme.read_text() == "no marks"
    assert main([str(tmp_path / "none.json")]) == 2
    with pytest.raises(BenchError):
        insert("<!-- end of a --> <!-- a -->", "a", "x")


def test_the_results_page_shows_what_the_bench_wrote() -> None:
    page = (RESULTS / "gpu.md").read_text(encoding="utf-8")
    tables = [path for path in RESULTS.glob("*.json") if read(path)["kind"] == "gpu table"]
    for path in tables:
        assert insert(page, path.name, gpu_tables(read(path))) == page, (
            f"run jobs.bench.tables {path} --into docs/results/gpu.md"
        )
    shown = re.findall(r"<!-- end of (\S+\.json) -->", page)
    assert shown
    for name in shown:
        if RESULTS / name not in tables:
            assert insert(page, name, "Not measured yet.") == page, (
                f"{name} is shown, and is no table in {RESULTS}"
            )
