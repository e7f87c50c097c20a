"""Finds the newest checkpoint that is whole, for as many ranks or another number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mpi4py import MPI

from jobs.cluster.agreement import Refused, decide_on_root, decide_together
from jobs.restart import files
from jobs.restart.files import BadCheckpointError, Manifest
from oktopk.elastic import inherited_ranks

Used = TypeVar("Used")


class Found(NamedTuple):
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


def find(
    comm: MPI.Intracomm,
    folder: Path,
    identity: Mapping[str, Any],
    say: Callable[[str], object],
    use: Callable[[Found], Used],
    differing: Callable[[Manifest], list[str]] = lambda manifest: [],
) -> tuple[Found, Used] | None:
    """The newest set that all ranks can use; collective. Newer ones are set aside, for the run is about to write anew.

    Args:
        comm: the ranks that will continue.
        folder: of the sets; drafts that killed writers left in it are removed.
        identity: keys that the manifest of a set must have alike.
        say: gets one line for every set that is refused, the same on every rank.
        use: continues from a set; collective; raises BadCheckpointError on every rank alike where its contents are not a state of
            this run.
        differing: names what makes the set with this manifest one of another run; asked on rank 0.

    Returns:
        The set and what `use` returned, None when there is none at all.

    Raises:
        Refused: there are sets and none can be used, and all are left where they are; or a newer one than the one that can
            be used cannot be set aside. On every rank alike.

    Traffic: two small messages for every set tried, and one more for the one that is used.
    """

    def list_sets() -> list[Path]:
        files.remove_drafts(folder)
        return files.list_sets(folder)

    def check_manifest(path: Path) -> Manifest:
        manifest = files.read_manifest(path, identity)
        if named := differing(manifest):
            raise BadCheckpointError(f"of another run: {', '.join(named)}")
        return manifest

    def check_parts(path: Path, manifest: Manifest) -> None:
        """Of those that a rank needs; every part is needed by some rank."""
        needed = {comm.rank % manifest.ranks, *inherited_ranks(comm.rank, comm.size, manifest.ranks)}
        for name in (files.COMMON, *map(files.rank_file, sorted(needed))):
            files.check_part(path / name, manifest)

    refused: list[Path] = []
    bad = (BadCheckpointError,)
    for path in decide_on_root(comm, list_sets, (OSError,)):
        try:
            manifest = decide_on_root(comm, partial(check_manifest, path), bad, BadCheckpointError)
            decide_together(comm, partial(check_parts, path, manifest), bad, BadCheckpointError)
            found = Found(path, manifest.step, manifest.ranks)
            used = use(found)
        except BadCheckpointError as error:
            refused.append(path)
            say(f"checkpoint {path} refused: {error}")
            continue
        aside = decide_on_root(comm, lambda: list(map(files.set_aside, refused)), (OSError,))
        for before, after in zip(refused, aside, strict=True):
            say(f"checkpoint {before} set aside as {after.name}")
        return found, used
    if refused:
        raise Refused(
            f"no checkpoint in {folder} can be used, so the run cannot continue: repair or remove them, "
            "or start afresh with run.overwrite=true"
        )
    return None
