"""Delays between hosts by a relay in user space, and the table of networks that takes them."""

from __future__ import annotations

import importlib
import socket
import statistics
import threading
import time
from operator import itemgetter
from typing import Any

import pytest

from tests.jobs.bench.test_bandwidth import RESULTS

cells: Any = importlib.import_module("docs.results.cells")  # scripts without types
relay: Any = importlib.import_module("docs.results.relay")
DELAY = 0.01


def test_a_packet_is_held_for_10_ms_and_none_overtakes_another() -> None:
    pairs = {host: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for host in (1, 2)}
    for ends in pairs.values():
        ends[0].setblocking(False)
        ends[1].settimeout(5)
    ports = {host: ends[0].fileno() for host, ends in pairs.items()}
    end = time.monotonic() + 3
    passing = threading.Thread(target=relay.relay, args=(ports, DELAY, lambda packet: packet[0], end))
    passing.start()
    one, other = pairs[1][1], pairs[2][1]
    for _ in range(3):
        start = time.monotonic()
        one.send(b"\x09nobody has this")
        for number in range(5):
            one.send(bytes([2, number]))
        assert [other.recv(100)[1] for _ in range(5)] == [*range(5)]
        assert time.monotonic() - start >= DELAY
        other.send(b"\x01back")
        assert one.recv(100) == b"\x01back" and time.monotonic() - start >= 2 * DELAY
    passing.join()
    for ends in pairs.values():
        for each in ends:
            each.close()


def test_packets_go_to_the_last_byte_of_their_destination() -> None:
    packet = bytes([0x45, *[0] * 15, 10, 77, 0, 3])
    assert (relay.last_byte(packet), relay.last_byte(packet[:19]), relay.last_byte(b"\x60" * 40)) == (
        3,
        None,
        None,
    )


def test_the_table_of_a_document_is_that_of_the_page() -> None:
    found = cells.compared(RESULTS / "plan-links-100mbit-8-hosts.json")
    page = (cells.ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    assert [row[0] for row in found] == ["Dense", "Ok-Topk", "Union"]
    for row in found:
        assert " | ".join(row[1:]) in page


def numbers(text: str) -> list[float]:
    return [float(each) for each in text.replace(",", "").replace("−", "-").replace(" %", "").split()]


def test_the_networks_of_the_page_are_those_of_their_documents() -> None:
    page = (RESULTS / "cpu.md").read_text("utf-8").partition("## Steps between hosts of namespaces")[2]
    table = page.partition("| hosts, links |")[2].partition("\n\n")[0].splitlines()[2:]
    files = [RESULTS / "cells" / f"{cells.name_of(*network)}.json" for network in cells.NETWORKS]
    found = [numbers(" ".join(row[1:])) for file in files for row in cells.compared(file)]
    shown = [numbers(cell.replace(", ", " ")) for row in table for cell in row.strip("| ").split(" | ")[1:]]
    assert len(shown) == 24
    for of_page, of_file in zip(*(sorted(each, key=itemgetter(1)) for each in (shown, found)), strict=True):
        assert of_page == pytest.approx(of_file, abs=0.6)
    errors = [abs(row[2]) for row in found]
    sparse = [error for number, error in enumerate(errors) if number % 3]
    medians = (
        f"error is {statistics.median(errors):.0f} %, of sparse steps {statistics.median(sparse):.0f} %."
    )
    assert medians in page
