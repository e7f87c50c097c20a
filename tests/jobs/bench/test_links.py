"""Links between hosts: floors, the check of their shaping, and the table that shows both."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from jobs.bench import contestants
from jobs.bench.contestants import Contestant, make_reducer
from jobs.bench.device import Device
from jobs.bench.document import HOST_ROWS, BenchError, bits_per_second, read
from jobs.bench.links import Links
from jobs.bench.options import parse
from jobs.bench.run import main as run
from jobs.bench.tables import document_tables

RESULTS = Path(__file__).parents[3] / "docs" / "results"


@pytest.fixture
def hosts(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> int:
    """Ranks on three hosts, as their names say: dealt out in turn. The number of hosts."""
    monkeypatch.setattr(socket, "gethostname", lambda: f"h{comm.rank % 3}")
    return min(3, comm.size)


def test_rates_are_bits_per_second_and_none_bounds_nothing() -> None:
    assert [bits_per_second(text) for text in ("10gbit", "2.5gbit", "100mbit", "8kbit")] == [
        1e10,
        2.5e9,
        1e8,
        8e3,
    ]
    assert bits_per_second("none") is None
    for wrong in ("fast", "10", "0gbit", "-1gbit", "10gbits"):
        with pytest.raises(BenchError, match=f"link '{wrong}' is neither a rate such as 10gbit nor 'none'"):
            bits_per_second(wrong)


@pytest.mark.mpi
def test_links_of_one_host_are_refused_on_every_rank(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "lonely")
    with pytest.raises(BenchError, match="--link is for links between hosts, and all ranks are on lonely"):
        Links(comm, "10gbit")


@pytest.mark.mpi(min_size=2)
def test_the_host_that_sends_most_counts(comm: MPI.Intracomm, hosts: int) -> None:
    links = Links(comm, "10gbit")
    assert links.hosts == [rank % hosts for rank in range(comm.size)]
    assert links.count == hosts
    between = np.zeros((comm.size, 2))
    between[0], between[comm.size - 1] = (100, 300), (10, 10)
    own = 210 if (comm.size - 1) % hosts == 0 else 200
    assert links.host_bytes(between) == own
    assert links.least_dense_bytes(1000) == pytest.approx(2000 * (hosts - 1) / hosts)
    links.close()


@pytest.mark.mpi(min_size=2)
def test_a_transfer_faster_than_the_rate_told_does_not_hold(comm: MPI.Intracomm, hosts: int) -> None:
    slow, none, fast = Links(comm, "1kbit"), Links(comm, "none"), Links(comm, "1000000gbit")
    found = slow.transfer(100_000)
    assert found["bytes"] == 100_000 and found["seconds"] > 0
    # 800 s at the rate told
    assert found["share"] == pytest.approx(800 / found["seconds"])
    assert not found["holds"]
    assert none.transfer(0)["share"] is None and none.transfer(0)["holds"]
    assert fast.transfer(100_000)["holds"]
    record = slow.record(250.0, mean=5.0)
    assert (record["host_bytes"], record["floor"], record["above"]) == (250.0, 2.0, 3.0)
    assert record["transfer"]["bytes"] == 250
    record = none.record(250.0, mean=5.0)
    assert (record["floor"], record["above"]) == (None, None)
    assert slow.record(1e9, mean=1.0)["transfer"]["bytes"] == 8 << 20
    for links in (slow, none, fast):
        links.close()


@pytest.mark.mpi(min_size=2)
def test_a_transfer_takes_as_long_as_its_last_host(
    comm: MPI.Intracomm, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ring_exchange(ring: MPI.Intracomm, outgoing: Any, incoming: Any) -> Any:
        assert ring.size == hosts
        return lambda: time.sleep(0.05 * (ring.rank == hosts - 1))

    monkeypatch.setattr("jobs.bench.links.ring_exchange", ring_exchange)
    links = Links(comm, "1gbit")
    assert links.transfer(1000)["seconds"] >= 0.05
    links.close()


@pytest.mark.mpi(min_size=2)
def test_steps_of_two_lengths_are_beyond_their_floors(
    comm: MPI.Intracomm, hosts: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = comm.bcast(tmp_path) / "links.json"
    words = ["--length", "20000,30000", "--steps", "9", "--warmup", "2", "--dense-steps", "2", "--no-memory"]
    words += ["--set", "threshold_interval=8", "--methods", "oktopk-flat-plain,mpi", "--link", "1kbit"]
    assert run([*words, "--json", str(path)], comm) == 0
    printed = capsys.readouterr()
    if comm.rank:
        return
    content = read(path)
    assert [(entry["length"], entry["hosts"]) for entry in content["runs"]] == [
        (20000, hosts),
        (30000, hosts),
    ]
    for entry in content["runs"]:
        assert entry["link"]["rate"] == 1000
        assert entry["link"]["transfer"]["bytes"] == 8 * entry["k"]
        ours, library = entry["methods"]
        link, mean = library["link"], library["seconds"]["all"]["mean"]
        assert link["host_bytes"] == pytest.approx(8 * entry["length"] * (hosts - 1) / hosts)
        assert link["floor"] == pytest.approx(8 * link["host_bytes"] / 1000)
        assert link["above"] == pytest.approx(mean - link["floor"])
        # all ranks are on one machine: a transfer is faster than the rate told
        assert not link["transfer"]["holds"]
        # MPI finds one host, so that nothing goes to others
        assert ours["link"]["host_bytes"] == 0
    assert printed.err.count("times 1kbit: part of them passed unshaped") == 2
    assert "20,000 by formula" in document_tables(content) or hosts > 2
    assert printed.out.count(f"{hosts} hosts, links: 1kbit; ") == 2


@pytest.mark.parametrize(("sharers", "allowed"), [(1, None), (2, True)])
def test_ranks_may_share_a_gpu_in_two_levels(
    sharers: int, allowed: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Reducer:
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            asked.append(keywords.get("peer_memory"))

    monkeypatch.setattr(contestants, "GradientAllreduce", Reducer)
    options = parse(["--length", "1000"])
    for name in ("oktopk-flat-int8", "oktopk-hosts-int8"):
        one = Contestant(name=name, method="oktopk", settings=dict(HOST_ROWS[name]))
        make_reducer(one, options, 1000, Device(sharers), MPI.COMM_SELF)
    assert asked == [None, allowed]
