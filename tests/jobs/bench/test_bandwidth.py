"""Charts of documents: step time over bandwidth, bytes over ranks per host, words over ranks."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.bench.document import BenchError, read

script: Any = importlib.import_module("docs.results.bandwidth")  # without types
bandwidth, chart, look, main = script.bandwidth, script.chart, script.look, script.main
ranks_per_host = script.ranks_per_host
RESULTS = Path(__file__).parents[3] / "docs" / "results"
HOSTS = [f"oktopk-{row}" for row in ("flat-plain", "flat-int4", "hosts-plain", "hosts-float32", "hosts-int4")]


def at_rate(rate: str, factor: float) -> dict[str, Any]:
    """The published document at 1 Gb/s as if measured at another rate, every step longer by a factor."""
    document = read(RESULTS / "network-1gbit.json")
    (run,) = document["runs"]
    run["network"] = f"4 hosts, TCP over {rate} links"
    for method in run["methods"]:
        method["seconds"]["all"]["mean"] *= factor
    return document


def published(folder: str) -> list[str]:
    """Paths of the documents that a picture of docs/results is drawn from."""
    return [str(path) for path in sorted(RESULTS.glob(folder))]


def test_every_method_has_one_point_a_document() -> None:
    lines = chart([at_rate("1gbit", 1.0), at_rate("100mbit", 8.0), at_rate("2.5gbit", 0.5)]).lines
    assert len(lines) == 9
    for line in lines:
        assert line.x.tolist() == [0.1, 1.0, 2.5]
        assert line.y == pytest.approx(line.y[1] * np.array([8, 1, 0.5]))


def test_rates_and_hosts_are_read_from_the_network() -> None:
    assert bandwidth({"network": "2 hosts, TCP over unshaped links, staged through host memory"}) == math.inf
    assert bandwidth({"network": "2 hosts, TCP over 25gbit links, device memory over UCX"}) == 25
    assert ranks_per_host({"network": "2 hosts, TCP over 25gbit links", "ranks": 8}) == 4
    for read_from, missing in ((bandwidth, "rate of links"), (ranks_per_host, "hosts")):
        with pytest.raises(BenchError, match=f"network 'shared memory' names no {missing}"):
            read_from({"network": "shared memory"})


def test_a_host_sends_what_its_ranks_send_if_counted() -> None:
    documents = [read(path) for path in published("hosts-bytes-?.json")]
    method = documents[1]["runs"][0]["methods"][0]
    lines = {line.label: line for line in chart(documents, kind="bytes").lines}
    assert lines["flat, plain"].x.tolist() == [1, 2, 4]
    assert lines["flat, plain"].y[1] == 2 * method["bytes_between"]["mean"]
    both = read(RESULTS / "three-runs" / "bandwidth-1gbit-1.json")
    assert [method["name"] for method in both["runs"][0]["methods"]] == ["mpi-ring", "oktopk"]
    assert [line.label for line in chart([both], kind="bytes").lines] == ["Ok-Topk"]


def test_words_stand_between_the_bounds() -> None:
    lines = {line.label: line for line in chart([read(RESULTS / "sweep.json")], kind="words").lines}
    ours = lines["Ok-Topk"]
    assert ours.x.tolist() == [2, 4, 8, 16, 32, 64]
    assert np.all(lines["2k(P−1)/P"].y < ours.y) and np.all(ours.y < lines["6k(P−1)/P"].y)
    # 2k log2 P words of k = 2000
    assert lines["gTopk, busiest rank"].y[-1] == pytest.approx(2 * 2000 * 6, rel=0.02)
    assert "TopkA, busiest rank" not in lines


def test_of_several_lengths_one_is_chosen() -> None:
    document = at_rate("1gbit", 1.0)
    (run,) = document["runs"]
    document["runs"].append(run | {"length": 99})
    with pytest.raises(BenchError, match=r"several lengths: choose one of \[14728266, 99\] by --length"):
        chart([document])
    assert [line.y.tolist() for line in chart([document], length=99).lines] == [
        line.y.tolist() for line in chart([at_rate("1gbit", 1.0)]).lines
    ]
    with pytest.raises(BenchError, match="length 5 is in none of the documents"):
        chart([document], length=5)


def test_rows_of_hosts_are_told_apart() -> None:
    names = [f"oktopk-{levels}-{wire}" for levels in ("flat", "hosts") for wire in ("plain", "int4")]
    looks = [look(name) for name in [*names, "nccl", "nccl-bf16", "oktopk"]]
    assert looks[1]["label"] == "flat, int4" and looks[2]["label"] == "two levels, plain"
    assert len({(one["colour"], str(one["dashes"])) for one in looks}) == len(looks)


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("picture", "documents", "words"),
    [
        ("bandwidth.svg", "bandwidth-*.json", []),
        ("hosts-bytes.svg", "hosts-bytes-?.json", ["--bytes", "--methods", *HOSTS]),
        ("sweep.svg", "sweep.json", ["--words"]),
    ],
)
def test_the_pictures_of_the_pages_are_drawn_from_their_documents(
    tmp_path: Path, picture: str, documents: str, words: list[str]
) -> None:
    assert main([*published(documents), *words, "--output", str(tmp_path / picture)]) == 0
    assert (tmp_path / picture).read_bytes() == (RESULTS / picture).read_bytes()


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"runs": []}, "words", "the documents have no runs"),
        ({"kind": "rows table"}, "times", "documents of the kind 'rows table' cannot be drawn here"),
        ({}, "bytes", "no method has this figure: Bytes that a host sends in a step"),
    ],
)
def test_documents_without_what_is_drawn_are_refused(change: dict[str, Any], kind: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        chart([at_rate("1gbit", 1.0) | change], kind=kind)


def test_one_picture_is_drawn_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["a.json", "--words", "--bytes", "--output", "a.svg"])
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "nccl"], "method 'nccl' is in none of the documents: dense, oktopk"),
        (["--length", "7"], "length 7 is in none of the documents"),
        (["--output", "nowhere/a.svg"], "a.svg cannot be written"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(at_rate("1gbit", 1.0)), encoding="utf-8")
    assert main(["--output", str(tmp_path / "a.svg"), *words, "--", str(path)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a.svg").exists()
    assert main([str(tmp_path / "none.json"), "--output", "a.svg"]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err
