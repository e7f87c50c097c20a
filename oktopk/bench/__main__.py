"""Measure the links between ranks and hosts, then steps over them, for `oktopk-plan`.

    oktopk-run -n 4 -m oktopk.bench --json links.json
    mpiexec -n 16 oktopk-bench --json links.json
    torchrun --nproc-per-node 4 -m oktopk.bench --json links.json

Gradients are in host memory. Exit status: 0, or 2 where nothing can be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from collectives.codec import WIRES
from collectives.connect import connect
from collectives.host_transport import HostTransport
from collectives.launchers import LauncherError
from collectives.sparse import MAX_LENGTH
from oktopk.bench.links import ASSUMED, Messages, Sweep, partner_of, rounds, rows_of
from oktopk.bench.steps import gradients, kernels, library_row, step_row
from oktopk.bench.table import links_table, pairs_table, steps_table
from oktopk.replay.links import KIND, VERSION, LinksError, links_of, unwritable

_MOST_SECONDS = 1e4
_METHODS = ("dense", "oktopk", "union")
ALONE = "one rank has no links: start several, by oktopk-run, mpiexec, srun or torchrun"


class BenchError(Exception):
    """Nothing can be measured; one sentence, on all ranks."""


def main(argv: Sequence[str] | None = None, prog: str = "oktopk-bench") -> int:
    """The command `oktopk-bench`, on every rank."""
    return run(_parser(prog).parse_args(argv), prog, report)


def run(options: argparse.Namespace, prog: str, tell: Callable[[dict[str, Any]], str]) -> int:
    """Measure on every rank, and print on rank 0 what the document says. Collective.

    Args:
        options: those of `measure`, and `json`.
        prog: the command's name, for messages.
        tell: the text of a document; its LinksError or ValueError is the command's.

    Returns:
        The exit status, equal on all ranks.
    """
    rank = 0
    try:
        with _ranks() as transport:
            rank = transport.rank
            problem = "" if options.json is None or rank else unwritable(options.json)
            if problem := "".join(transport.allgather_objects(problem)):
                raise BenchError(problem)
            document = measure(transport, options)
            if rank == 0:
                problem = _write(options.json, document)
                try:
                    print(tell(document))
                except (LinksError, ValueError) as error:
                    problem = str(error)
            if any(transport.allgather_objects(problem)):
                raise BenchError(problem)
    except (BenchError, LauncherError, ImportError, ValueError) as error:
        if rank == 0:
            print(f"{prog}: {error}", file=sys.stderr)
        return 2
    return 0


class _ranks:  # noqa: N801 - a context
    """The transport of all ranks of the job; torch's process group under torchrun, else MPI."""

    def __enter__(self) -> HostTransport:
        self._group: Any = None
        if "TORCHELASTIC_RUN_ID" in os.environ:
            import torch.distributed as group

            if not group.is_initialized():
                group.init_process_group("gloo")
                self._group = group
        self._transport = connect(None)
        return self._transport

    def __exit__(self, *error: object) -> None:
        self._transport.close()
        if self._group is not None:
            self._group.destroy_process_group()


def measure(transport: HostTransport, options: argparse.Namespace) -> dict[str, Any]:
    """The document of what was measured. Collective.

    Raises:
        BenchError, ValueError: nothing can be measured; on every rank alike.
    """
    if transport.size < 2:
        raise BenchError(ALONE)
    if options.ranks_per_host < 0:
        raise BenchError(f"--ranks-per-host {options.ranks_per_host} is negative")
    if not 0 < options.seconds <= _MOST_SECONDS:
        raise BenchError(f"--seconds {options.seconds:g} is not in (0, {_MOST_SECONDS:g}]")
    transport.group_by_host(options.ranks_per_host)
    names = host_names(transport, options.ranks_per_host)
    numbered = [*enumerate(transport.hosts)]
    places = [[rank for rank, host in numbered if host == number] for number in range(len(names))]
    many = min(map(len, places))
    limit = options.seconds / 40
    first = [ranks[0] for ranks in places]
    inside = [pair for ranks in places for pair in zip(ranks[::2], ranks[1::2], strict=False)]
    inside = inside if many > 1 else []
    between = [(first[a], first[b]) for a, b in rounds(len(names))[0]] if len(names) > 1 else []
    within = _level(transport, inside, limit)
    beyond = _level(transport, between, limit, first if len(first) > 2 else ())
    document: dict[str, Any] = {
        "kind": KIND,
        "version": VERSION,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "library": transport.library,
        "device": "cpu",
        "hosts": names,
        "ranks_per_host": many,
        "inside": within,
        "between": beyond,
        "pairs": []
        if beyond is None
        else _pairs(transport, names, first, int(beyond["sizes"][-1]["bytes"]), limit),
        "kernels": None,
        "steps": [],
    }
    if not options.no_steps:
        document["kernels"] = kernels(transport, options.ranks_per_host)
        document["steps"] = _steps(transport, options)
    return document


def host_names(transport: HostTransport, ranks_per_host: int) -> list[str]:
    """A name for each host: its own; where several have one, with a number."""
    own: list[str] = transport.allgather_objects(socket.gethostname())
    count = max(transport.hosts) + 1
    names = [own[transport.hosts.index(host)] for host in range(count)]
    if len({*names}) == count:
        return names
    return [f"{name}#{number}" for number, name in enumerate(names)]


def _level(
    transport: HostTransport,
    pairs: Sequence[tuple[int, int]],
    limit: float,
    ring: Sequence[int] = (),
) -> dict[str, Any] | None:
    """The sweep over the sizes of a level, by the mean of the ranks. Collective.

    Args:
        pairs: whose latency is measured.
        ring: ranks that send to the next one and receive from the one before; none: pairs do both.
    """
    if not pairs:
        return None
    neighbours = None
    if transport.rank in ring:
        at, many = ring.index(transport.rank), len(ring)
        neighbours = ring[(at + 1) % many], ring[at - 1]
    partner = partner_of(transport.rank, pairs)
    mine = Messages(transport, partner, limit, bool(ring), neighbours).sweep()
    found: list[Sweep] = [each for each in transport.allgather_objects(mine) if each is not None]

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    def of_sizes(name: str) -> dict[int, float]:
        # a rank that takes no part has zeros
        times = [getattr(each, name) for each in found]
        sizes = times[0].keys()
        return {nbytes: mean([each[nbytes] for each in times if each[nbytes]]) for nbytes in sizes}

    latency, overhead, gap = (
        mean([getattr(each, name) for each in found if each.latency])
        for name in ("latency", "overhead", "gap")
    )
    times = (of_sizes(name) for name in ("sizes", "alone", "paired"))
    whole = Sweep(latency, overhead, gap, *times)
    made: dict[str, Any] = {"latency": whole.latency, "model": whole.model()}
    made["assumed"] = [*ASSUMED]  # parameters of the model
    made |= {"sizes": rows_of(whole.sizes), "alone": rows_of(whole.alone)}
    return made | {"paired": rows_of(whole.paired)}


def _pairs(
    transport: HostTransport, names: Sequence[str], first: Sequence[int], nbytes: int, limit: float
) -> list[dict[str, Any]]:
    """All pairs of hosts, in rounds. Collective."""
    found = []
    for pairs in rounds(len(names)):
        among = [(first[a], first[b]) for a, b in pairs]
        mine = Messages(transport, partner_of(transport.rank, among), limit).pair(nbytes)
        everyone = transport.allgather_objects(mine)
        for (a, b), (one, other) in zip(pairs, among, strict=True):
            latency = (everyone[one][0] + everyone[other][0]) / 2
            rate = min(everyone[one][1], everyone[other][1])
            pair = {"hosts": [names[a], names[b]], "latency": latency}
            found.append(pair | {"bytes_per_second": rate})
    return found


def _steps(transport: HostTransport, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A step of the library's own dense sum, and of each method. Collective."""
    length = int(options.length)
    given = gradients(length, transport.rank)
    rows = [library_row(transport, length)]
    for method in _METHODS:
        settings: dict[str, Any] = {"ranks_per_host": options.ranks_per_host}
        if method != "dense":
            settings |= {"density": options.density, "wire": options.wire, "levels": options.levels}
        rows.append(step_row(transport, length, method, given, **settings))
    return rows


def _write(path: Path | None, document: dict[str, Any]) -> str:
    """Write the document; returns why it could not be, in a sentence."""
    if path is None:
        return ""
    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        return f"{path} cannot be written: {error.strerror or error}"
    return ""


def report(document: dict[str, Any]) -> str:
    """The document as text of at most 100 columns."""
    slow = [pair.hosts for pair in links_of(document, "").slow_pairs()]
    head = (
        f"{len(document['hosts'])} host(s) of {document['ranks_per_host']} rank(s), "
        f"{document['library']}, host memory, {document['date']}"
    )
    parts = [
        head,
        links_table("Between ranks of a host", document["inside"]),
        links_table("Between hosts", document["between"]),
        pairs_table(document["pairs"], slow),
        steps_table(document["steps"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Measure links between ranks and hosts, then dense and sparse steps over them.",
        epilog="start it by mpiexec, srun, torchrun or oktopk-run -n 4 -m oktopk.bench:\n"
        f"  {prog} --json links.json\n"
        f"  {prog} --length 98e6 --density 0.0125 --wire int4 --json links.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="Document for oktopk-plan that rank 0 writes.")
    text = "Elements of the gradient of steps, such as 98e6; default: 4e6."
    add("--length", type=_elements, default=4_000_000, metavar="N", help=text)
    text = "Density of the sparse steps, in (0, 1]; default: 0.0125."
    add("--density", type=float, default=0.0125, help=text)
    text = "Wire of the sparse steps; default: auto, which does not round."
    add("--wire", choices=("auto", *WIRES), default="auto", help=text)
    text = "Levels of the sparse steps; default: auto, hosts where several have several ranks."
    add("--levels", choices=("auto", "flat", "hosts"), default="auto", help=text)
    text = "Ranks that count as one host, to try it on one; default: those that share memory."
    add("--ranks-per-host", type=int, default=0, metavar="RANKS", help=text)
    text = "Seconds for the messages of a level, about; longer ones are left out; default: 4."
    add("--seconds", type=float, default=4.0, help=text)
    add("--no-steps", action="store_true", help="Measure links alone, no kernels and no steps.")
    return parser


def _elements(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= MAX_LENGTH:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number in [1, {MAX_LENGTH}]")
    return int(value)


if __name__ == "__main__":
    sys.exit(main())
