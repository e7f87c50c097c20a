"""The document of measured links: what `oktopk-bench` writes and `oktopk-plan` reads."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from collectives.codec import WIRES
from oktopk.replay.network import Level, Network
from oktopk.replay.prediction import Kernels, code_of
from oktopk.replay.valueless import WORK

KIND, VERSION = "oktopk-links", 1

UNMEASURED = ("peer", *map(code_of, WIRES))
"""Kinds of kernels that a document may lack: one rank a host reads no other rank's memory."""

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

    def too_slow(self) -> str:
        """That it is slow, as the beginning of a sentence."""
        link = f"the link between {' and '.join(self.hosts)}"
        rate = f"{self.bytes_per_second / 1e6:.4g} MB/s"
        return f"{link} carries {rate}, less than half of the others' median"


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
        """Pairs whose rate is below SLOW of the others' median, the slowest first."""
        rates = [pair.bytes_per_second for pair in self.pairs]
        if len(rates) < 2:
            return []
        # of the other pairs: one slow link of two would pull their median down
        slow = []
        for i, pair in enumerate(self.pairs):
            others = statistics.median(rates[:i] + rates[i + 1 :])
            if pair.bytes_per_second < SLOW * others:
                slow.append(pair)
        return sorted(slow, key=lambda pair: pair.bytes_per_second)

    def among(self, hosts: Sequence[str]) -> Links:
        """The same of some of the hosts, between which bytes travel at the rate of their slowest pair.

        `between` was timed while all hosts sent to each other, so that its rate is that of the
        slowest pair of all. Without that pair G and D are smaller, and nothing is larger.

        Raises:
            LinksError: others are named, one twice, or none.
        """
        if not all(hosts) or len({*hosts}) < len(hosts):
            raise LinksError(f"--on {','.join(hosts)!r} does not name different hosts, by commas")
        others = [host for host in hosts if host not in self.hosts]
        if others:
            raise LinksError(
                f"the document is of hosts {', '.join(self.hosts)}, and has nothing about "
                f"{', '.join(others)}: run oktopk-bench on those"
            )
        pairs = tuple(pair for pair in self.pairs if {*pair.hosts} <= {*hosts})
        between = self.between
        if between is not None and pairs:
            slowest, of_these = (min(pair.bytes_per_second for pair in some) for some in (self.pairs, pairs))
            # messages need not have crossed the slowest link of all
            rate = max(slowest, 1 / (between.G + between.D))
            between = _slower(between, min(1.0, rate / of_these))
        return replace(self, hosts=tuple(hosts), pairs=pairs, between=between)

    def as_slow_as(self, pair: Pair) -> Links:
        """The same, where bytes travel at the rate of this pair, or slower if they were measured so."""
        if self.between is None:
            return self
        rate = 1 / (self.between.G + self.between.D)  # as of pairs, whose directions are both busy
        slower = max(1.0, rate / pair.bytes_per_second)
        return replace(self, between=_slower(self.between, slower))

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


def _slower(level: Level, times: float) -> Level:
    """Links whose bytes take so many times as long."""
    return replace(level, G=level.G * times, D=level.D * times)


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
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        what = f"has version {version!r}, and this oktopk reads version {VERSION}"
        raise LinksError(f"{path} {what}: run oktopk-bench again")
    try:
        return links_of(document, str(path))
    except ValueError as error:
        raise LinksError(f"{path} is damaged: {error}") from error


def unwritable(path: Path) -> str:
    """Why its folder lets no file be written there, in a sentence; "" where it does."""
    if not path.parent.is_dir():
        return f"{path} cannot be written: there is no folder {path.parent}"
    return f"{path} cannot be written: it is a folder" if path.is_dir() else ""


def links_of(document: dict[str, Any], name: str) -> Links:
    """The links of a document of this kind and version.

    Raises:
        ValueError: a value is missing, or is none that `oktopk-bench` writes; one sentence.
    """
    hosts = tuple(_value(document, "hosts", list, "the document"))
    if not hosts or not all(isinstance(host, str) and host for host in hosts):
        raise ValueError("hosts are not names")
    if doubled := sorted({host for host in hosts if hosts.count(host) > 1}):
        raise ValueError(f"hosts name {doubled[0]!r} twice")
    many = _value(document, "ranks_per_host", int, "the document")
    if many < 1:
        raise ValueError(f"ranks_per_host {many!r} is not an integer >= 1")
    device = _value(document, "device", str, "the document")
    if device not in DEVICES:
        raise ValueError(f"device {device!r} is not one of {', '.join(DEVICES)}")
    pairs = tuple(_pair(pair, hosts) for pair in _value(document, "pairs", list, "the document"))
    kernels = None
    if _present(document, "kernels"):
        times = _value(document, "kernels", dict, "the document")
        needed = [kind for kind in (*WORK, *map(code_of, WIRES)) if kind in times or kind not in UNMEASURED]
        kernels = Kernels({kind: _time(times, kind) for kind in needed}, f"measured, {name}")
    library, date = (_value(document, key, str, "the document") for key in ("library", "date"))
    text = f"{name}, {len(hosts)} host(s) of {many} rank(s), {library}, {date}"
    inside, between = (_level(document, key) for key in ("inside", "between"))
    return Links(hosts, many, inside, between, pairs, kernels, device, text)


_TYPES = {dict: "an object", list: "a list", str: "a text", int: "an integer", float: "a number"}


def _value(values: Any, name: str, kind: type, where: str) -> Any:
    """A value of an object. Raises ValueError where it is missing or of another type."""
    if not isinstance(values, dict):
        raise ValueError(f"{where} is not an object")
    if name not in values:
        raise ValueError(f"{where} has no {name!r}")
    value = values[name]
    numbers = kind is float and isinstance(value, int)
    if isinstance(value, bool) or not (isinstance(value, kind) or numbers):
        raise ValueError(f"{name} of {where} is not {_TYPES[kind]}")
    return value


def _present(document: dict[str, Any], name: str) -> bool:
    """Whether a value that may be null is there."""
    if name not in document:
        raise ValueError(f"the document has no {name!r}")
    return document[name] is not None


def _number(values: Any, name: str, where: str) -> float:
    value = _value(values, name, float, where)
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _pair(values: Any, hosts: Sequence[str]) -> Pair:
    where = "a pair"
    names = _value(values, "hosts", list, where)
    if len(names) != 2 or not all(isinstance(host, str) for host in names) or len({*names}) != 2:
        raise ValueError("hosts of a pair are not two names")
    if others := [host for host in names if host not in hosts]:
        raise ValueError(f"a pair is of {others[0]!r}, which hosts do not name")
    rate, latency = (_number(values, key, where) for key in ("bytes_per_second", "latency"))
    for value, what in ((latency, "latency"), (rate, "bytes_per_second")):
        if not 0 < value < math.inf:
            raise ValueError(f"{what} {value:g} of a pair is not above 0 and finite")
    return Pair((names[0], names[1]), latency, rate)


def _time(values: dict[str, Any], kind: str) -> tuple[float, float]:
    """Seconds of a kernel's call and of an element."""
    both = _value(values, kind, list, "kernels")
    if len(both) != 2:
        raise ValueError(f"{kind} of kernels is not two numbers of seconds")
    named = dict(zip(("a call", "an element"), both, strict=True))
    call, each = (_number(named, name, f"{kind} of kernels") for name in named)
    if not (0 <= call < math.inf and 0 <= each < math.inf):
        raise ValueError(f"{kind} of kernels is not two numbers of seconds")
    return call, each


def _level(document: dict[str, Any], name: str) -> Level | None:
    if not _present(document, name):
        return None
    model = _value(document[name], "model", dict, name)
    where = f"the model of {name}"
    values = {key: _number(model, key, where) for key in ("L", "o", "g", "G", "O", "S", "D")}
    try:
        return Level(**values)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def rate_of(text: str) -> float:
    """Bytes a second of a rate such as 25gbit, 100mbit or 12GB/s.

    Raises:
        LinksError: it is none.
    """
    units = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "mb/s": 1e6, "gb/s": 1e9}
    limits = 1.0, 1e15
    return _quantity(text, units, limits, "a rate such as 25gbit or 12GB/s, from 1 to 1e15 bytes/s")


def seconds_of(text: str) -> float:
    """Seconds of a time such as 20us, 1.5ms or 0.1s.

    Raises:
        LinksError: it is none, or 0.
    """
    units = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
    return _quantity(text, units, (1e-12, 1e4), "a time such as 20us or 1ms, from 1e-12 to 1e4 s")


def _quantity(text: str, units: dict[str, float], limits: tuple[float, float], what: str) -> float:
    lower = text.strip().lower()
    unit = max((unit for unit in units if lower.endswith(unit)), key=len, default="")
    try:
        value = float(lower.removesuffix(unit)) * units[unit] if unit else math.nan
    except ValueError:
        value = math.nan
    if not limits[0] <= value <= limits[1]:
        raise LinksError(f"{text!r} is not {what}")
    return value


INSIDE = Level.of_rate(300e9, 4e-6)
"""Links inside a host where none were measured: a guess about NVLink between H200."""


def assumed(link: str, latency: str, device: str) -> Links:
    """Links between hosts that nobody measured.

    Args:
        link: rate of a host's link, as `rate_of`.
        latency: of the smallest message between processes, as `seconds_of`.

    Raises:
        LinksError: one is no such quantity.
    """
    between = Level.of_rate(rate_of(link), seconds_of(latency))
    text = f"{link} and {latency} between hosts: given, not measured"
    text += "; 300 GB/s and 4 us inside: guessed"
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
        "selection and sums by stages on H200 in docs/results/gpu-net-10gbit.json, not measured "
        "here; code, entries and vector are guesses",
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
        "4 ranks on 2 cores in docs/results/shared-memory.json, not measured here; code is a guess",
    ),
}
"""Device -> times of its kernels where a document has none."""
