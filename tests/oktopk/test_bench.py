"""The bench: messages between all pairs, one document that a plan reads, and what it refuses."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from oktopk.bench import links
from oktopk.bench.__main__ import ALONE, BenchError, measure, report
from oktopk.bench.links import ASSUMED, SIZES, Messages, hindrance, one_of_burst, partner_of, rounds, slope
from oktopk.bench.table import links_table, size_of, steps_table
from oktopk.plan.__main__ import main as plan
from oktopk.replay.links import KIND, links_of, read
from tests.launched import ROOT
from tests.links import write
from tests.threads import ThreadTransport, on_threads

LINKS_ONLY = argparse.Namespace(ranks_per_host=0, seconds=0.4, no_steps=True)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9])
def test_all_pairs_meet_once_and_none_has_two_partners_at_a_time(count: int) -> None:
    made = rounds(count)
    assert sorted(pair for each in made for pair in each) == sorted(combinations(range(count), 2))
    for pairs in made:
        players = [player for pair in pairs for player in pair]
        assert len(players) == len({*players})
        assert [partner_of(a, pairs) for a, _ in pairs] == [b for _, b in pairs]
    assert len(made) == count - 1 + count % 2
    assert partner_of(count, made[0]) is None


def test_a_byte_takes_what_the_largest_messages_grow_by() -> None:
    burst, rate = 128e3, 12.5e6  # a link that lets some bytes through unshaped
    sizes = {nbytes: max(nbytes - burst, 1.0) / rate for nbytes in SIZES if nbytes <= 2 << 20}
    assert slope(sizes) == pytest.approx(1 / rate)
    assert slope({8: 1e-5}) == 1e-5 / 8
    assert slope({1000: 1.0, 4000: 1.0}) == 0.8 / 4000


def test_a_byte_takes_longer_by_what_the_largest_message_takes_longer_both_ways() -> None:
    eager, per_byte, more = 65536, 8e-8, 7e-8
    alone = {nbytes: per_byte * nbytes for nbytes in SIZES[:10]}
    paired = {nbytes: each + more * max(0, nbytes - eager) for nbytes, each in alone.items()}
    assert hindrance(alone, paired, eager) == pytest.approx(more)
    assert hindrance(paired, alone, eager) == 0  # noise
    short = {nbytes: each for nbytes, each in alone.items() if nbytes <= eager}
    assert hindrance(short, {nbytes: 2 * each for nbytes, each in short.items()}, eager) == 0
    assert hindrance({}, {}, eager) == 0


class Delayed(ThreadTransport):
    """Messages between two hosts take a time for each byte; those of one pair ten times as much."""

    slow = (1, 2)

    def send(self, array: NDArray[Any], dest: int, even_if_empty: bool = False) -> list[Any]:
        per_byte = 1e-7 if {self.rank, dest} != {*self.slow} else 2e-6
        time.sleep(per_byte * array.nbytes)
        return super().send(array, dest, even_if_empty)


def measured(ranks: int, kind: type[ThreadTransport], ranks_per_host: int) -> dict[str, Any]:
    options = argparse.Namespace(**vars(LINKS_ONLY) | {"ranks_per_host": ranks_per_host})
    found = on_threads(ranks, lambda transport: measure(transport, options), kind)
    assert all(each["pairs"] == found[0]["pairs"] for each in found)
    return dict(found[0])


def test_a_slow_pair_of_hosts_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = measured(5, Delayed, 1)
    assert (document["kind"], document["inside"], document["ranks_per_host"]) == (KIND, None, 1)
    assert len(document["hosts"]) == 5 and len(document["pairs"]) == 10
    # a busy machine may slow others down, too
    pair = min(links_of(document, "").slow_pairs(), key=lambda each: each.bytes_per_second)
    assert pair.hosts == (document["hosts"][1], document["hosts"][2])
    assert f"SLOW: {pair.hosts[0]} - {pair.hosts[1]} carries less than half" in report(document)
    path = write(tmp_path / "links.json", document)
    assert plan([str(path), "--parameters", "1e6", "--compute-ms", "1", "--hosts", "5"]) == 2
    assert f"between {pair.hosts[0]} and {pair.hosts[1]} carries" in capsys.readouterr().err


def test_a_slow_link_counts_once_and_not_at_all_where_its_hosts_are_left_out() -> None:
    """A ring over all hosts is as slow as its slowest link, which is ten times as slow and more here."""
    links = links_of(measured(5, Delayed, 1), "")
    slow = min(links.pairs, key=lambda each: each.bytes_per_second)
    accepted, without = links.as_slow_as(slow), links.among([*links.hosts[:2], *links.hosts[3:]])
    assert links.between is not None and accepted.between is not None and without.between is not None
    took = 1 / slow.bytes_per_second
    assert took > 1e-6
    assert pytest.approx(took, rel=0.5) == accepted.between.G + accepted.between.D
    rest = max(1 / pair.bytes_per_second for pair in without.pairs)
    assert without.between.G + without.between.D <= 1.5 * rest < links.between.G


def test_a_document_has_links_of_a_host_and_between_hosts(tmp_path: Path) -> None:
    document = measured(6, ThreadTransport, 2)
    assert (len(document["hosts"]), document["ranks_per_host"]) == (3, 2)
    for level in ("inside", "between"):
        model, sizes = document[level]["model"], document[level]["sizes"]
        assert {*model} == {"L", "o", "g", "G", "O", "S", "D"} and document[level]["assumed"] == ["O", "S"]
        assert all(model[name] > 0 for name in ("L", "o", "g", "G"))
        assert [row["bytes"] for row in sizes] == [*SIZES[: len(sizes)]]
        for row in sizes:
            assert row["algbw"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
    shown = report(document)
    assert max(map(len, shown.splitlines())) <= 100
    assert "algbw GB/s   busbw GB/s" in shown
    known = read(write(tmp_path / "links.json", document))
    assert known.hosts == tuple(document["hosts"]) and known.kernels is None
    # JSON alone, no NumPy numbers
    assert json.loads(json.dumps(document)) == document
    assert not isinstance(document["pairs"][0]["bytes_per_second"], np.generic)


def test_one_rank_has_no_links() -> None:
    with pytest.raises(BenchError, match="^one rank has no links: start several"):
        on_threads(1, lambda transport: measure(transport, LINKS_ONLY))
    command = [sys.executable, "-m", "oktopk.bench"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().endswith(f"oktopk-bench: {ALONE}")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"ranks_per_host": -1}, "--ranks-per-host -1 is negative"),
        ({"seconds": 0.0}, "--seconds 0 is not in (0, 10000]"),
        ({"seconds": float("nan")}, "--seconds nan is not in (0, 10000]"),
    ],
)
def test_options_that_are_none_are_refused_on_every_rank(given: dict[str, Any], sentence: str) -> None:
    options = argparse.Namespace(**vars(LINKS_ONLY) | given)

    def refused(transport: ThreadTransport) -> str:
        with pytest.raises(BenchError) as caught:
            measure(transport, options)
        return str(caught.value)

    assert on_threads(2, refused) == [sentence] * 2


def test_messages_stop_growing_where_they_take_too_long() -> None:
    def sweep(transport: ThreadTransport) -> Any:
        return Messages(transport, 1 - transport.rank, 1e-3).sweep()

    found = on_threads(2, sweep, Delayed)
    assert [*found[0].sizes] == [*found[1].sizes] and max(found[0].sizes) < SIZES[-1]
    alone = on_threads(3, lambda transport: Messages(transport, None, 1.0).pair(64))
    assert alone == [(0.0, 0.0)] * 3


class Clocked:
    """Rank 0 of two, whose messages take a latency and their bytes by a clock of its own."""

    rank = 0

    def __init__(self, latency: float, rate: float) -> None:
        self.latency, self.rate, self.now = latency, rate, 0.0

    def perf_counter(self) -> float:
        return self.now

    def send(self, array: NDArray[Any], dest: int) -> list[int]:
        return [array.nbytes]

    receive = send

    def wait(self, requests: list[int]) -> None:
        self.now += self.latency + max(requests) / self.rate + len(requests) * self.latency / 50

    def allgather_control(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        self.now += 2 * self.latency
        return np.array([row])


@pytest.mark.parametrize("rings", [False, True])
def test_a_sweep_takes_the_seconds_that_it_may(rings: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for latency in (1e-6, 1e-4, 1e-3, 1e-2, 2e-2):
        for rate in (1.25e6, 1.25e7, 1.25e8, 1.25e9, 5e10):
            clocked: Any = Clocked(latency, rate)
            monkeypatch.setattr(links, "time", clocked)
            ring = (1, 1) if rings else None
            found = Messages(clocked, 1, 0.045, rings, ring, seconds=1.8).sweep()
            assert clocked.now < 1.9, (latency, rate)
            assert found is not None
            if max(found.alone.values()) > 10 * latency:
                assert found.model()["G"] == pytest.approx(1 / rate, rel=0.2)
            if latency < 1e-2:
                assert max(found.sizes) >= 1 << 15 and found.latency < 10 * latency


class HalfDuplex(Clocked):
    """Ranks that send to each other do so one after the other; what a rank sends to several others shares its link."""

    def __init__(self) -> None:
        super().__init__(1e-5, 1.25e7)

    def send(self, array: NDArray[Any], dest: int) -> list[Any]:
        return [("to", dest, array.nbytes)]

    def receive(self, array: NDArray[Any], source: int) -> list[Any]:
        return [("from", source, array.nbytes)]

    def wait(self, requests: list[Any]) -> None:
        ways = {kind: {other for way, other, _ in requests if way == kind} for kind in ("to", "from")}
        nbytes = max(sum(size for way, _, size in requests if way == kind) for kind in ways)
        self.now += self.latency + (2 if ways["to"] & ways["from"] else 1) * nbytes / self.rate


@pytest.mark.parametrize("rings", [False, True])
def test_the_bench_measures_how_directions_hinder_each_other(
    rings: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice as long both ways: each byte of a message takes as much again as alone, in pairs and around a ring."""
    clocked: Any = HalfDuplex()
    monkeypatch.setattr(links, "time", clocked)
    found = Messages(clocked, 1, 0.1, rings, (1, 2) if rings else None).sweep()
    assert found is not None
    largest = max(found.paired)
    assert found.paired[largest] == pytest.approx(2 * found.alone[largest], rel=1e-3)
    model = found.model()
    assert model["G"] == pytest.approx(1 / clocked.rate, rel=0.01)
    hindered = largest / (largest - ASSUMED["S"]) / clocked.rate
    assert model["D"] == pytest.approx(hindered, rel=0.01)


def test_tables_keep_to_100_columns() -> None:
    row = {"method": "MPI allreduce", "density": 0.0125, "wire": "bfloat16", "levels": "hosts"}
    row |= {"length": 2**31 - 1, "seconds": 99999.9, "bytes": 1e12, "parts": {"select": 1000.0}}
    assert max(map(len, steps_table([row]).splitlines())) <= 100
    assert steps_table([]) == "" and links_table("x", None) == ""
    assert [size_of(each) for each in (8, 2048, 1 << 25, 1 << 33)] == ["8 B", "2 KB", "32 MB", "8 GB"]


def test_the_table_says_where_directions_hinder_each_other() -> None:
    model = {"L": 1e-5, "o": 1e-6, "g": 1e-6, "G": 8e-8, "O": 0.0, "S": 65536.0}
    for hindered, said in ((8e-8, True), (4e-9, False)):
        shown = links_table("Between hosts", {"latency": 1e-5, "model": model | {"D": hindered}, "sizes": []})
        assert (
            "0.013 GB/s, 0.006 where two send each other long messages." in " ".join(shown.split())
        ) is said
        assert max(map(len, shown.splitlines())) <= 100


def test_a_burst_tells_what_a_message_takes_without_its_answer() -> None:
    """32 messages 2 us apart, each end one latency away, on a machine that some bursts disturb."""
    latency, gap = 5e-5, 2e-6
    whole = [2 * latency + 31 * gap] * 3 + [1.0] * 5
    assert one_of_burst([32e-6] * 3 + [1.0] * 5, whole, latency) == pytest.approx((1e-6, gap))
    # where messages are farther apart at the sender than anywhere else
    assert one_of_burst([96e-6] * 4, [1e-4] * 4, latency) == pytest.approx((3e-6, 3e-6))
