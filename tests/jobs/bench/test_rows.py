"""The table of rows: contestants agree, mistakes are sentences, and what a sum sends is counted without ranks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI

from jobs.bench import row_contestants
from jobs.bench.arguments import parse
from jobs.bench.document import BenchError, read
from jobs.bench.gradients import SKEWS, RowSource
from jobs.bench.job import run
from jobs.bench.rows import measure_rows
from jobs.bench.tables import document_tables
from tests.jobs.bench.row_volume import row_volume, volume_table

TINY = ["--table", "rows", "--rows", "90", "--table-rows", "200", "--width", "3", "--steps", "2", "--quiet"]
NAMES = [
    *("oktopk-rows", "oktopk-rows-mpi", "dense", "union-v1", "union-v4", "union-v6"),
    *("two-allgathers", "two-allgathers-coalesced", "two-allgathers-mpi", "gloo-sparse"),
]


@pytest.mark.mpi
@pytest.mark.parametrize("skew", SKEWS)
def test_all_contestants_give_one_sum(skew: str, comm: MPI.Intracomm, tmp_path: Path) -> None:
    path = Path(comm.bcast(str(tmp_path / "rows.json")))
    assert run(parse([*TINY, "--skew", skew, "--json", str(path)], launched=True), comm) == 0
    content = comm.bcast(read(path) if comm.rank == 0 else None)
    assert content["kind"] == "rows table"
    assert "oktopk-rows" in document_tables(content)
    (entry,) = content["runs"]
    methods = {method["name"]: method for method in entry["methods"]}
    assert list(methods) == NAMES and not entry["left_out"]
    for method in methods.values():
        assert len(method["series"]) == 2
        assert min(method["series"]) > 0
        assert (method["bytes"]["mean"] > 0) == (comm.size > 1)
        assert method["peak"] >= 0
    assert list(methods["oktopk-rows"]["stages"]) == ["coalesce", "exchange", "sum", "gather"]
    touched = entry["touched"]
    bytes_a_row = 4 + 4 * 3
    least = (touched["distinct"] + touched["summed"]) * (comm.size - 1) / comm.size * bytes_a_row
    if comm.size == 2:  # which exchange all of their rows
        least = touched["distinct"] * bytes_a_row
    assert methods["oktopk-rows"]["bytes"]["mean"] == pytest.approx(least, rel=0.1)


@pytest.mark.mpi
def test_a_sum_that_differs_on_one_rank_is_refused(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(whole: torch.Tensor, *rest: object) -> row_contestants.Sum:
        return None, whole, 0

    monkeypatch.setattr(row_contestants, "dense", nothing)
    with pytest.raises(BenchError, match="differ from those of oktopk-rows, or from rank to rank: dense$"):
        measure_rows(parse(TINY, launched=True), comm)


@pytest.mark.mpi
def test_what_is_too_large_is_left_out_with_the_reason(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_contestants, "V1_MOST", 50)
    monkeypatch.setattr(row_contestants, "V4_PAIRS", 50)
    monkeypatch.setattr("jobs.bench.device.Device.free_bytes", lambda device: 4000)
    left_out = measure_rows(parse(TINY, launched=True), comm)["left_out"]
    assert list(left_out) == ["dense", "union-v1", "union-v4"]
    assert left_out["union-v1"] == "a loop over 90 rows, more than 50"


@pytest.mark.parametrize("match", ["match_in_a_loop", "match_all_pairs", "match_sorted"])
def test_rows_are_found_in_the_union(match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(row_contestants._CHUNK, "cpu", 7)
    union, rows = torch.tensor([1, 4, 5, 9, 12]), torch.tensor([4, 9, 12])
    assert getattr(row_contestants, match)(union, rows).tolist() == [1, 3, 4]


@pytest.mark.parametrize("skew", SKEWS)
def test_bytes_are_those_of_own_rows_and_sums_up_to_64_ranks(skew: str) -> None:
    for ranks in (2, 3, 4, 5, 6, 8, 16, 32, 64):
        counted = row_volume(RowSource(skew, 20_000, 2000, seed=1), 20_000, ranks)
        assert counted["mean"] <= 1.05, counted
        assert counted["busiest"] <= 1.3, counted


def test_the_table_of_volumes_has_a_line_for_each_skew_and_number() -> None:
    assert len(volume_table(50, 9, (2, 3)).splitlines()) == 2 + 2 * len(SKEWS)


def test_drawn_rows_lie_in_the_table_and_low_ones_come_more_often_by_zipf() -> None:
    for skew in SKEWS:
        rows = RowSource(skew, 1000, 5000, seed=3).draw(2, 7)
        assert rows.min() >= 0 and rows.max() < 1000
        assert np.array_equal(rows, RowSource(skew, 1000, 5000, seed=3).draw(2, 7))
        assert ((rows == 0).sum() > 500) == (skew == "zipf")  # 1/H(1000) = 13 % of them


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "many"], "argument --rows: 'many' is not a list of numbers"),
        (["--rows", "5,6"], "--rows 5,6 is not one number, which --table rows takes"),
        (["--rows", "0"], "argument --rows: 0 is not at least 1"),
        (["--table-rows", "0"], "argument --table-rows: 0 is not at least 1"),
        (["--width", "-3"], "argument --width: -3 is not at least 1"),
        (["--steps", "0"], "argument --steps: 0 is not at least 1"),
        (["--warmup", "-1"], "argument --warmup: -1 is not at least 0"),
        (["--skew", "steep"], "invalid choice: 'steep'"),
        (["--density", "0.1"], "--density is not for --table rows"),
    ],
)
def test_a_mistake_is_a_sentence(words: list[str], message: str) -> None:
    with pytest.raises(BenchError, match=re.escape(message)):
        parse(["--table", "rows", *words], launched=True)


def test_options_of_the_table_of_rows_are_for_it_alone() -> None:
    for words in (["--skew", "zipf"], ["--table-rows", "5"], ["--width", "5"]):
        with pytest.raises(BenchError, match=f"^{words[0]} is for --table$"):
            parse(words, launched=True)
        with pytest.raises(BenchError, match=f"{words[0]} is not for --table hook"):
            parse(["--table", "hook", *words], launched=True)
