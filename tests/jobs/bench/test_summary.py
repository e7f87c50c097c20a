"""From samples to figures, by numbers worked out by hand; and the document that holds them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.bench.document import BenchError, Output, document, read
from jobs.bench.measure import FIELDS, Contestant, Course, Samples
from jobs.bench.summary import formulas, summarize
from jobs.run.provenance import environment
from oktopk import METHODS
from oktopk.methods.gtopk import gtopk_busiest_words
from oktopk.methods.topkdsa import topkdsa_words
from tests.golden import same_as

LENGTH = 1000
K = 10


def samples(**replaced: Any) -> Samples:
    """Two ranks, four steps, the last one exact on rank 1 alone."""
    fields = {name: np.zeros((2, 4)) for name in FIELDS}
    fields["seconds"] = np.array([[1.0, 5.0, 3.0, 9.0], [2.0, 4.0, 3.0, 8.0]])
    fields["exact"][1, 3] = 1
    fields["k"][:] = K
    fields["local_nnz"][:] = [[10, 10, 10, 10], [12, 8, 10, 10]]
    fields["global_nnz"][:] = [10, 11, 9, 10]
    fields["words"][:] = [[10, 10, 10, 10], [20, 40, 20, 20]]
    fields["messages"][:] = 3
    return Samples(
        fields=fields,
        stages={"select": np.full((2, 4), 0.5), "reduce": np.array([[0.1] * 4, [0.3] * 4])},
        agreed=True,
        **replaced,
    )


def summary(method: str = "oktopk", **replaced: Any) -> dict[str, Any]:
    return summarize(Contestant(method, method), samples(**replaced), LENGTH)


def test_the_slowest_rank_makes_the_time_of_a_step() -> None:
    seconds = summary()["seconds"]
    assert seconds["all"] == {"steps": 4, "median": 4.0, "mean": 4.75, "min": 2.0, "max": 9.0}
    assert seconds["regular"] == {"steps": 3, "median": 3.0, "mean": 10 / 3, "min": 2.0, "max": 5.0}
    assert seconds["exact"] == {"steps": 1, "median": 9.0, "mean": 9.0, "min": 9.0, "max": 9.0}


def test_stages_are_means_over_ranks_and_the_rest_is_between() -> None:
    stages = summary()["stages"]["exact"]
    assert stages["select"] == {"mean": 0.5, "median": 0.5, "slowest": 0.5, "least": 0.5}
    assert stages["reduce"] == pytest.approx({"mean": 0.2, "median": 0.2, "slowest": 0.3, "least": 0.1})
    assert stages["between"]["mean"] == pytest.approx((8.4 + 7.2) / 2)


def test_summaries_and_formulas_are_those_of_the_golden_file(tmp_path: Path) -> None:
    summaries = {name: summary(name) for name in ("oktopk", "topka", "union", "mpi")}
    methods = (*METHODS, "mpi", "nccl", "nccl-bf16")
    # a hundred entries of ten thousand on four ranks
    words = {name: formulas(name, 100, 10_000, 4) for name in methods}
    found = {"summaries": summaries, "formulas": words}
    text = "\n".join(
        f"## {title}: {name}\n\n" + "".join(f"{key}: {shown(value)}\n" for key, value in values.items())
        for title, parts in found.items()
        for name, values in parts.items()
    )
    same_as(Path(__file__).with_name("summaries.txt"), text, tmp_path)


def shown(value: Any) -> Any:
    """Plain values with numbers of ten digits."""
    if isinstance(value, dict):
        return {name: shown(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [shown(inner) for inner in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


def test_golden_figures_can_be_worked_out_by_hand() -> None:
    found = summary()
    assert found["words"] == {"mean": 17.5, "busiest": 25.0, "largest_step": 25.0}
    assert found["nnz"]["local_deviation"] == pytest.approx(0.4 / 8)
    assert summary("topka")["nnz"]["global_deviation"] is None
    assert summary("union")["nnz"]["local_deviation"] == 1.0  # twice a rank's half of k
    assert formulas("oktopk", 100, 10_000, 4) == {"least": 150, "most": 450}


@pytest.mark.parametrize(
    ("ranks", "busiest"), [(1, 0), (2, 200), (3, 400), (4, 400), (5, 600), (8, 600), (64, 1200)]
)
def test_gtopk_is_logarithmic_on_its_busiest_rank(ranks: int, busiest: float) -> None:
    assert gtopk_busiest_words(100, ranks) == busiest


def test_topkdsa_never_sends_less_than_its_least() -> None:
    least, most = topkdsa_words(100, 110, 4)
    assert least == most == 300


def test_dense_contestants_run_a_short_course() -> None:
    course = Course(warmup=10, steps=8, dense_steps=3)
    sparse, dense = Contestant("a", "oktopk"), Contestant("b", "dense", sparse=False)
    assert [step for step in range(-10, 8) if course.runs(sparse, step)] == list(range(-10, 8))
    assert [step for step in range(-10, 8) if course.runs(dense, step)] == [-2, -1, 0, 1, 2]


def test_a_document_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "--length", "5"])
    output = Output(tmp_path / "bench.json")
    assert not list(tmp_path.iterdir())
    odd = {"infinite": math.inf, "missing": math.nan}
    output.write(document("bench", [{"odd": odd, "methods": [summary()]}], 4, "jobs.bench", "told"))
    found = read(tmp_path / "bench.json")
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
    assert found["runs"][0]["odd"] == {"infinite": "inf", "missing": None}
    assert found["runs"][0]["methods"][0]["words"]["mean"] == 17.5
    assert found["kind"] == "bench" and found["mpi"]
    assert found["command"] == "mpiexec -n 4 python -m mpi4py -m jobs.bench --length 5"
    for name in ("date", "commit", "dirty", "machine", "versions", "environment"):
        assert name in found
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["cpu"]


def test_the_environment_is_what_tunes_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("OMPI_MCA_btl", "self,tcp"), ("OMPI_MCA_initial_wdir", "/x"), ("HOME", "/root")):
        monkeypatch.setenv(name, value)
    found = environment()
    assert found["OMPI_MCA_btl"] == "self,tcp"
    assert not {"OMPI_MCA_initial_wdir", "HOME"} & found.keys()


def test_what_is_no_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="none.json cannot be read: No such file"):
        read(tmp_path / "none.json")
    (tmp_path / "text").write_text("no JSON")
    with pytest.raises(BenchError, match="it is not JSON"):
        read(tmp_path / "text")
    (tmp_path / "other").write_text(json.dumps([1]))
    with pytest.raises(BenchError, match="its format is None, not 'oktopk bench 1'"):
        read(tmp_path / "other")
    with pytest.raises(BenchError, match="it is not a regular file"):
        Output(tmp_path)
    with pytest.raises(BenchError, match="cannot be written: No such file or directory"):
        Output(tmp_path / "nowhere" / "bench.json")
