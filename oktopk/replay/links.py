"""The document of measured links: what `oktopk-bench` writes and `oktopk-plan` reads."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oktopk.replay.network import Level, Network
from oktopk.replay.prediction import Kernels
from oktopk.replay.valueless import WORK

KIND, VERSION = "oktopk-links", 1

SLOW = 0.5
"""A pair of hosts below this share of the others' median rate has a slow link."""


class LinksError(Exception):
    """A document, or links, that cannot be used; one sentence."""


@dataclass(frozen=True)
class Pair:
    """What two hosts' links were measured to be, while all other hosts were paired, too.

    Attributes:
        hosts: their names.
        latency: seconds of the smallest message.
        bytes_per_second: in each direction, both busy.
    """

    hosts: tuple[str, str]
    latency: float
    bytes_per_second: float


@dataclass(frozen=True)
class Links:
    """Links, measured or assumed.

    Attributes:
        hosts: names of those that were measured; empty where nothing was.
        ranks_per_host: that were measured.
        inside: links between ranks of a host; None where one rank a host was measured.
        between: links between hosts; None where one host was measured.
        pairs: of hosts.
        kernels: as measured; None where they were not.
        device: "cpu" or "cuda".
        text: what they are, for readers.
    """

    hosts: tuple[str, ...]
    ranks_per_host: int
    inside: Level | None
    between: Level | None
    pairs: tuple[Pair, ...]
    kernels: Kernels | None
    device: str
    text: str

    def slow_pairs(self) -> list[Pair]:
        """Pairs whose rate is below SLOW of the others' median."""
        rates = [pair.bytes_per_second for pair in self.pairs]
        if len(rates) < 2:
            return []
        # of the other pairs: one slow link of two would pull their median down
        found = []
        for i, pair in enumerate(self.pairs):
            others = statistics.median(rates[:i] + rates[i + 1 :])
            if pair.bytes_per_second < SLOW * others:
                found.append(pair)
        return found

    def among(self, hosts: Sequence[str]) -> Links:
        """The same of some of the hosts.

        Raises:
            LinksError: others are named.
        """
        others = [host for host in hosts if host not in self.hosts]
        if others:
            raise LinksError(
                f"the document is of hosts {', '.join(self.hosts)}, and has nothing about "
                f"{', '.join(others)}: run oktopk-bench on those"
            )
        pairs = tuple(pair for pair in self.pairs if {*pair.hosts} <= {*hosts})
        return replace(self, hosts=tuple(hosts), pairs=pairs)

    def as_slow_as_the_slowest(self) -> Links:
        """The same, where each pair of hosts is as slow as the slowest one."""
        if self.between is None or not self.pairs:
            return self
        rates = [pair.bytes_per_second for pair in self.pairs]
        slower = statistics.median(rates) / min(rates)
        between = self.between
        return replace(self, between=replace(between, G=between.G * slower, D=between.D * slower))

    def network(self, hosts: int, ranks_per_host: int) -> Network:
        """The network of a cluster of such links.

        Raises:
            LinksError: links that it needs were not measured.
        """
        if hosts > 1 and self.between is None:
            raise LinksError(
                "the document is of one host, and has no link between hosts: run oktopk-bench on 2"
            )
        inside = self.inside
        if ranks_per_host > 1 and inside is None:
            raise LinksError(
                "the document is of one rank a host, and has no link inside one: "
                "run oktopk-bench with two a host"
            )
        between = self.between or inside
        assert between is not None
        return Network(inside or between, between, ranks_per_host)


def read(path: Path) -> Links:
    """The links of a document.

    Raises:
        LinksError: it cannot be read, is damaged, or is of another kind or version.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LinksError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise LinksError(f"{path} is damaged: it is no JSON document ({error})") from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise LinksError(f"{path} is no document of oktopk-bench: its kind is not {KIND!r}")
    if document.get("version") != VERSION:
        raise LinksError(
            f"{path} has version {document.get('version')!r}, and this is oktopk for version "
            f"{VERSION}: run oktopk-bench again"
        )
    try:
        return links_of(document, str(path))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise LinksError(f"{path} is damaged: {what}") from error


def links_of(document: dict[str, Any], name: str) -> Links:
    """The links of a document of this kind and version. Raises as damaged values do."""
    hosts = tuple(document["hosts"])
    if not hosts or not all(isinstance(host, str) for host in hosts):
        raise ValueError("hosts are not names")
    many = document["ranks_per_host"]
    if type(many) is not int or many < 1:
        raise ValueError(f"ranks_per_host {many!r} is not an integer >= 1")
    device = document["device"]
    if device not in DEVICES:
        raise ValueError(f"device {device!r} is not one of {', '.join(DEVICES)}")
    pairs = []
    for pair in document["pairs"]:
        one, other = pair["hosts"]
        rate = _positive(pair, "bytes_per_second")
        pairs.append(Pair((one, other), _positive(pair, "latency"), rate))
    times = document["kernels"]
    kernels = None
    if times is not None:
        pairs_of = {kind: times[kind] for kind in WORK if kind in times}
        known = {kind: (float(call), float(each)) for kind, (call, each) in pairs_of.items()}
        if not all(0 <= value < math.inf for pair in known.values() for value in pair):
            raise ValueError("a time of kernels is not a number of seconds")
        kernels = Kernels(known, f"measured, {name}")
    date = document["date"]
    text = f"{name}, {len(hosts)} host(s) of {many} rank(s), {document['library']}, {date}"
    inside, between = (_level(document[key], key) for key in ("inside", "between"))
    return Links(hosts, many, inside, between, tuple(pairs), kernels, device, text)


def _positive(values: dict[str, Any], name: str) -> float:
    value = float(values[name])
    if not 0 < value < math.inf:
        raise ValueError(f"{name} {values[name]!r} is not above 0")
    return value


def _level(values: dict[str, Any] | None, name: str) -> Level | None:
    if values is None:
        return None
    try:
        model = values["model"]
        return Level(**{key: float(model[key]) for key in ("L", "o", "g", "G", "O", "S", "D", "B")})
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def rate_of(text: str) -> float:
    """Bytes a second of a rate such as 25gbit, 100mbit or 12GB/s.

    Raises:
        LinksError: it is none.
    """
    units = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "mb/s": 1e6, "gb/s": 1e9}
    return _quantity(text, units, "a rate such as 25gbit or 12GB/s")


def seconds_of(text: str) -> float:
    """Seconds of a time such as 20us, 1.5ms or 0.1s.

    Raises:
        LinksError: it is none, or 0.
    """
    units = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
    return _quantity(text, units, "a time such as 20us or 1ms")


def _quantity(text: str, units: dict[str, float], what: str) -> float:
    lower = text.strip().lower()
    unit = max((unit for unit in units if lower.endswith(unit)), key=len, default="")
    try:
        value = float(lower.removesuffix(unit)) * units[unit] if unit else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise LinksError(f"{text!r} is not {what}, above 0")
    return value


INSIDE = Level.of_rate(100e9, 4e-6)
"""Links inside a host where none were measured, about those of NVLink under NCCL."""


def assumed(link: str, latency: str, device: str) -> Links:
    """Links between hosts that nobody measured.

    Args:
        link: rate of a host's link, as `rate_of`.
        latency: of the smallest message between processes, as `seconds_of`.

    Raises:
        LinksError: one is no such quantity.
    """
    between = Level.of_rate(rate_of(link), seconds_of(latency))
    text = f"{link} and {latency} between hosts, 100 GB/s and 4 us inside: given, not measured"
    return Links((), 1, INSIDE, between, (), None, device, text)


DEVICES = {
    # n = 14.7 and 306.5 M, density 1 %, two ranks, regular steps: what stages take and how it grows
    "cuda": Kernels(
        {
            "select": (109e-6, 4.46e-12),
            "sum": (261e-6, 6.7e-11),
            "code": (0.0, 1.4e-11),
            "entries": (45e-6, 1.4e-11),
            "vector": (10e-6, 2.7e-12),
        },
        "stages on H200 in docs/results/gpu-net-10gbit.json, not measured here; coding as entries",
    ),
    # one core, n = 16 M
    "cpu": Kernels(
        {
            "select": (0.0, 0.95e-9),
            "sum": (0.0, 28e-9),
            "code": (0.0, 5e-9),
            "entries": (0.0, 8e-9),
            "vector": (0.0, 0.6e-9),
        },
        "4 ranks on 2 cores in docs/results/shared-memory.json, not measured here",
    ),
}
"""Device -> times of its kernels where a document has none."""
