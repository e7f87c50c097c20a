"""Step time over bandwidth, from documents at several rates."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from jobs.bench.bandwidth import bandwidth, main, points
from jobs.bench.document import BenchError, read
from jobs.bench.figures import look

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def at_rate(rate: str, factor: float) -> dict[str, Any]:
    """The published document at 1 Gb/s as if measured at another rate, every step longer by a factor."""
    document = read(RESULTS / "network-1gbit.json")
    (run,) = document["runs"]
    run["network"] = f"4 hosts, TCP over {rate} links"
    for method in run["methods"]:
        method["seconds"]["all"]["mean"] *= factor
    return document


def hosts_document(ranks: int, factor: float) -> dict[str, Any]:
    """The published document of four hosts as if measured with other ranks, each of which sends more by a factor."""
    document = read(RESULTS / "hosts-1gbit.json")
    (run,) = document["runs"]
    run["ranks"] = ranks
    for method in run["methods"]:
        method["bytes_between"]["mean"] *= factor
    return document


def write(folder: Path, *documents: dict[str, Any]) -> list[str]:
    """The paths of documents that were put into files."""
    paths = [folder / f"{number}.json" for number in range(len(documents))]
    for path, document in zip(paths, documents, strict=True):
        path.write_text(json.dumps(document), encoding="utf-8")
    return list(map(str, paths))


def test_every_method_has_one_point_a_document_in_the_order_of_the_rates() -> None:
    found = points([at_rate("1gbit", 1.0), at_rate("100mbit", 8.0), at_rate("2.5gbit", 0.5)])
    assert len(found) == 9
    for line in found.values():
        assert [rate for rate, _ in line] == [0.1, 1.0, 2.5]
        middle = line[1][1]
        assert [seconds for _, seconds in line] == pytest.approx([8 * middle, middle, middle / 2])


def test_the_rate_of_links_is_read_from_the_network() -> None:
    assert bandwidth({"network": "2 hosts, TCP over unshaped links, staged through host memory"}) == math.inf
    assert bandwidth({"network": "2 hosts, TCP over 25gbit links, device memory over UCX"}) == 25
    with pytest.raises(BenchError, match="network 'shared memory' names no rate"):
        bandwidth({"network": "shared memory"})


def test_a_host_sends_what_all_its_ranks_send() -> None:
    one, two = hosts_document(4, 2.0), hosts_document(8, 1.0)
    found = points([two, one], bytes_sent=True)
    assert "mpi" not in found
    for method in two["runs"][0]["methods"]:
        if method["counted"]:
            mean = 2 * method["bytes_between"]["mean"]
            assert found[method["name"]] == [(1.0, mean), (2.0, mean)]
    with pytest.raises(BenchError, match="network 'shared memory' names no hosts"):
        points([{"runs": [two["runs"][0] | {"network": "shared memory"}]}], bytes_sent=True)


def test_of_several_lengths_one_is_chosen() -> None:
    document = at_rate("1gbit", 1.0)
    (run,) = document["runs"]
    document["runs"].append(run | {"length": 99})
    with pytest.raises(BenchError, match=r"several lengths: choose one of \[14728266, 99\] by --length"):
        points([document])
    assert points([document], 99) == points([{"runs": [run]}])
    with pytest.raises(BenchError, match="length 5 is in none of the documents"):
        points([document], 5)


def test_rows_of_hosts_are_told_apart() -> None:
    names = [f"oktopk-{levels}-{wire}" for levels in ("flat", "hosts") for wire in ("plain", "int4")]
    looks = [look(name) for name in [*names, "nccl", "nccl-bf16", "oktopk"]]
    assert looks[1]["label"] == "flat, int4" and looks[2]["label"] == "two levels, plain"
    assert len({(one["colour"], str(one["dashes"])) for one in looks}) == len(looks)


@pytest.mark.pictures
def test_the_command_draws_the_same_svg_twice_and_names_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = write(tmp_path, at_rate("100mbit", 9.0), at_rate("1gbit", 1.0))
    pictures = [tmp_path / "first.svg", tmp_path / "second.svg"]
    for picture in pictures:
        assert main([*files, "--output", str(picture)]) == 0
    first, second = (picture.read_bytes() for picture in pictures)
    assert first == second and first.count(b"<path") > 20
    assert main([*files, "--methods", "nccl", "--output", str(pictures[0])]) == 2
    assert "method 'nccl' is in none of the documents: dense, oktopk" in capsys.readouterr().err
    assert main([str(tmp_path / "none.json"), "--output", str(pictures[0])]) == 2
    assert "none.json" in capsys.readouterr().err
    hosts = write(tmp_path, hosts_document(4, 2.0), hosts_document(8, 1.0))
    words = [
        *hosts,
        "--bytes",
        "--methods",
        "oktopk-flat-plain",
        "oktopk-hosts-int4",
        "--output",
        str(pictures[1]),
    ]
    assert main(words) == 0
    assert pictures[1].read_bytes() != first
    assert main([*words, "--length", "7"]) == 2
    assert "length 7 is in none of the documents" in capsys.readouterr().err
