"""The plan: what it prints, what it knows, and what it refuses, one sentence each."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oktopk.plan import losses, picture
from oktopk.plan.__main__ import main
from oktopk.plan.rows import Job, Row, best_first, dense_rows, line_of, memory_of, sparse_rows
from oktopk.plan.table import table
from oktopk.replay.links import DEVICES, Links, LinksError, assumed, rate_of, read, seconds_of
from oktopk.replay.network import Level, Network
from oktopk.replay.prediction import Kernels, predict, ring_seconds
from oktopk.replay.recording import Step
from oktopk.settings import Settings
from tests.launched import ROOT
from tests.links import MODEL, document, write

JOB = ["--parameters", "2e6", "--compute-ms", "5"]
FEW = ["--methods", "union", "--densities", "0.0125", "--wires", "int4"]
LINK = ["--link", "1gbit", "--latency", "50us"]


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
    assert "Extrapolated: more than 64 exchange" in shown


def test_a_faster_network_makes_dense_steps_pay(capsys: pytest.CaptureFixture[str]) -> None:
    fast = ["--link", "400gbit", "--latency", "2us", "--parameters", "2e6", "--compute-ms", "50"]
    assert "Sparse steps do not pay here: dense" in run(capsys, *fast, *FEW, "--hosts", 2)[1]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"version": 2}, "has version 2, and this is oktopk for version 1: run oktopk-bench again"),
        ({"kind": "oktopk-bench"}, "is no document of oktopk-bench: its kind is not 'oktopk-links'"),
        ({"hosts": []}, "is damaged: hosts are not names"),
        ({"ranks_per_host": 0}, "is damaged: ranks_per_host 0 is not an integer >= 1"),
        ({"device": "tpu"}, "is damaged: device 'tpu' is not one of cuda, cpu"),
        ({"between": {"model": MODEL | {"L": 0}}}, "is damaged: between: a latency of 0.0 s is not above 0"),
        ({"between": {"model": {"L": 1}}}, "is damaged: it lacks 'o'"),
        (
            {"pairs": [{"hosts": ["a", "b"], "latency": 0, "bytes_per_second": 1}]},
            "is damaged: latency 0 is not above 0",
        ),
        ({"kernels": {"select": [0, -1]}}, "is damaged: a time of kernels is not a number of seconds"),
        ({"kernels": 3}, "is damaged: "),
    ],
)
def test_a_document_that_cannot_be_used_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: dict[str, Any], sentence: str
) -> None:
    path = write(tmp_path / "links.json", document(**more))
    status, shown, problem = run(capsys, path, *JOB, *FEW, "--hosts", 3)
    assert (status, shown) == (2, "")
    assert problem.startswith(f"oktopk-plan: {path} {sentence}") and problem.count("\n") == 1


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
    links = read(path)
    assert pytest.approx(10 * links.between.G) == links.as_slow_as_the_slowest().between.G
    assert run(capsys, path, *JOB, *FEW, "--hosts", 3, "--on", "node1,node2,node4")[0] == 0
    status, _, problem = run(capsys, path, *JOB, *FEW, "--hosts", 2, "--on", "node1,node9")
    assert status == 2
    assert problem == (
        "oktopk-plan: the document is of hosts node1, node2, node3, node4, and has nothing about node9: "
        "run oktopk-bench on those\n"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([*LINK, *JOB, "--hosts", "1"], "one rank exchanges nothing: give several --hosts or several --gpus"),
        (
            ["--link", "1gbit", "--latency", "0us", *JOB, "--hosts", "2"],
            "'0us' is not a time such as 20us or 1ms, above 0",
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
        ([*LINK, *JOB, "--hosts", "5000"], "5000 hosts of 1 ranks are more than 4096 of 16"),
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
    assert max(map(len, lines)) <= 101 and len(lines) == 4


def test_losses_are_those_of_the_results() -> None:
    page = (ROOT / "docs" / "results" / "updates.md").read_text(encoding="utf-8")
    text = page.partition("## Text that is read once")[2].partition("Rivals on this text")[0]
    rows = [row for row in text.splitlines() if row.startswith("| ")]
    for loss in losses.LOSSES:
        shown = f"{loss.percent:.1f} %"
        assert any(shown in row for row in rows), loss
    assert losses.loss_of("union", 0.0125, 1, 5) == "-1.1%(4)"
    assert losses.loss_of("union", 0.0125, 1, 64) == "+5.1%(16)"
    assert losses.loss_of("union", 0.0125, 4, 4) == losses.loss_of("union", 0.01, 1, 4) == "-"


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


def compared() -> dict[str, tuple[float, float]]:
    """Title -> seconds predicted from the raw links, and measured, of the page's table."""
    results, n = ROOT / "docs" / "results", 4_000_000
    (run,) = json.loads((results / "plan-steps-100mbit.json").read_text(encoding="utf-8"))["runs"]
    assert (run["length"], run["density"], run["ranks"]) == (n, 0.0125, 4)
    medians = {each["name"]: each["seconds"]["all"]["median"] for each in run["methods"]}

    def predicted(
        links: Links, method: str, density: float, wire: str = "float32", levels: str = "auto"
    ) -> float:
        settings = Settings(density=density, wire=wire, levels=levels)  # type: ignore[arg-type]
        hosts, many = len(links.hosts), links.ranks_per_host
        return predict(
            Step(method, n, hosts, many, settings), links.network(hosts, many), links.kernels
        ).seconds

    links = read(results / "plan-links-100mbit.json")
    rows = {"4 hosts: ring": (ring_seconds(links.network(4, 1), 4, 4 * n), medians["mpi-ring"])}
    rows["4 hosts: Rabenseifner"] = predicted(links, "dense", 1.0, "plain"), medians["dense"]
    rows["4 hosts: Ok-Topk, 1.25 %, float32"] = predicted(links, "oktopk", 0.0125), medians["oktopk"]
    rows["4 hosts: `union`, 1.25 %, float32"] = predicted(links, "union", 0.0125), medians["union"]
    rows["4 hosts: Ok-Topk, 1.25 %, int4"] = (
        predicted(links, "oktopk", 0.0125, "int4"),
        medians["oktopk-flat-int4"],
    )
    for title, name, density in (
        ("8 hosts", "plan-links-100mbit-8-hosts.json", 0.05),
        ("4 hosts of 2 ranks", "plan-links-100mbit-8.json", 0.0125),
    ):
        links = read(results / name)
        steps = json.loads((results / name).read_text(encoding="utf-8"))["steps"]
        took = {step["method"]: step["seconds"] for step in steps}
        if title == "8 hosts":
            rows[f"{title}: Rabenseifner"] = predicted(links, "dense", 1.0, "plain"), took["dense"]
        of = f", {100 * density:g} %, float32"
        rows[f"{title}: Ok-Topk{of}"] = predicted(links, "oktopk", density), took["oktopk"]
        rows[f"{title}: `union`{of}"] = predicted(links, "union", density), took["union"]
    return rows


def test_predicted_and_measured_steps_of_the_page_are_those_of_the_raw_files() -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    table = ["| step | predicted, ms | measured, ms | off |", "|---|---|---|---|"]
    for title, (predicted, measured) in compared().items():
        off = f"{100 * (predicted / measured - 1):.0f}".replace("-", "−")
        table.append(f"| {title} | {1e3 * predicted:,.1f} | {1e3 * measured:,.1f} | {off} % |")
    assert "\n".join(table) in page


def rows_of_scale() -> dict[int, list[str]]:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    text = page.partition("### How far it scales")[2].partition("### What is checked")[0]
    rows = re.findall(r"^\| ([\d,]+) \| (.*) \|$", text, re.MULTILINE)
    return {int(ranks.replace(",", "")): cells.split(" | ") for ranks, cells in rows}


def check_scale(ranks: int, cells: list[str]) -> None:
    step = Step("oktopk", 133_547_324, ranks, 1, Settings(density=0.01))
    network = Network(Level.of_rate(1e11, 1e-6), Level.of_rate(12.5e9, 5e-6))
    found = predict(step, network, Kernels({}, "none"))
    ring = ring_seconds(network, ranks, 2 * step.length)
    assert cells == [f"{1e3 * found.seconds:.2f}", f"{1e3 * found.handled:.2f}", f"{1e3 * ring:.1f}"]


def test_the_steps_of_many_ranks_are_those_of_the_page() -> None:
    rows = rows_of_scale()
    assert [*rows] == [16, 64, 256, 1024, 4096]
    for ranks in (16, 64, 256):
        check_scale(ranks, rows[ranks])


@pytest.mark.long("a step of 1,024 ranks and one of 4,096; `make test` has up to 256")
@pytest.mark.timeout(400)
def test_so_are_those_of_thousands() -> None:
    rows = rows_of_scale()
    for ranks in (1024, 4096):
        check_scale(ranks, rows[ranks])


def test_predicted_steps_of_gpu_hosts_are_those_of_the_page() -> None:
    pages = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("plan.md", "results/hosts.md")]
    measured = pages[1].partition("| n = 133,547,324 |")[2].partition("| n = 306,535,400 |")[0]
    network, n = assumed("9gbit", "40us", "cuda").network(2, 2), 133_547_324
    found = {}
    for wire, width in (("float32", 4), ("bfloat16", 2)):
        found[f"dense, {wire}"] = ring_seconds(network, 2, width * n), rf"\| NCCL, {wire} \|"
    for wire in ("plain", "float32", "bfloat16", "int8", "int4"):
        settings = Settings(density=0.01, wire=wire, levels="hosts")  # type: ignore[arg-type]
        seconds = predict(Step("oktopk", n, 2, 2, settings), network, DEVICES["cuda"]).seconds
        found[f"Ok-Topk, `{wire}`"] = seconds, rf"\| two levels, `{wire}` \|"
    for title, (seconds, start) in found.items():
        row = re.search(start + r"[^|]*\|[^|]*\|[^|]*\| ([\d.]+)", measured)
        assert row, title
        off = f"{100 * (1e3 * seconds / float(row[1]) - 1):.0f}".replace("-", "−")
        assert f"| {title} | {1e3 * seconds:,.2f} | {float(row[1]):,.2f} | {off} % |" in pages[0], title


@pytest.mark.pictures
def test_a_picture_is_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = sys.modules[main.__module__]
    assert vars(command)["_MOST_HOSTS"] == 512
    monkeypatch.setattr(command, "_MOST_HOSTS", 16)  # takes a second
    path = tmp_path / "step.svg"
    status, shown, _ = run(capsys, *LINK, *JOB, *FEW, "--hosts", 4, "--picture", path)
    assert status == 0 and f"{path}: the step over 1 to 16 hosts." in shown
    assert "<svg" in path.read_text(encoding="utf-8")
    status, _, problem = run(
        capsys, *LINK, *JOB, *FEW, "--hosts", 4, "--picture", tmp_path / "no" / "step.svg"
    )
    assert status == 2 and "cannot be written" in problem


def test_a_picture_without_matplotlib_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    status, _, problem = run(capsys, *LINK, *JOB, *FEW, "--hosts", 2, "--picture", "step.svg")
    assert (status, problem) == (
        2,
        "oktopk-plan: a picture needs matplotlib, which is not installed: pip install matplotlib\n",
    )


def test_a_plan_imports_neither_torch_nor_mpi() -> None:
    code = (
        "import sys; sys.modules.update({'torch': None, 'mpi4py.MPI': None, 'matplotlib': None, 'cupy': None})\n"
        f"from oktopk.plan.__main__ import main; sys.exit(main({[*LINK, *JOB, *FEW, '--hosts', '2']}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "optimizer = DistributedOptimizer(" in done.stdout


def test_a_reader_that_has_enough_ends_a_plan_without_a_word() -> None:
    command = [sys.executable, "-m", "oktopk.plan", *LINK, *JOB, *FEW, "--hosts", "2"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        assert done.stdout is not None and done.stderr is not None
        done.stdout.close()
        assert done.stderr.read() == b""
    assert done.returncode == 0


def test_documents_round_trip(tmp_path: Path) -> None:
    links = read(write(tmp_path / "links.json", document()))
    network = links.network(3, 2)
    assert network.between == Level(**MODEL)
    assert np.array_equal(network.levels[1], [*MODEL.values()])
    with pytest.raises(ValueError, match="needs no DistributedOptimizer"):
        line_of(dense_rows(Job(1000, 0.1, 2, 1), network)[0])
