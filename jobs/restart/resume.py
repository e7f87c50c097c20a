"""Finds the newest checkpoint that is whole, for as many ranks or another number."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpi4py import MPI

from jobs.cluster.agreement import Refused, decide_on_root
from jobs.config.modes import DDP_MODES, TRAINING_MODES
from jobs.restart import files
from jobs.restart.files import BadCheckpointError, Identity
from oktopk.elastic import inherited_ranks, redistribute
from oktopk.settings import DEFAULT_BUCKET_MB

RESIDUALS = ("reducer", "tables", "updates")
"""Parts of an optimizer's state that differ from rank to rank, see `oktopk.DistributedOptimizer`."""

MOMENTS = "state"
"""That of the torch optimizer, which differs too where each rank's steps alone."""


@dataclass(frozen=True)
class Found:
    """A set that has been checked, as one rank sees it.

    Attributes:
        path: its folder.
        step: steps done.
        ranks: that wrote it.
    """

    path: Path
    step: int
    ranks: int

    def common(self) -> dict[str, Any]:
        """State that is equal on all ranks."""
        return files.read_part(self.path / files.COMMON)

    def own(self, rank: int) -> dict[str, Any]:
        """State of one rank."""
        return files.read_part(self.path / files.rank_file(rank))

    def residuals(self, rank: int, ranks: int, hosts: list[int] | None = None) -> dict[str, Any]:
        """What of RESIDUALS and MOMENTS `rank` of `ranks` on these hosts continues from, redistributed if they were others."""

        def read(saved: int) -> dict[str, Any]:
            own = self.own(saved)
            return {name: own[name] for name in (*RESIDUALS, MOMENTS) if name in own}

        return redistribute(read, self.ranks, rank, ranks, hosts)


def find(
    comm: MPI.Intracomm,
    folder: Path,
    identity: Identity,
    say: Callable[[str], object],
    differing: Callable[[Mapping[str, Any]], list[str]] = lambda manifest: [],
    use: Callable[[Found], object] = lambda found: None,
) -> Found | None:
    """The newest set that all ranks can use; collective. Newer ones are set aside, for the run is about to write anew.

    Args:
        comm: the ranks that will continue.
        folder: of the sets; drafts that killed writers left in it are removed.
        identity: what a set must be of.
        say: gets one line for every set that is refused, on rank 0.
        differing: names what makes the set with this manifest one of another run; asked on rank 0.
        use: continues from a set; collective; raises BadCheckpointError on every rank alike where its contents are not a state of
            this run.

    Returns:
        The set, None when there is none at all.

    Raises:
        Refused: there are sets and none can be used, and all are left where they are; or a newer one than the one that can
            be used cannot be set aside. On every rank alike.

    Traffic: two small messages for every set tried, and one more for the one that is used.
    """
    names: list[str] = []
    if comm.rank == 0:
        files.remove_drafts(folder)
        names = [path.name for path in files.list_sets(folder)]
    names = comm.bcast(names)
    refused: list[Path] = []
    for name in names:
        path = folder / name
        manifest, problem = comm.bcast(_manifest(path, identity, differing) if comm.rank == 0 else None)
        problem = problem or _first_problem(comm, path, manifest)
        if not problem:
            found = Found(path, manifest["step"], manifest["ranks"])
            try:
                use(found)
            except BadCheckpointError as error:
                problem = str(error)
            else:
                decide_on_root(comm, lambda: _set_aside(refused, say), (OSError,))
                return found
        refused.append(path)
        if comm.rank == 0:
            say(f"checkpoint {path} refused: {problem}")
    if refused:
        raise Refused(
            f"no checkpoint in {folder} can be used, so the run cannot continue: repair or remove them, "
            "or start afresh with run.overwrite=true"
        )
    return None


def _set_aside(refused: list[Path], say: Callable[[str], object]) -> None:
    for path in refused:
        say(f"checkpoint {path} set aside as {files.set_aside(path).name}")


def _manifest(
    path: Path, identity: Identity, differing: Callable[[Mapping[str, Any]], list[str]]
) -> tuple[dict[str, Any], str]:
    """What the ranks need of the manifest of a set, and what is wrong with it, "" for nothing."""
    try:
        manifest = files.read_manifest(path, identity)
        named = differing(manifest)
    except BadCheckpointError as error:
        return {}, str(error)
    needed = {name: manifest[name] for name in ("step", "ranks", "files")}
    return needed, f"of another run: {', '.join(named)}" if named else ""


def _first_problem(comm: MPI.Intracomm, path: Path, manifest: Mapping[str, Any]) -> str:
    """What is wrong with the parts that the ranks need, each read by a rank that will; "" if nothing is."""
    saved_ranks = manifest["ranks"]
    needed = {comm.rank % saved_ranks, *inherited_ranks(comm.rank, comm.size, saved_ranks)}
    problem = ""
    try:
        for name in (files.COMMON, *(files.rank_file(rank) for rank in sorted(needed))):
            files.check_part(path / name, manifest)
    except BadCheckpointError as error:
        problem = str(error)
    return next((text for text in comm.allgather(problem) if text), "")


def _bucket_mb(config: Mapping[str, Any]) -> float | None:
    """The size of the buckets of a run, in 1e6 bytes of float32; 0: as GPUs have them by default; None: it has none."""
    reduction = config.get("reduction", {})
    method, given = reduction.get("method"), reduction.get("bucket_mb", 0.0)
    if method not in DDP_MODES and not reduction.get("overlap"):
        return None
    if method in TRAINING_MODES or config.get("training", {}).get("device") == "cpu":
        return given or DEFAULT_BUCKET_MB
    return given


def differences(saved: str, own: str, ignored: frozenset[str]) -> list[str]:
    """What differs between two configurations in JSON, as "section.key: saved there, own here".

    A size of buckets differs only where the run has other buckets.

    Args:
        saved, own: objects of objects.
        ignored: "section" or "section.key" that may differ.
    """
    there, here = json.loads(saved), json.loads(own)
    if _bucket_mb(there) == _bucket_mb(here):
        ignored |= {"reduction.bucket_mb"}
    found = []
    for section in sorted({*there, *here} - ignored):
        a, b = there.get(section, {}), here.get(section, {})
        for key in sorted({*a, *b}):
            if f"{section}.{key}" not in ignored and a.get(key) != b.get(key):
                found.append(f"{section}.{key}: {a.get(key)!r} there, {b.get(key)!r} here")
    return found
