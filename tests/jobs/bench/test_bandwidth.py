"""Step time over bandwidth, from documents at several rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.bench.bandwidth import bandwidth, lines, main
from jobs.bench.document import BenchError

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def at_rate(rate: str, factor: float) -> dict[str, Any]:
    """The published document at 1 Gb/s as if measured at another rate, every step longer by a factor."""
    document = json.loads((RESULTS / "network-1gbit.json").read_text(encoding="utf-8"))
    (run,) = document["runs"]
    run["network"] = f"4 hosts, TCP over {rate} links"
    for method in run["methods"]:
        method["seconds"]["all"]["mean"] *= factor
    return document


def test_every_method_has_one_point_a_document_in_the_order_of_the_rates() -> None:
    found = lines([at_rate("1gbit", 1.0), at_rate("100mbit", 8.0), at_rate("2.5gbit", 0.5)])
    assert len(found) == 9
    for points in found.values():
        assert [rate for rate, _ in points] == [0.1, 1.0, 2.5]
        middle = points[1][1]
        assert [seconds for _, seconds in points] == pytest.approx([8 * middle, middle, middle / 2])


def test_links_without_a_rate_are_refused_by_name() -> None:
    with pytest.raises(BenchError, match="network 'shared memory' names no rate"):
        bandwidth({"network": "shared memory"})


@pytest.mark.pictures
def test_the_command_draws_the_same_svg_twice_and_names_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for rate, factor in (("100mbit", 9.0), ("1gbit", 1.0)):
        files.append(str(tmp_path / f"{rate}.json"))
        Path(files[-1]).write_text(json.dumps(at_rate(rate, factor)), encoding="utf-8")
    pictures = [tmp_path / "first.svg", tmp_path / "second.svg"]
    for picture in pictures:
        assert main([*files, "--output", str(picture)]) == 0
    first, second = (picture.read_bytes() for picture in pictures)
    assert first == second and first.count(b"<path") > 20
    assert main([*files, "--methods", "nccl", "--output", str(pictures[0])]) == 2
    assert "method 'nccl' is in none of the documents: dense, oktopk" in capsys.readouterr().err
    assert main([str(tmp_path / "none.json"), "--output", str(pictures[0])]) == 2
    assert "none.json" in capsys.readouterr().err
