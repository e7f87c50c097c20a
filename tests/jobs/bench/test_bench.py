"""The bench on ranks that are up, or starting them (test_net.py: as mpiexec starts it); what it writes, what it refuses."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives.dense_allreduce import dense_words
from jobs.bench import run as bench_run
from jobs.bench.device import Device, DrawnGradients
from jobs.bench.document import HOST_ROWS, read
from jobs.bench.libraries import MpiAllreduce
from jobs.bench.options import parse
from jobs.bench.run import Contestant, make_reducer
from jobs.bench.run import main as run
from oktopk import METHODS, Settings
from tests.launched import PATIENCE, run_ranks

ablation: Any = importlib.import_module("docs.results.ablation")  # a script without types
SHORT = ["--length", "20000", "--steps", "9", "--warmup", "9", "--set", "threshold_interval=8"]


def bench(*words: str, comm: MPI.Intracomm = MPI.COMM_SELF) -> int:
    return run([*SHORT, *words, "--quiet"], comm)


def by_name(entry: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {method["name"]: method for method in entry["methods"]}


@pytest.mark.mpi(min_size=2)
def test_a_bench_of_all_methods(
    comm: MPI.Intracomm, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ranks = Path(comm.bcast(str(tmp_path / "bench.json"))), comm.size
    words = [*SHORT, "--dense-steps", "3", "--json", str(path)]
    monkeypatch.setattr("sys.argv", ["jobs/bench", *words])
    assert run(words, comm) == 0
    said = capfd.readouterr().out
    content = comm.bcast(read(path) if comm.rank == 0 else None)
    assert content["kind"] == "bench"
    assert content["command"].startswith(f"mpiexec -n {ranks} python -m mpi4py -m jobs.bench --length 20000")
    (entry,) = content["runs"]
    assert (entry["ranks"], entry["length"], entry["k"]) == (ranks, 20000, 200)
    to_others = (ranks - 1) / ranks
    bounds = {"lower": 400 * to_others, "upper": 1200 * to_others, "step_limit": 1500 * to_others}
    assert entry["bounds"] == pytest.approx(bounds | {"dense": dense_words(20000, ranks)})
    methods = by_name(entry)
    assert list(methods) == [*METHODS, "mpi"]
    for name, method in methods.items():
        steps = 3 if name in ("dense", "mpi") else 9
        assert method["steps"] == steps
        assert method["agreed"]
        assert method["seconds"]["all"]["steps"] == steps
        assert len(method["series"]["seconds"]) == len(method["series"]["words"]) == steps
        assert method["seconds"]["all"]["mean"] == pytest.approx(
            np.mean(method["series"]["seconds"]), rel=1e-4
        )
        assert method["counted"] == (name != "mpi")
        assert method["words"]["busiest"] >= method["words"]["mean"] > 0
        # what the tables call stages is what a step consists of
        stages = sum(stage["mean"] for stage in method["stages"]["all"].values())
        assert stages <= method["seconds"]["all"]["mean"] * 1.001
        assert (name in said) == (comm.rank == 0)
    for name in METHODS:
        assert (methods[name]["seconds"]["exact"] is None) == (name == "dense")
    dense = methods["dense"]
    assert dense["words"]["mean"] == dense["formulas"]["least"] == dense_words(20000, ranks)
    assert methods["oktopk"]["words"]["mean"] <= 1200 * to_others
    # a settled selection is near k, so that the counts are near the formulas
    for name in ("topka", "gtopk"):
        assert methods[name]["words"]["mean"] == pytest.approx(methods[name]["formulas"]["least"], rel=0.25)
    assert methods["gtopk"]["words"]["busiest"] > 1.2 * methods["gtopk"]["words"]["mean"]


def test_a_rows_name_says_levels_and_wire(tmp_path: Path) -> None:
    rows, path = ("oktopk-flat-plain", "oktopk-hosts-int4"), tmp_path / "bench.json"
    assert bench("--methods", ",".join(rows), "--json", str(path)) == 0
    (entry,) = read(path)["runs"]
    methods = by_name(entry)
    assert [methods[name]["settings"] for name in rows] == [
        {"levels": "flat", "wire": "plain"},
        {"levels": "hosts", "wire": "int4"},
    ]
    assert {"host_sum", "host_gather"} <= {*methods[rows[1]]["stages"]["all"]} - {
        *methods[rows[0]]["stages"]["all"]
    }
    assert all(methods[name]["bytes_between"]["mean"] == 0 for name in rows)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "topkb"], "method 'topkb' is not one of dense, .*"),
        (["--json", "/dev/null/x.json"], "/dev/null/x.json cannot be written: Not a directory"),
    ],
)
def test_bad_input_ends_all_ranks_with_one_message(
    comm: MPI.Intracomm, capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert bench(*words, comm=comm) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert re.fullmatch(f"jobs.bench: {message}\n" * (comm.rank == 0), said.err)


@pytest.mark.mpi
def test_help_is_printed_once(comm: MPI.Intracomm, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench("--help", comm=comm) == 0
    assert capfd.readouterr().out.count("usage: ") == (comm.rank == 0)


def test_an_ablation_on_one_rank_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert ablation.main([], comm=MPI.COMM_SELF) == 2
    assert capsys.readouterr().err == "docs.results.ablation: one rank sends nothing: start two or more\n"


def test_a_wire_is_given_to_the_method_that_takes_it() -> None:
    assert bench("--methods", "oktopk,topka", "--set", "wire=int8") == 0


def test_gradients_that_are_not_finite_end_the_bench(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrawnGradients, "next", lambda self: np.full(20000, math.nan, np.float32))
    words = ["--methods", "oktopk", "--json", str(tmp_path / "bench.json")]
    assert bench(*words) == 2
    assert "is NaN or Inf on rank(s) 0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_library_sums_and_says_what_was_not_counted() -> None:
    with_default = MpiAllreduce(MPI.COMM_SELF, 5)
    gradient = np.arange(5, dtype=np.float32)
    report = with_default.step(gradient)
    assert with_default.update.tolist() == gradient.tolist()
    assert (report.words, report.messages, report.method) == (0, 0, "mpi")
    assert list(report.seconds) == ["allreduce"]
    with_default.close()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_variant_of_an_ablation_has_valid_settings(ranks: int) -> None:
    found = ablation.variants(ranks)
    assert found[0].settings == {}
    assert len({one.name for one in found}) == len(found)
    for one in found:
        Settings(**one.settings)
    changed = {name for one in found for name in one.settings}
    assert changed == {"balanced_regions", "rotate", "bucket_rounds", "balance_trigger"}


@pytest.mark.long("an ablation; `make test` has what its settings do in a step")
@pytest.mark.timeout(PATIENCE)
def test_regions_and_balancing_spare_the_busiest_rank(tmp_path: Path) -> None:
    path = tmp_path / "ablation.json"
    words = ["--length", "300000", "--steps", "8", "--warmup", "20"]
    done = run_ranks(
        4, "-m", "docs.results.ablation", *words, "--set", "threshold_interval=8", "--json", str(path)
    )
    assert done.returncode == 0, done.stderr
    content = read(path)
    assert content["kind"] == "ablation"
    methods = by_name(content["runs"][0])
    assert "mean / full's" in done.stdout
    busiest = {name: method["words"]["busiest"] for name, method in methods.items()}
    assert busiest["full"] < busiest["uniform regions"]
    assert busiest["uniform, balance at 1.0"] < busiest["uniform, balance off"]
    # four ranks never reach a trigger of four
    for same in ("balance off", "no rotation", "bucket of 1", "bucket of 3, all"):
        assert methods[same]["words"] == methods["full"]["words"]
        assert methods[same]["series"]["global_nnz"] == methods["full"]["series"]["global_nnz"]
    assert methods["uniform, balance at 1.0"]["messages"]["mean"] > methods["full"]["messages"]["mean"]


@pytest.mark.parametrize(("sharers", "allowed"), [(1, None), (2, True)])
def test_ranks_may_share_a_gpu_in_two_levels(
    sharers: int, allowed: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Reducer:
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            asked.append(keywords.get("peer_memory"))

    monkeypatch.setattr(bench_run, "GradientAllreduce", Reducer)
    options = parse(["--length", "1000"])
    for name in ("oktopk-flat-int8", "oktopk-hosts-int8"):
        one = Contestant(name=name, method="oktopk", settings=dict(HOST_ROWS[name]))
        make_reducer(one, options, 1000, Device(sharers), MPI.COMM_SELF)
    assert asked == [None, allowed]
