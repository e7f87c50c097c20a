"""Whether sparse steps pay over the links of a job's ranks and hosts, as `oktopk-plan` predicts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from oktopk.bench.__main__ import report, run
from oktopk.doctor.machine import has_driver
from oktopk.plan.__main__ import TOO_SHORT, advice, compute_of, parameters_of
from oktopk.plan.rows import Job, best_first, dense_rows, sparse_rows
from oktopk.plan.table import paragraph
from oktopk.replay.links import DEVICES, LinksError, links_of

_SECONDS = 2.0  # for the messages of a level


def hosts(parameters: str, milliseconds: float, path: Path | None, prog: str) -> int:
    """Measure links in short, print them, and say whether sparse steps pay. Collective.

    Args:
        parameters, milliseconds: of the model, and of a dense step without communication.
        path: of the document of links that rank 0 writes; None for none.
        prog: the command's name, for messages.

    Returns:
        The exit status, equal on all ranks: 0, or 2 where nothing can be said.
    """
    try:
        length, compute = parameters_of(parameters), compute_of(milliseconds)
    except LinksError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    options = argparse.Namespace(json=path, seconds=_SECONDS, ranks_per_host=0, no_steps=True)
    return run(options, prog, lambda document: judged(document, length, compute))


def judged(document: dict[str, Any], parameters: int, compute: float) -> str:
    """The links of a document, and what a plan says of them.

    Raises:
        LinksError, ValueError: a link is slow, or nothing can be predicted; one sentence.
    """
    links = links_of(document, "measured here")
    if slow := links.slow_pairs():
        raise LinksError(f"{slow[0].too_slow()}: mend it, or train without one of these hosts")
    job = Job(parameters, compute, len(links.hosts), links.ranks_per_host)
    network = links.network(job.hosts, job.ranks_per_host)
    kernels = DEVICES[links.device]
    dense = min(dense_rows(job, network), key=lambda row: row.seconds)
    sparse = best_first(sparse_rows(job, network, kernels))
    notes = [f"{job}.", TOO_SHORT, f"Kernels: {kernels.source}."]
    if has_driver():
        notes.append("Links are of host memory: GPUs of one host have faster ones.")
    return "\n\n".join([report(document), *map(paragraph, notes), advice(sparse, dense)])
