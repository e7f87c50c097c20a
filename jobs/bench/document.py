"""Format of the bench's JSON: results, machine, command.

    {"format": "oktopk bench 1", "kind": "bench", or that of a script beside results,
     "command": "...", "date": UTC, "commit": ..., "dirty": ...,
     "machine": {...}, "versions": {...}, "mpi": library, "environment": {...},
     "runs": [{"ranks", "length", "density", "k", "gradients": {...}, "settings": {...}, "course": {...},
               "bounds": {...}, "methods": [...]}, ...]}

A run is one mpiexec; the entries of "methods" are described in jobs.bench.summary and docs/results/method.md.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from collectives.codec import WIRES
from data.command import escaped_values
from data.durable import create, draft_of, obstacle, replaced
from jobs.run import provenance

FORMAT = "oktopk bench 1"
_SERIES = re.compile(r"\[[^\[\]{}\"]*\]")  # a list of numbers

NCCL_ROWS: dict[str, str] = {"nccl": "float32", "nccl-bf16": "bfloat16"}
"""Method that runs NCCL -> what it sums."""

HOST_ROWS = {
    f"oktopk-{levels}-{wire}": {"levels": levels, "wire": wire}
    for levels in ("flat", "hosts")
    for wire in WIRES
}
"""Ok-Topk flat and in two levels, on each wire, for hosts of several ranks: name -> settings."""

BENCHES = ("bench", "ablation", "sweep", "gpu table")
"""Kinds of documents whose runs are as the bench has them, also of scripts beside results."""

BASELINES = {"float32": "nccl", "bfloat16": "nccl-bf16", "float16": "nccl"}
"""Gradient type -> the method that its times are compared with."""


Run = dict[str, Any]
"""A run of a document, or one of its methods: names -> figures."""


class BenchError(Exception):
    """What was asked for cannot be done; the message is meant for the user."""


def document(
    kind: str, runs: Sequence[dict[str, Any]], ranks: int, module: str, commit: str = ""
) -> dict[str, Any]:
    """The whole, with where and when; on one process.

    Args:
        ranks: that were started; module: that they ran, of the bench, or a script.
        commit: for the record where git names none.
    """
    state = provenance.checkout()
    if state["commit"] is None and commit:
        state |= {"commit": commit, "commit_as_told": True}
    command = ["mpiexec", "-n", str(ranks), "python", "-m", "mpi4py", "-m", module, *sys.argv[1:]]
    return {
        "format": FORMAT,
        "kind": kind,
        "command": shlex.join(command),
        "date": provenance.now(),
        **state,
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "mpi": provenance.mpi_library(),
        "environment": provenance.environment(),
        "runs": list(runs),
    }


class Output:
    """A JSON file that appears when it is complete; that it can be written is known before anything is measured.

    Raises:
        BenchError: the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if in_the_way := obstacle(self.path):
            raise BenchError(f"{self.path} cannot be written: it {in_the_way}")
        try:
            os.close(create(draft_of(self.path)))
            draft_of(self.path).unlink()
        except OSError as error:
            raise BenchError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def write(self, content: dict[str, Any]) -> None:
        text = json.dumps(_plain(content), indent=1, allow_nan=False)
        # a series on one line, so that the file can be read and compared
        text = _SERIES.sub(
            lambda match: re.sub(r"\s+", " ", match[0]).replace("[ ", "[").replace(" ]", "]"), text
        )
        with replaced(self.path) as draft:
            draft.write_text(text + "\n", encoding="utf-8")


def read(path: str | Path) -> dict[str, Any]:
    """A document as it was written.

    Raises:
        BenchError: the file cannot be read, or is none of the bench's.
    """
    try:
        content = escaped_values(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise BenchError(f"{path} is not a file of the bench: it is not JSON") from None
    written = content.get("format") if isinstance(content, dict) else None
    if written != FORMAT:
        raise BenchError(f"{path} is not a file of the bench: its format is {written!r}, not {FORMAT!r}")
    return content


def ordered(stages: Iterable[str]) -> list[str]:
    """Stages as they ran, then what was left of a step."""
    names = list(stages)
    last = [name for name in ("finish", "between") if name in names]
    return [*(name for name in names if name not in last), *last]


def _plain(value: Any) -> Any:
    """The same in what JSON has: null for NaN, "inf" for infinity; to nine decimals, so seconds to the nanosecond."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return round(value, 9) if math.isfinite(value) else None if math.isnan(value) else str(value)
    return value
