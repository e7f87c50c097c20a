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
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from collectives.codec import WIRES
from collectives.connect import connect
from collectives.host_transport import HostTransport
from collectives.launchers import LauncherError
from collectives.sparse import MAX_LENGTH
from oktopk.bench.document import links_document
from oktopk.bench.steps import gradients, kernels, library_row, step_row
from oktopk.bench.table import links_table, pairs_table, steps_table
from oktopk.replay.links import LinksError, links_of, unwritable

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


@contextmanager
def _ranks() -> Iterator[HostTransport]:
    """The transport of all ranks of the job; torch's process group under torchrun, else MPI."""
    with ExitStack() as ending:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            import torch.distributed as group

            if not group.is_initialized():
                group.init_process_group("gloo")
                ending.callback(group.destroy_process_group)
        yield ending.enter_context(closing(connect(None)))


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
    document = links_document(transport, options.seconds / 40)
    if not options.no_steps:
        document["kernels"] = kernels(transport, options.ranks_per_host)
        document["steps"] = _steps(transport, options)
    return document


def _steps(transport: HostTransport, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A step of the library's own dense sum, and of each method. Collective."""
    length = int(options.length)
    vectors = gradients(length, transport.rank)
    rows = [library_row(transport, length)]
    for method in _METHODS:
        settings: dict[str, Any] = {"ranks_per_host": options.ranks_per_host}
        if method != "dense":
            settings |= {"density": options.density, "wire": options.wire, "levels": options.levels}
        rows.append(step_row(transport, length, method, vectors, **settings))
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
