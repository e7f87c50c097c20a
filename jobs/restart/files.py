"""Files of a checkpoint: one folder per set, valid as a whole or not at all.

    FOLDER/step-00000050/common.safetensors        what is equal on all ranks: parameters, optimizer
                         rank-00000.safetensors    one rank's own: residual, thresholds, boundaries, batch norm, RNG
                         manifest.json             written last: what the set is of, size and SHA-256 of every file
    FOLDER/.step-00000050                          a set that is being written; renamed when it is whole
    FOLDER/step-00000050.refused                   one that a run could not use and continued from an older one

safetensors hold no code. `sha256sum` gives the digests that the manifest has.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import safetensors
import safetensors.torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError

from data.durable import create, sync
from jobs.restart.packing import Snapshot, unpack

FORMAT = "oktopk checkpoint 1"
COMMON = "common.safetensors"
MANIFEST = "manifest.json"
_SET = re.compile(r"step-(\d{8,})")
_DRAFT = re.compile(r"\.step-\d{8,}(\.replaced)?")
_REFUSED = re.compile(r"step-\d{8,}\.refused")


class BadCheckpointError(Exception):
    """A set that must not be used; the message names in one line the file and what is wrong with it."""

    def __init__(self, message: str) -> None:
        super().__init__("; ".join(message.splitlines()))


class Part(BaseModel):
    """A file as its writer left it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """What a set is of, and its files. Other keys, such as versions and host, are for readers.

    Attributes:
        step: steps done.
        ranks: that wrote it.
        model: digest of the names, shapes and types of all parameters and buffers.
        method: that reduces the gradients.
        length: elements of the gradient (n).
        config: of the run: section -> key -> value.
        files: name -> file, one for each rank and COMMON.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    format: Literal["oktopk checkpoint 1"]
    step: int
    ranks: int = Field(ge=1)
    model: str
    method: str
    length: int
    config: dict[str, dict[str, Any]]
    files: dict[str, Part]


def rank_file(rank: int) -> str:
    """Name of a rank's part."""
    return f"rank-{rank:05d}.safetensors"


def set_folder(folder: Path, step: int) -> Path:
    """Folder of a step's set."""
    return folder / f"step-{step:08d}"


def draft_folder(folder: Path, step: int) -> Path:
    """Folder that a step's set is written in."""
    return folder / f".step-{step:08d}"


def write_part(path: Path, snapshot: Snapshot) -> Part:
    """Write a snapshot, on to the disk itself; the draft is made, the folder around it must be there.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    snapshot.wait()
    # no parents: what a lost file system leaves is no place to write to
    path.parent.mkdir(exist_ok=True)
    os.close(create(path))  # the library may follow a link
    safetensors.torch.save_file(snapshot.tensors, path, metadata={"state": snapshot.tree})
    # the library makes it its owner's alone; the folder has what this user's umask leaves
    path.chmod(path.parent.stat().st_mode & 0o666)
    sync(path)
    return _measure(path)


def read_part(path: Path) -> dict[str, Any]:
    """The state in a part whose digest fits.

    Raises:
        BadCheckpointError: it holds no state.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tree = file.metadata()["state"]
            return unpack(tree, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - it is no mapping
    except (LookupError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise BadCheckpointError(f"{path.name} holds no state: {type(error).__name__} {error}") from error


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
        return read_part(self.path / COMMON)

    def own(self, rank: int) -> dict[str, Any]:
        """State of one rank."""
        return read_part(self.path / rank_file(rank))


def seal(folder: Path, manifest: Manifest, keep: int) -> None:
    """Make a set of the parts in the draft, then remove older ones until `keep` are left with it.

    Raises:
        OSError: it cannot be written, or a part is not there: parts must lie where rank 0 sees them.
    """
    draft, final = draft_folder(folder, manifest.step), set_folder(folder, manifest.step)
    for name, part in manifest.files.items():
        seen = (draft / name).stat().st_size
        if seen != part.bytes:
            raise OSError(f"{draft / name} has {seen} bytes, but {part.bytes} were written")
    with open(create(draft / MANIFEST), "w", encoding="utf-8") as file:
        file.write(manifest.model_dump_json(indent=1) + "\n")
    sync(draft / MANIFEST)
    sync(draft)
    if final.exists():  # of the same step, and refused when the run resumed from an older one
        _discard(final)
    draft.rename(final)
    sync(folder)
    # a newer one is none of this run's: had it been usable, the run would have continued from it
    for old in [path for path in list_sets(folder) if _step_of(path) <= manifest.step][keep:]:
        _discard(old)


def _discard(path: Path) -> None:
    # hidden first: half a set must not look like one
    hidden = path.rename(path.with_name(f".{path.name}.replaced"))
    shutil.rmtree(hidden, ignore_errors=True)


def list_sets(folder: Path) -> list[Path]:
    """All sets, whole or not, newest first."""
    return sorted(_named(folder, _SET), key=_step_of, reverse=True)


def _named(folder: Path, name: re.Pattern[str]) -> list[Path]:
    return [path for path in folder.iterdir() if name.fullmatch(path.name)] if folder.is_dir() else []


def remove_drafts(folder: Path) -> None:
    """Remove what writers that were killed left behind."""
    for path in _named(folder, _DRAFT):
        shutil.rmtree(path, ignore_errors=True)


def remove_sets(folder: Path) -> None:
    """Remove all sets, drafts and those that were refused too, so that a run starts afresh."""
    for path in (*list_sets(folder), *_named(folder, _REFUSED)):
        shutil.rmtree(path)
    remove_drafts(folder)


def set_aside(path: Path) -> Path:
    """Rename a set that was refused, so that it is neither looked at nor counted again; returns where it is.

    Raises:
        OSError: it cannot be renamed.
    """
    aside = path.with_name(f"{path.name}.refused")
    if aside.exists():
        shutil.rmtree(aside)
    return path.rename(aside)


def read_manifest(path: Path, identity: Mapping[str, Any]) -> Manifest:
    """The manifest of a set, for a run whose sets have the keys of `identity` alike.

    Raises:
        BadCheckpointError: missing, damaged, of another format or run, or its files are not those of its ranks.
    """
    try:
        _regular(path / MANIFEST)
        manifest = Manifest.model_validate_json((path / MANIFEST).read_bytes())
    except OSError as error:
        raise BadCheckpointError(f"{MANIFEST} cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        fault = error.errors()[0]
        named = ": ".join((*map(str, fault["loc"]), fault["msg"]))
        raise BadCheckpointError(f"{MANIFEST} is damaged or of another format: {named}") from None
    if manifest.step != _step_of(path):
        raise BadCheckpointError(f"{MANIFEST} is of step {manifest.step}")
    for name, here in identity.items():
        if (there := getattr(manifest, name)) != here:
            raise BadCheckpointError(f"of another run: {name} {there!r} there, {here!r} here")
    # compared before names are made of the number
    files, ranks = manifest.files.keys(), manifest.ranks
    if len(files) != ranks + 1 or files != {COMMON, *map(rank_file, range(ranks))}:
        raise BadCheckpointError(f"{MANIFEST} is damaged: its files are not those of {ranks} ranks")
    return manifest


def check_part(path: Path, manifest: Manifest) -> None:
    """Read a part through. Raises BadCheckpointError: it cannot be read, or is not what was written."""
    written = manifest.files[path.name]
    try:
        size = _regular(path).st_size  # else a pipe, or what has grown, would be read for ever
        if size != written.bytes:
            raise BadCheckpointError(f"{path.name} is truncated: {size} of {written.bytes} bytes")
        measured = _measure(path)
    except OSError as error:
        raise BadCheckpointError(f"{path.name} cannot be read: {error.strerror or error}") from None
    if measured != written:
        raise BadCheckpointError(f"{path.name} is damaged: its SHA-256 does not fit")


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _regular(path: Path) -> os.stat_result:
    """The status of a file. Raises OSError: there is none, or it is a link, a pipe or the like."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("it is no regular file")
    return status


def _measure(path: Path) -> Part:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Part(bytes=file.tell(), sha256=digest)
