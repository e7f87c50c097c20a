"""docs/results/replayed.md: its tables are those of the script beside it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from oktopk.plan.picture import draw
from oktopk.replay.program import program_of
from oktopk.replay.recording import Step
from oktopk.settings import Settings
from tests.launched import ROOT

script: Any = importlib.import_module("docs.results.replayed")  # scripts without types
second_opinion: Any = importlib.import_module("docs.results.second_opinion")
PAGE = (ROOT / "docs" / "results" / "replayed.md").read_text(encoding="utf-8")


def test_the_papers_methods_and_claims_are_those_of_the_page() -> None:
    for table in (script.methods_table(), script.claims_table()):
        assert f"\n\n{table}\n\n" in PAGE
    assert f"| {100 * script.efficiency():.1f} % or more, whatever the computation; " in PAGE
    assert f"the paper {100 * script.EFFICIENCY:.1f} %" in PAGE
    topka, dense = (script.found("BERT", method).rank_bytes for method in ("topka", "dense"))
    assert f"send more than dense | {topka / dense:.1f} times | reproduced |" in PAGE
    least = min(
        script.found(name, method).seconds / script.found(name, "oktopk").seconds
        for name in script.WORKLOADS
        for method in script.METHODS[:-1]
    )
    assert f"| {least:.1f} times and more in the exchange | reproduced |" in PAGE
    for name, (length, ranks, density, *_) in script.WORKLOADS.items():
        words = script.found(name, "oktopk").rank_bytes / 4
        assert words == pytest.approx(4 * density * length * (ranks - 1) / ranks, rel=1e-3)


def test_a_gain_is_the_papers_at_the_computation_that_is_said() -> None:
    cells = script.claim("", 2.0, 0.010, 0.002, 5e-3 * script.PEAK)
    assert (0.006 + 0.010) / (0.006 + 0.002) == 2.0
    assert cells == ["", "2", "5.0", "6.00", "5.00", "not refuted"]
    assert script.claim("", 6.0, 0.010, 0.002, 5e-3 * script.PEAK)[3:] == ["0.00", "5.00", "no"]


@pytest.mark.parametrize("ranks", [5, 70])
def test_a_trace_for_simgrid_receives_what_it_sends(ranks: int) -> None:
    """Of 70 ranks all share one program."""
    program = program_of(Step("oktopk", 10_000, ranks, 1, Settings(density=0.1)))
    sizes: dict[str, dict[tuple[int, ...], int]] = {"isend": {}, "irecv": {}}
    begun = set()
    for rank in range(ranks):
        partners = program.partners(rank)
        end = program.start[1] if program.shared else program.start[rank + 1]
        for i in range(0 if program.shared else program.start[rank], end):
            for line in second_opinion.words(program, partners, rank, i):
                _, kind, *numbers = line.split()
                if kind == "wait":
                    source, dest, tag = map(int, numbers)
                    assert rank in (source, dest) and (rank, source, dest, tag) in begun
                    continue
                other, tag, size, _ = map(int, numbers)
                source, dest = (rank, other) if kind == "isend" else (other, rank)
                assert (rank, source, dest, tag) not in begun
                begun.add((rank, source, dest, tag))
                sizes[kind][source, dest, tag] = size
    sent, room = sizes["isend"], sizes["irecv"]
    assert len(sent) > ranks * (ranks - 1) and sent.keys() == room.keys()
    assert all(size < room[message] for message, size in sent.items())


def rows_of(ranks: int) -> list[list[str]]:
    return [row.split(" | ") for row in re.findall(rf"^\| ({ranks:,} \|.*) \|$", PAGE, re.MULTILINE)]


def test_exchanges_of_many_ranks_are_those_of_the_page() -> None:
    for ranks in script.RANKS[:3]:
        assert rows_of(ranks) == [script.scale_row(ranks), script.grid_row(ranks)]


def test_a_grid_of_few_ranks_is_never_faster() -> None:
    for ranks in (4, 15):
        assert len(script.gains_of_grid(ranks)) == 240 and max(script.gains_of_grid(ranks)) <= 1


@pytest.mark.long("2,880 replays of 4 to 15 ranks; `make test` has those of two numbers")
def test_what_the_page_says_of_few_ranks_is_what_the_script_prints() -> None:
    said = "Of 2,880 comparisons of 4 to 15 ranks the grid is the faster one in 0, at most 1.00 times as fast"
    assert script.few_lines() == f"{said}; on 16 ranks 1.03 times."
    assert (
        "never faster** in 2,880 comparisons: 4 to 15 ranks" in PAGE and "On 16 it is by 3 % at most." in PAGE
    )


@pytest.mark.pictures
def test_a_picture_of_them_names_its_curves(tmp_path: Path) -> None:
    draw(script.curves(script.RANKS[:2]), "some", tmp_path / "some.svg")
    assert b"TopkA, 100 Gb/s" in (tmp_path / "some.svg").read_bytes()


@pytest.mark.long("exchanges of 1,024 ranks and of 4,096; `make test` has up to 256")
@pytest.mark.timeout(1800)
def test_so_are_those_of_thousands() -> None:
    for ranks in script.RANKS[3:]:
        assert rows_of(ranks) == [script.scale_row(ranks), script.grid_row(ranks)]
    assert f"\n\n{script.efficiency_table()}\n\n" in PAGE
    assert script.prime_line() in PAGE and script.long_line() in PAGE
