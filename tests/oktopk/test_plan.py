"""The plan: what it prints, what it knows, and what it refuses, one sentence each."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oktopk.plan import losses, picture
from oktopk.plan.__main__ import main
from oktopk.plan.rows import Job, Row, best_first, dense_rows, line_of, memory_of, sparse_rows
from oktopk.plan.table import table
from oktopk.replay.links import DEVICES, Links, LinksError, links_of, rate_of, read, seconds_of
from oktopk.replay.network import Level, Network
from oktopk.replay.prediction import Kernels, code_of, predict
from oktopk.replay.recording import Step
from oktopk.replay.valueless import WORK
from oktopk.settings import Settings
from tests.launched import ROOT
from tests.links import MODEL, document, write

JOB = ["--parameters", "2e6", "--compute-ms", "5"]
FEW = ["--methods", "union", "--densities", "0.0125", "--wires", "int4"]
LINK = ["--link", "1gbit", "--latency", "50us"]
INFINITE = float("inf")
PAIR = {"hosts": ["node1", "node2"], "latency": 1e-5, "bytes_per_second": 1e9}
KERNELS = document()["kernels"]


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    status = main([str(word) for word in words])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_a_plan_has_the_fastest_first_beside_dense_and_the_line_to_paste(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, shown, problem = run(capsys, *LINK, *JOB, "--hosts", 4, "--gpus", 2)
    assert (status, problem) == (0, "")
    lines = shown.splitlines()
    assert max(map(len, (line for line in lines if not line.startswith("    ")))) <= 100
    rows = [line.split() for line in lines if re.match("(union|oktopk|dense) ", line)]
    assert {(row[0], row[2]) for row in rows if row[0] == "dense"} == {
        ("dense", "float32"),
        ("dense", "bfloat16"),
    }
    assert len(rows) == 18
    times = [float(row[6] if row[0] != "dense" else row[5]) for row in rows]
    assert times == sorted(times) and rows[0][0] != "dense"
    assert "given, not measured" in shown and "docs/results" in shown
    assert "loss: measured, not predicted" in shown
    assert re.search(
        r'^    optimizer = DistributedOptimizer\(optimizer, sends="updates"', shown, re.MULTILINE
    )


def test_a_plan_of_a_document_takes_its_links_and_kernels(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write(tmp_path / "links.json", document())
    status, shown, _ = run(capsys, path, *JOB, *FEW, "--hosts", 3, "--gpus", 2)
    assert status == 0
    shown = " ".join(shown.split())
    assert "3 host(s) of 2 rank(s), MPI, 2026-11-29" in shown and "not measured here" not in shown
    assert "Extrapolated" not in shown
    status, shown, _ = run(capsys, path, *JOB, *FEW, "--hosts", 70, "--gpus", 1)
    assert status == 0
    shown = " ".join(shown.split())
    assert "Extrapolated: 3 hosts were measured, and 70 are taken to have such links." in shown
    assert "Extrapolated: more than 64 exchange" in shown and "a host were measured" not in shown
    shown = " ".join(run(capsys, path, *JOB, *FEW, "--hosts", 3, "--gpus", 4)[1].split())
    assert "Extrapolated: 2 rank(s) a host were measured, and 4 are taken to share such links." in shown


def test_a_plan_says_whose_kernels_it_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The bench measures host memory, on machines with GPUs, too."""
    path, said = write(tmp_path / "links.json", document()), "Kernels are those of CPUs"
    few = [*JOB, *FEW, "--hosts", 3]
    shown = " ".join(run(capsys, path, *few)[1].split())
    assert f"{said}, as the document is of host memory: on GPUs pass --device cuda." in shown
    assert "measured, " in shown and "H200" not in shown
    shown = " ".join(run(capsys, path, *few, "--device", "cuda")[1].split())
    assert said not in shown and "Kernels: selection and sums by stages on H200" in shown
    for words in ([path, *few, "--device", "cpu"], [*LINK, *few]):
        assert said not in " ".join(run(capsys, *words)[1].split())


def test_a_faster_network_makes_dense_steps_pay(capsys: pytest.CaptureFixture[str]) -> None:
    fast = ["--link", "400gbit", "--latency", "2us", "--parameters", "2e6", "--compute-ms", "50"]
    shown = run(capsys, *fast, *FEW, "--hosts", 2)[1]
    assert "Sparse steps do not pay here: dense" in shown and "DistributedOptimizer" not in shown


def test_a_row_whose_loss_was_not_measured_is_not_advised_alone(capsys: pytest.CaptureFixture[str]) -> None:
    shown = " ".join(run(capsys, *LINK, *JOB, "--hosts", 4)[1].split())
    assert "Its loss was not measured; the nearest: +3.1%(4) with 1.54 %." in shown and "every=4" in shown
    assert "The nearest losses: union 1.25 % every 4, not measured: +3.1%(4) with 1.54 %;" in shown
    assert "; union 6.25 % every 4, not measured: +8.0%(4) with 5 %" in shown
    assert "Losses with every above 1: docs/results/history-updates.md, an older rule" in shown
    known = shown.partition("The fastest row whose loss was measured, ")[2]
    assert re.match(r"\+4\.4%\(4\), is [\d.]+ times as fast as dense", known)
    line = known.partition("DistributedOptimizer(")[2]
    assert 'method="oktopk", density=0.0125' in line and "every=4" in line
    # 64 replicas are more than twice those of any measured loss
    shown = " ".join(run(capsys, *LINK, *JOB, *FEW, "--hosts", 64)[1].split())
    assert "Its loss was not measured. Nor was that of another row." in shown and "nearest" not in shown


def test_a_row_whose_loss_was_measured_is_advised_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--methods", "oktopk", "--densities", "0.0125", "--wires", "int4", "--hosts", 4]
    for every, loss in ((4, r"\+4\.4%\(4\)"), (1, r"-0\.7%\(4\)")):
        text = run(capsys, *LINK, *JOB, *words, "--every", every)[1]
        shown = " ".join(text.split())
        assert re.search(rf"^oktopk .*{loss}$", text, re.MULTILINE)
        advised = "Its loss, as measured above dense training, in brackets with how many replicas: "
        assert re.search(f"{advised}{loss}\\.", shown)
        assert ("Losses with every above 1" in shown) is (every > 1) and "nearest" not in shown


def test_a_plan_says_that_it_predicts_too_short_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Sparse steps were predicted too short in" in run(capsys, *LINK, *JOB, *FEW, "--hosts", 2)[1]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"version": 2}, "has version 2, and this oktopk reads version 1: run oktopk-bench again"),
        ({"version": True}, "has version True, and this oktopk reads version 1: run oktopk-bench again"),
        ({"version": 1.0}, "has version 1.0, and this oktopk reads version 1: run oktopk-bench again"),
        ({"kind": "oktopk-bench"}, "is no document of oktopk-bench: its kind is not 'oktopk-links'"),
        ({"hosts": []}, "is damaged: hosts are not names"),
        ({"hosts": "abc"}, "is damaged: hosts of the document is not a list"),
        ({"hosts": ["a", ""]}, "is damaged: hosts are not names"),
        ({"hosts": ["a", "b", "a"]}, "is damaged: hosts name 'a' twice"),
        ({"ranks_per_host": 0}, "is damaged: ranks_per_host 0 is not an integer >= 1"),
        ({"ranks_per_host": True}, "is damaged: ranks_per_host of the document is not an integer"),
        ({"device": "tpu"}, "is damaged: device 'tpu' is not one of cuda, cpu"),
        ({"device": ["cpu"]}, "is damaged: device of the document is not a text"),
        ({"date": None}, "is damaged: date of the document is not a text"),
        ({"between": {"model": MODEL | {"L": 0}}}, "is damaged: between: a latency of 0.0 s is not above 0"),
        ({"between": {"model": {"L": 1}}}, "is damaged: the model of between has no 'o'"),
        ({"between": {"model": MODEL | {"g": "x"}}}, "is damaged: g of the model of between is not a number"),
        (
            {"between": {"model": MODEL | {"g": 10**400}}},
            "is damaged: between: g inf of a link is not a finite",
        ),
        *(
            ({"between": {"model": MODEL | {name: value}}}, f"is damaged: between: {name} {value} of a link")
            for name in ("o", "g", "O", "S", "D")
            for value in (INFINITE, float("nan"), -1.0)
        ),
        ({"inside": {}}, "is damaged: inside has no 'model'"),
        ({"inside": 3}, "is damaged: inside is not an object"),
        ({"pairs": {}}, "is damaged: pairs of the document is not a list"),
        ({"pairs": [3]}, "is damaged: a pair is not an object"),
        ({"pairs": [PAIR | {"hosts": 3}]}, "is damaged: hosts of a pair is not a list"),
        ({"pairs": [PAIR | {"hosts": ["node1"]}]}, "is damaged: hosts of a pair are not two names"),
        (
            {"pairs": [PAIR | {"hosts": ["node1", "z"]}]},
            "is damaged: a pair is of 'z', which hosts do not name",
        ),
        ({"pairs": [PAIR | {"latency": 0}]}, "is damaged: latency 0 of a pair is not above 0"),
        ({"pairs": [PAIR | {"bytes_per_second": INFINITE}]}, "is damaged: bytes_per_second inf of a pair"),
        ({"kernels": KERNELS | {"sum": [0, -1]}}, "is damaged: sum of kernels is not two numbers of seconds"),
        ({"kernels": KERNELS | {"sum": [0]}}, "is damaged: sum of kernels is not two numbers of seconds"),
        ({"kernels": {}}, "is damaged: kernels has no 'select'"),
        ({"kernels": "x"}, "is damaged: kernels of the document is not an object"),
        ({"kernels": 3}, "is damaged: kernels of the document is not an object"),
    ],
)
def test_a_document_that_cannot_be_used_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: dict[str, Any], sentence: str
) -> None:
    path = write(tmp_path / "links.json", document(**more))
    status, shown, problem = run(capsys, path, *JOB, *FEW, "--hosts", 3)
    assert (status, shown) == (2, "")
    assert problem.startswith(f"oktopk-plan: {path} {sentence}") and problem.count("\n") == 1


@pytest.mark.parametrize("name", ["hosts", "inside", "between", "pairs", "kernels", "device", "library"])
def test_a_document_that_lacks_a_value_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    made = document()
    del made[name]
    path = write(tmp_path / "links.json", made)
    status, _, problem = run(capsys, path, *JOB, *FEW, "--hosts", 3)
    assert (status, problem) == (2, f"oktopk-plan: {path} is damaged: the document has no {name!r}\n")


def test_a_document_with_more_parameters_than_are_known_is_read(tmp_path: Path) -> None:
    """Raw files of 2026-11-29 have B, the bytes beyond which D counted then; it is from S on now."""
    made = document(between={"model": MODEL | {"B": 1e5}})
    between = read(write(tmp_path / "links.json", made)).between
    assert between == Level(**MODEL)


def test_a_document_that_is_no_json_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    for text in ("", '{"kind": "oktopk-links", ', "[" * 100_000, "\0"):
        path.write_text(text, encoding="utf-8")
        status, _, problem = run(capsys, path, *JOB, *FEW, "--hosts", 3)
        assert status == 2 and problem.startswith(f"oktopk-plan: {path} is damaged: it is no JSON document")
    path.write_text("[]", encoding="utf-8")
    assert "is no document of oktopk-bench" in run(capsys, path, *JOB, "--hosts", 3)[2]
    status, _, problem = run(capsys, tmp_path / "nowhere.json", *JOB, "--hosts", 3)
    assert status == 2 and problem.endswith("nowhere.json cannot be read: No such file or directory\n")


def test_a_slow_link_is_named_and_can_be_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = document(4)
    made["pairs"][3]["bytes_per_second"] = 1.25e8  # node2 and node3
    path = write(tmp_path / "links.json", made)
    status, _, problem = run(capsys, path, *JOB, *FEW, "--hosts", 4)
    assert status == 2
    assert problem == (
        "oktopk-plan: the link between node2 and node3 carries 125 MB/s, less than half of the others' median: "
        "mend it, choose hosts by --on, or pass --accept-slow\n"
    )
    assert run(capsys, path, *JOB, *FEW, "--hosts", 4, "--accept-slow")[0] == 0
    # the others' median holds for two hosts alone, too
    both = [path, *JOB, *FEW, "--hosts", 2, "--on", "node2,node3"]
    assert run(capsys, *both)[:2] == (2, "") and run(capsys, *both, "--accept-slow")[0] == 0
    assert run(capsys, path, *JOB, *FEW, "--hosts", 3, "--on", "node1,node2,node4")[0] == 0
    shown = " ".join(run(capsys, path, *JOB, *FEW, "--hosts", 2, "--on", "node1")[1].split())
    assert "Extrapolated: 1 host was measured, and 2 are taken to have such links." in shown
    status, _, problem = run(capsys, path, *JOB, *FEW, "--hosts", 2, "--on", "node1,node9")
    assert status == 2
    assert problem == (
        "oktopk-plan: the document is of hosts node1, node2, node3, node4, and has nothing about node9: "
        "run oktopk-bench on those\n"
    )
    for names in ("", "node1,", "node1,node1"):
        status, _, problem = run(capsys, path, *JOB, *FEW, "--hosts", 2, "--on", names)
        sentence = f"oktopk-plan: --on {names!r} does not name different hosts, by commas\n"
        assert (status, problem) == (2, sentence)


def test_a_plan_takes_the_rate_of_the_slowest_link_that_it_is_told_to_take(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The bench's ring went over the slow link, a tenth of the others' rate; a dense ring of large n is bytes alone."""
    made = document(4)
    made["pairs"][3]["bytes_per_second"] = 1.25e8  # node2 and node3
    made["between"]["model"] = MODEL | {"G": 8e-9}
    path = write(tmp_path / "links.json", made)

    def exchange(*words: Any) -> float:
        job = "--parameters", "1e9", "--compute-ms", "0", "--hosts", 3
        shown = run(capsys, path, *job, *FEW, *words)[1]
        (row,) = [line.split() for line in shown.splitlines() if line.startswith("dense  -       float32")]
        return float(row[8]) / 1e3

    slow = 4e9 * 4 / 3 / 1.25e8  # two thirds of the vector twice
    assert exchange("--accept-slow") == pytest.approx(slow, rel=0.01)
    assert exchange("--on", "node1,node2,node3", "--accept-slow") == pytest.approx(slow, rel=0.01)
    assert exchange("--on", "node1,node2,node4") == pytest.approx(slow / 10, rel=0.01)


@pytest.mark.parametrize("hindered", [0.0, 0.5])
@pytest.mark.parametrize("crossed", [True, False])
def test_bytes_take_what_they_take_on_the_slowest_link_that_is_chosen(hindered: float, crossed: bool) -> None:
    """Whether the bench's ring went over the slow link or not; `hindered`: how much of a pair's time is D."""
    made = document(4)
    rates = [1.25e9, 1.25e9, 1e9, 1.25e8, 1.25e9, 1.25e9]  # slower: node1 and node4, node2 and node3
    for pair, each in zip(made["pairs"], rates, strict=True):
        pair["bytes_per_second"] = each
    of_ring = 1 / (1.25e8 if crossed else 1e9)
    model = MODEL | {"G": (1 - hindered) * of_ring, "D": hindered * of_ring}
    links = links_of(made | {"between": {"model": model, "sizes": []}}, "")
    (slow,) = links.slow_pairs()

    def rate(some: Links) -> float:
        assert some.between is not None
        assert pytest.approx(hindered / (1 - hindered) * some.between.G) == some.between.D
        assert replace(some.between, G=model["G"], D=model["D"]) == Level(**model)
        return 1 / (some.between.G + some.between.D)

    assert rate(links.as_slow_as(slow)) == pytest.approx(1.25e8)
    assert rate(links.among(links.hosts)) == pytest.approx(1 / of_ring)
    assert rate(links.among(["node1", "node3", "node4"])) == pytest.approx(1e9)
    assert rate(links.among(["node1", "node2"])) == pytest.approx(1.25e9)
    both = links.among(["node2", "node3"])
    assert rate(both.as_slow_as(slow)) == pytest.approx(1.25e8)
    assert links.among(["node1"]).between == links.between, "no pair was measured"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([*LINK, *JOB, "--hosts", "1"], "one rank exchanges nothing: give several --hosts or several --gpus"),
        (
            ["--link", "1gbit", "--latency", "0us", *JOB, "--hosts", "2"],
            "'0us' is not a time such as 20us or 1ms, from 1e-12 to 1e4 s",
        ),
        (
            ["--link", "fast", "--latency", "1us", *JOB, "--hosts", "2"],
            "'fast' is not a rate such as 25gbit or 12GB/s",
        ),
        (
            ["--link", "1gbit", *JOB, "--hosts", "2"],
            "give the document of oktopk-bench, or --link and --latency",
        ),
        (
            [*LINK, "--parameters", "many", "--compute-ms", "5", "--hosts", "2"],
            "--parameters 'many' is not a number",
        ),
        (
            [*LINK, "--parameters", "0", "--compute-ms", "5", "--hosts", "2"],
            "--parameters 0 is not in [1, 2147483647]",
        ),
        (
            [*LINK, "--parameters", "7e9", "--compute-ms", "5", "--hosts", "2"],
            "--parameters 7e9 is not in [1, 2147483647], which one exchange takes",
        ),
        ([*LINK, *JOB, "--hosts", "5000"], "--hosts 5000 is above 4096, the most that a plan takes"),
        ([*LINK, *JOB, "--hosts", "2", "--gpus", "17"], "--gpus 17 is above 16, the most that a plan takes"),
        (
            ["--link", "1e-300gbit", "--latency", "1us", *JOB, "--hosts", "2"],
            "'1e-300gbit' is not a rate such as 25gbit or 12GB/s, from 1 to 1e15 bytes/s",
        ),
        (
            [*LINK, *JOB, "--hosts", "2", "--on", "a"],
            "--on is about a document of oktopk-bench, and none is given",
        ),
        (
            [*LINK, *JOB, "--hosts", "2", "--accept-slow"],
            "--accept-slow is about a document of oktopk-bench, and none is given",
        ),
        (
            [*LINK, "--parameters", "1e6", "--compute-ms", "nan", "--hosts", "2"],
            "--compute-ms nan is not a time",
        ),
        ([*LINK, *JOB, "--hosts", "2", "--densities", "0"], "density 0.0 is not in (0, 1]"),
        ([*LINK, *JOB, "--hosts", "2", "--densities", "0.5"], "density 0.5 is above 0.25: steps are dense"),
        (
            [*LINK, *JOB, "--hosts", "9", "--densities", "1e-6"],
            "density 1e-06 of 2000000 elements are fewer entries",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    status, shown, problem = run(capsys, *words)
    assert (status, shown) == (2, "")
    assert problem.startswith(f"oktopk-plan: {sentence}") and problem.count("\n") == 1


@pytest.mark.parametrize("hosts", ["0", "-1", "two", "1e3", "", "9" * 40])
def test_a_number_of_hosts_is_an_integer(capsys: pytest.CaptureFixture[str], hosts: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run(capsys, *LINK, *JOB, f"--hosts={hosts}")
    assert ended.value.code == 2
    assert f"--hosts: {hosts!r} is not an integer from 1 on" in capsys.readouterr().err


def test_a_document_of_one_host_or_one_rank_a_host_lacks_links(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    alone = write(tmp_path / "alone.json", document(1))
    assert "is of one host, and has no link between hosts" in run(capsys, alone, *JOB, "--hosts", 2)[2]
    assert run(capsys, alone, *JOB, *FEW, "--hosts", 1, "--gpus", 2)[0] == 0
    single = write(tmp_path / "single.json", document(ranks_per_host=1))
    status, _, problem = run(capsys, single, *JOB, "--hosts", 2, "--gpus", 2)
    assert status == 2 and "is of one rank a host, and has no link inside one" in problem


def test_units_of_links() -> None:
    assert (rate_of("25gbit"), rate_of("100mbit"), rate_of("12 GB/s")) == (3.125e9, 1.25e7, 1.2e10)
    assert [seconds_of(text) for text in ("20us", "1.5ms", "2s")] == pytest.approx([2e-5, 1.5e-3, 2.0])
    for wrong in ("20", "us", "-1us", "infs"):
        with pytest.raises(LinksError):
            seconds_of(wrong)


def test_rows_count_a_step_by_its_parts() -> None:
    network = Network(Level.of_rate(1e10, 1e-6), Level.of_rate(1e8, 5e-5), 2)
    job = Job(2_000_000, 0.01, 4, 2)
    kernels = Kernels({"select": (0.0, 1e-9), "vector": (0.0, 1e-10)}, "made up")
    rows = sparse_rows(job, network, kernels, ["union"], [0.0125], ["int4"], (), [1, 4])
    assert [(row.levels, row.every) for row in rows] == [("hosts", 1), ("hosts", 4), ("flat", 1), ("flat", 4)]
    for row in rows:
        assert row.seconds == pytest.approx(job.compute + row.select + row.exchange)
        assert 0 < row.wait < row.exchange
    # a host is one replica: selection reads a shard, and a host sends what one rank would
    assert rows[0].select == pytest.approx(rows[2].select / 2)
    assert rows[0].host_bytes < 0.6 * rows[2].host_bytes
    assert rows[1].host_bytes == pytest.approx(rows[0].host_bytes / 4)
    dense, half = dense_rows(job, network)
    assert dense.seconds == pytest.approx(job.compute + dense.exchange - dense.hides)
    assert dense.hides == pytest.approx(2 / 3 * job.compute) and half.host_bytes == dense.host_bytes / 2
    assert best_first([dense, rows[0]])[0] is rows[0]


def test_entries_go_over_a_grid_where_that_is_faster_and_not_by_calls_of_kernels_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job, none = Job(1_000_000, 0.01, 36, 1), Kernels({}, "made up")
    fast, slow = (Level.of_rate(rate, 2e-5) for rate in (1.25e10, 1.25e7))

    def rows(link: Level, kernels: Kernels, exchange: str = "auto", method: str = "oktopk") -> list[Row]:
        more: dict[str, Any] = {"wires": ["float32"], "every": [1], "exchange": exchange}
        return sparse_rows(job, Network(link, link), kernels, [method], [0.01], **more)

    for link, kernels in ((fast, none), (slow, none), (slow, Kernels({"sum": (1e-2, 0.0)}, "made up"))):
        (direct,), (grid,), (row,) = (rows(link, kernels, each) for each in ("direct", "grid", "auto"))
        assert grid.grid and not direct.grid and row == (grid if link is fast else direct)
    assert grid.seconds < direct.seconds, "calls do not decide"
    assert not rows(fast, none, method="union")[0].grid
    words = ["--link", "100gbit", "--latency", "20us", "--methods", "oktopk", "--hosts", "36"]
    shown = run(capsys, *words, "--parameters", "2e6", "--compute-ms", "0")[1]
    assert re.search("^grid +1.25 %", shown, re.MULTILINE) and 'exchange="grid")' in shown
    assert 'grid: oktopk with exchange="grid", whose entries go over a grid of ranks.' in shown


def test_memory_is_that_of_the_docstring() -> None:
    settings = Settings(density=0.01, levels="flat")
    assert memory_of(Step("union", 1_000_000, 4, 2, settings)) == 12e6 + 40 * 10_000
    two = memory_of(Step("union", 1_000_000, 4, 2, Settings(density=0.01)))
    assert two == 20e6 + (12e6 + 40 * 10_000) / 2


def test_the_table_keeps_to_its_columns_whatever_the_figures() -> None:
    wide = Row(
        "oktopk", 0.0123, "bfloat16", "hosts", 1000, 98765.4321, 9e9, 9e9, 9e9, 0.0, 9e15, 9e15, "+10.1%(16)"
    )
    lines = table(
        [wide, *dense_rows(Job(10**9, 0.1, 2, 1), Network(*[Level.of_rate(1e3, 1.0)] * 2))], 1e7
    ).splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) == 4


def losses_of(page: str) -> dict[tuple[str, float, int], set[float]]:
    """(method, density, replicas) -> percent, of the tables of updates.md: of a row, and what it takes from rows above."""
    found: dict[tuple[str, float, int], set[float]] = {}
    text = page.partition("## Text that is read once")[2].partition("Rivals on this text")[0]
    method, replicas = "", 4
    for row in text.splitlines():
        cells = [cell.strip(" *") for cell in row.split("|")[1:-1]]
        if len(cells) != 5:
            continue
        replicas = 16 if "16 workers" in cells[0] else replicas if cells[0].startswith("the same") else 4
        method = "union" if "`union`" in cells[0] else "oktopk" if "Ok-Topk" in cells[0] else method
        density = re.search(r"([\d.]+) %", cells[0].partition("from ")[0])
        percent = re.match(r"\**(-?[\d.]+) %", cells[2])
        if density and percent and "beta1 0.8" not in cells[0]:
            key = method, float(density[1]) / 100, replicas
            found.setdefault(key, set()).add(float(percent[1]))
    four = page.partition("| | share 0.05, beta1 0.5 or 0.48 |")[2].partition("- **Every")[0]
    sixteen = page.partition("| share 0.02, beta1 0.7 | 1/121 |")[2].partition("\n\n")[0]
    rows = [(4, row) for row in four.splitlines()]
    rows += [(16, row) for row in sixteen.splitlines() if "share 0.02" in row]
    for replicas, row in rows:
        match = re.match(r"\| \**(`union`|Ok-Topk)\**, ([\d.]+) %", row)
        loss = re.search(r"\b(1\.\d{3})\b", row.partition("%")[2])
        if match and loss:
            key = match[1].strip("`").lower().replace("-", ""), float(match[2]) / 100, replicas
            found.setdefault(key, set()).add(round(100 * (float(loss[1]) / 1.608 - 1), 1))
    return found


def test_losses_are_those_of_the_results_for_method_density_and_replicas() -> None:
    page = (ROOT / "docs" / "results" / "updates.md").read_text(encoding="utf-8")
    assert "dense training with tuned betas, 1.608 with 17.1 M" in page
    known = losses_of(page)
    for loss in losses.LOSSES:
        if loss.every == 1:
            assert loss.percent in known[loss.method, loss.density, loss.replicas], loss
    assert losses.loss_of("union", 0.0125, 1, 5) == "-1.1%(4)"
    assert [losses.loss_of("oktopk", 0.0125, 1, n) for n in (2, 8, 32)] == ["-0.7%(4)", *["+10.9%(16)"] * 2]
    assert losses.loss_of("union", 0.0125, 1, 33) == losses.loss_of("oktopk", 0.0125, 1, 64) == "-"
    assert losses.loss_of("union", 0.0125, 4, 4) == losses.loss_of("union", 0.01, 1, 4) == "-"
    assert losses.nearest_loss("union", 0.01, 1, 4) == "-1.1%(4) with 1.25 %"
    assert losses.nearest_loss("oktopk", 0.0625, 4, 8) == "+4.4%(4) with 1.25 %"
    assert losses.nearest_loss("oktopk", 0.0625, 4, 9) == losses.nearest_loss("union", 0.01, 3, 4) == ""


def test_losses_of_exchanges_every_4_steps_are_those_of_the_results() -> None:
    page = (ROOT / "docs" / "results" / "history-updates.md").read_text(encoding="utf-8")
    four = page.partition("### Four workers")[2].partition("###")[0]
    known = {}
    # the column beside dense training with the beta2 of updates
    rows = r"^\| (?:method )?(`union`|Ok-Topk), ([\d.]+) %, every 4 \|[^|]*\| (1?[\d.]+) \((\w+)[^|]*\|[^|]*\| ([\d.]+) %"
    for method, density, loss, seeds, percent in re.findall(rows, four, re.MULTILINE):
        assert float(percent) == round(100 * (float(loss) / 4.721 - 1), 1)
        key = method.strip("`").lower().replace("-", ""), round(float(density) / 100, 6)
        known[key] = float(percent), {"one": 1, "three": 3}[seeds]
    assert len(known) == 3
    assert "`union` at 6.25 % (1.849), and at 5 % every 4\n  steps (1.737)" in page
    known["union", 0.05] = round(100 * (1.737 / 1.608 - 1), 1), 1
    every = [loss for loss in losses.LOSSES if loss.every == 4]
    assert {(loss.method, loss.density): (loss.percent, loss.seeds) for loss in every} == known
    assert {loss.replicas for loss in every} == {4} and {loss.every for loss in losses.LOSSES} == {1, 4}


def test_times_of_kernels_are_those_of_the_results() -> None:
    def stages(file: str, length: int, method: str) -> dict[str, float]:
        (run,) = (
            each
            for each in json.loads((ROOT / "docs" / "results" / file).read_text("utf-8"))["runs"]
            if each["length"] == length
        )
        (found,) = (each for each in run["methods"] if each["name"] == method)
        return {name: stage["mean"] for name, stage in found["stages"]["regular"].items()}

    small, large = (stages("gpu-net-10gbit.json", n, "oktopk-flat-plain") for n in (14_728_266, 306_535_400))
    grown = 306_535_400 - 14_728_266
    cuda = DEVICES["cuda"].times
    slope = (large["select"] - small["select"]) / grown
    assert cuda["select"] == pytest.approx((small["select"] - slope * 14_728_266, slope), rel=0.02)
    slope = (large["reduce"] - small["reduce"]) / (0.01 * grown)
    assert cuda["sum"] == pytest.approx((small["reduce"] - slope * 147_283, slope), rel=0.02)
    host = stages("shared-memory.json", 14_728_266, "oktopk")
    cpu = DEVICES["cpu"].times
    assert cpu["select"][1] == pytest.approx(host["select"] / 14_728_266, rel=0.03)
    assert cpu["sum"][1] == pytest.approx(host["reduce"] / 147_283, rel=0.03)
    assert cpu["entries"][1] == pytest.approx(host["apply"] / 2 / 147_283, rel=0.03)
    dense = stages("shared-memory.json", 14_728_266, "dense")
    assert cpu["vector"][1] == pytest.approx(dense["select"] / 14_728_266, rel=0.03)


@pytest.mark.pictures
def test_a_picture_is_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = sys.modules[main.__module__]
    assert vars(command)["_MOST_HOSTS"] == 512
    monkeypatch.setattr(command, "_MOST_HOSTS", 16)  # takes a second
    path = tmp_path / "step.svg"
    status, shown, _ = run(capsys, *LINK, *JOB, *FEW, "--hosts", 4, "--picture", path)
    assert status == 0 and f"{path}: the step over 1 to 16 hosts." in " ".join(
        shown.split()
    )  # the path may fill a line
    assert "<svg" in path.read_text(encoding="utf-8")


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_replayed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture, "find_spec", lambda name: name)
    monkeypatch.setattr(sys.modules[main.__module__], "dense_rows", None)  # it would raise
    (tmp_path / "there.svg").mkdir()
    for name, sentence in (
        ("no/step.svg", f"cannot be written: there is no folder {tmp_path / 'no'}"),
        ("there.svg", "cannot be written: it is a folder"),
        ("step.xyz", "is no picture's name: take one that ends in .svg or .png"),
    ):
        words = [*LINK, *JOB, *FEW, "--hosts", 4, "--picture", tmp_path / name]
        status, _, problem = run(capsys, *words)
        assert (status, problem) == (2, f"oktopk-plan: {tmp_path / name} {sentence}\n")


def test_a_picture_without_matplotlib_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    status, _, problem = run(capsys, *LINK, *JOB, *FEW, "--hosts", 2, "--picture", "step.svg")
    assert (status, problem) == (
        2,
        "oktopk-plan: a picture needs matplotlib, which is not installed: pip install matplotlib\n",
    )


def test_a_reader_that_has_enough_ends_a_plan_without_a_word() -> None:
    command = [sys.executable, "-m", "oktopk.plan", *LINK, *JOB, *FEW, "--hosts", "2"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        assert done.stdout is not None and done.stderr is not None
        done.stdout.close()
        assert done.stderr.read() == b""
    assert done.returncode == 0


def test_a_document_may_have_what_coding_takes_on_each_wire(tmp_path: Path) -> None:
    """Of wires that it does not name it is what "code" says, and where that is missing the document is damaged."""
    times = document()["kernels"] | {"code int4": [0.0, 5e-8]}
    links = read(write(tmp_path / "links.json", document(kernels=times)))
    network, at = links.network(3, 1), WORK.index("code")
    assert links.kernels is not None
    assert [links.kernels.rates(network, wire)[at, 1] for wire in ("float32", "int4")] == [8e-9, 5e-8]
    step = Step("oktopk", 4_000_000, 3, 1, Settings(density=0.01, wire="int4"))
    without = Kernels({**links.kernels.times, code_of("int4"): (0.0, 0.0)}, "")
    assert predict(step, network, links.kernels).kernels > predict(step, network, without).kernels
    for wrong, text in (({"code int4": [0.0]}, "code int4 of kernels is not two numbers"), ({}, "no 'code'")):
        left = {name: each for name, each in times.items() if name != "code"} | wrong
        with pytest.raises(LinksError, match=text):
            read(write(tmp_path / "links.json", document(kernels=times | wrong if wrong else left)))


def test_documents_round_trip(tmp_path: Path) -> None:
    links = read(write(tmp_path / "links.json", document()))
    network = links.network(3, 2)
    assert network.between == Level(**MODEL)
    assert np.array_equal(network.levels[1], [*MODEL.values()])
    with pytest.raises(ValueError, match="needs no DistributedOptimizer"):
        line_of(dense_rows(Job(1000, 0.1, 2, 1), network)[0])
