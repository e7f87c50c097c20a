"""Charts of documents: step time over bandwidth, bytes over ranks per host, words over ranks."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest

from jobs.bench.document import BenchError

script: Any = importlib.import_module("docs.results.bandwidth")  # without types
bandwidth, ranks_per_host, main = script.bandwidth, script.ranks_per_host, script.main
RESULTS = Path(__file__).parents[3] / "docs" / "results"
HOSTS = [f"oktopk-{row}" for row in ("flat-plain", "flat-int4", "hosts-plain", "hosts-float32", "hosts-int4")]


def published(folder: str) -> list[str]:
    """Paths of the documents that a picture of docs/results is drawn from."""
    return [str(path) for path in sorted(RESULTS.glob(folder))]


def test_rates_and_hosts_are_read_from_the_network() -> None:
    assert bandwidth({"network": "2 hosts, TCP over unshaped links, staged through host memory"}) == math.inf
    assert bandwidth({"network": "2 hosts, TCP over 25gbit links, device memory over UCX"}) == 25
    assert ranks_per_host({"network": "2 hosts, TCP over 25gbit links", "ranks": 8}) == 4
    for read_from, missing in ((bandwidth, "rate of links"), (ranks_per_host, "hosts")):
        with pytest.raises(BenchError, match=f"network 'shared memory' names no {missing}"):
            read_from({"network": "shared memory"})


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
