"""The table of GPUs: its cells, the launch that measures them, and what is written of it; without a GPU."""

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
from jobs.bench.gpu.table import Cell, chosen
from jobs.bench.job import measure_all
from jobs.bench.measure import in_turn
from jobs.bench.options import Options
from jobs.bench.run import measure_run
from jobs.bench.summary import device_stages
from jobs.bench.tables import document_tables
from oktopk import METHODS

ROOT = Path(__file__).parents[3]
TINY = (Cell(3000, 0.05, 4, 8), Cell(2000, 0.05, 8, 8))


def gpu_options(*words: str) -> Options:
    return parse(["--table", "gpu", "--quiet", *words], launched=True)


def on_the_host(*words: str) -> Options:
    """A table that can be measured without a GPU."""
    return dataclasses.replace(
        gpu_options("--gradient-type", "float32", *words), device="cpu", methods=("oktopk", "mpi")
    )


def run_table(options: Options, output: Output) -> dict[str, Any]:
    todo = [partial(measure_run, own, MPI.COMM_SELF) for own in chosen(options, TINY)]
    return measure_all("gpu table", todo, options, MPI.COMM_SELF, output)


def test_cells_are_measured_in_the_steady_state() -> None:
    todo = chosen(gpu_options())
    assert len(todo) == 10
    for options in todo:
        assert options.device == "cuda"
        assert options.threshold_interval == (128 if options.length > 10**8 else 32)
        # exact steps have their share in the mean, and error feedback has settled
        assert options.steps % options.threshold_interval == 0
        assert options.warmup >= 2 / options.density


def test_rows_and_types_of_the_table_can_be_chosen() -> None:
    todo = chosen(gpu_options("--rows", "5,1", "--gradient-type", "bfloat16"))
    assert [(options.density, options.gradient_type) for options in todo] == [
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
    assert stage_floors("oktopk", Workload(1000, 1, 10, 10), speeds) == {}  # one rank exchanges nothing


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
        assert run["seconds_taken"] > 0
    assert content["runs"][0]["length"] == 3000
    assert "\n3,000, 5 %, float32 " in document_tables(found)


def test_the_bench_starts_where_only_its_own_needs_are_installed() -> None:
    missing = ("matplotlib", "sklearn", "pydantic", "h5py", "torch", "cupy")
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); import jobs.bench.__main__, jobs.bench.gpu.table"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_table_over_its_budget_keeps_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    run_table(on_the_host("--budget", "1e-9"), Output(path))
    found = read(path)
    assert (len(found["runs"]), found["cells"]) == (1, 2)
    assert "1 of 2 cells were not begun" in capsys.readouterr().err
