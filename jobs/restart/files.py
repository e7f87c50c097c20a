"""Files of a checkpoint: one folder per set, valid as a whole or not at all.

    FOLDER/step-00000050/common.safetensors        what is equal on all ranks: parameters, optimizer
                         rank-00000.safetensors    one rank's own: residual, thresholds, boundaries, batch norm, RNG
                         manifest.json             written last: size and SHA-256 of every file, and of itself
    FOLDER/.step-00000050                          a set that is being written; renamed when it is whole
    FOLDER/step-00000050.refused                   one that a run could not use and continued from an older one

safetensors hold no code. `sha256sum` gives the digests that the manifest has.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError

from data.durable import create, own_folder, sync
from jobs.restart.packing import Snapshot, unpack

FORMAT = "oktopk checkpoint 1"
COMMON = "common.safetensors"
MANIFEST = "manifest.json"
_SET = re.compile(r"step-(\d{8,})")
_DRAFT = re.compile(r"\.step-(\d{8,})(\.replaced)?")
_REFUSED = re.compile(r"step-(\d{8,})\.refused")


class BadCheckpointError(Exception):
    """A set that must not be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Identity:
    """Identity that a set shares with the run that continues from it.

    Attributes:
        model: digest of the names, shapes and types of all parameters and buffers.
        method: that reduces the gradients.
        length: elements of the gradient (n).
    """

    model: str
    method: str
    length: int


@dataclass(frozen=True)
class Part:
    """A file as its writer left it."""

    name: str
    nbytes: int
    sha256: str


class _PartEntry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    bytes: int
    sha256: str


class _Manifest(BaseModel):
    """The part of a manifest that is needed; the rest is for readers."""

    model_config = ConfigDict(strict=True)

    step: int
    model: str
    method: str
    length: int
    ranks: int = Field(ge=1)
    files: dict[str, _PartEntry]
    config: dict[str, dict[str, Any]] = {}


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
    with own_folder(path.parent) as draft:
        part = draft / path.name
        os.close(create(part))  # the library may follow a link
        safetensors.torch.save_file(snapshot.tensors, part, metadata={"state": snapshot.tree})
        # the library makes it its owner's alone; the folder has what this user's umask leaves
        part.chmod(draft.stat().st_mode & 0o666)
        nbytes, digest = _measure(part)
        sync(part)
    return Part(path.name, nbytes, digest)


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


def seal(folder: Path, step: int, parts: list[Part], about: Mapping[str, Any], keep: int) -> Path:
    """Make a set of the parts in the draft, then remove older ones until `keep` are left with it.

    Raises:
        OSError: it cannot be written, or a part is not there: parts must lie where rank 0 sees them.
    """
    draft, final = draft_folder(folder, step), set_folder(folder, step)
    for part in parts:
        seen = (draft / part.name).stat().st_size
        if seen != part.nbytes:
            raise OSError(f"{draft / part.name} has {seen} bytes, but {part.nbytes} were written")
    manifest: dict[str, Any] = {"format": FORMAT, "step": step, **about}
    manifest["files"] = {part.name: {"bytes": part.nbytes, "sha256": part.sha256} for part in parts}
    manifest["digest"] = _digest(manifest)
    with own_folder(draft) as whole:
        with open(create(whole / MANIFEST), "w", encoding="utf-8") as file:
            file.write(json.dumps(manifest, indent=1) + "\n")
        sync(whole / MANIFEST)
        sync(whole)
    if final.exists():
        # of the same step, and refused when the run resumed from an older one
        stale = final.with_name(f".{final.name}.replaced")
        final.rename(stale)
        shutil.rmtree(stale, ignore_errors=True)
    draft.rename(final)
    sync(folder)
    # a newer one is none of this run's: had it been usable, the run would have continued from it
    older = [path for path in list_sets(folder) if _step_of(path) <= step]
    for old in older[keep:]:
        # hidden first: half a set must not look like one
        hidden = old.rename(old.with_name(f".{old.name}.replaced"))
        shutil.rmtree(hidden, ignore_errors=True)
    return final


def list_sets(folder: Path) -> list[Path]:
    """All sets, whole or not, newest first."""
    sets = [path for path in folder.iterdir() if _SET.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(sets, key=_step_of, reverse=True)


def remove_drafts(folder: Path) -> None:
    """Remove what writers that were killed left behind."""
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if _DRAFT.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Rename a set that was refused, so that it is neither looked at nor counted again; returns where it is.

    Raises:
        OSError: it cannot be renamed.
    """
    aside = path.with_name(f"{path.name}.refused")
    if aside.exists():
        shutil.rmtree(aside)
    return path.rename(aside)


def remove_sets(folder: Path) -> None:
    """Remove all sets, those that were refused too, so that a run starts afresh."""
    refused = [path for path in folder.iterdir() if _REFUSED.fullmatch(path.name)] if folder.is_dir() else []
    for path in (*list_sets(folder), *refused):
        shutil.rmtree(path)


def read_manifest(path: Path, identity: Identity) -> dict[str, Any]:
    """The manifest of a set, and whether it is one for this run.

    Raises:
        BadCheckpointError: missing, damaged, of another format or model, or a part is missing or not as long as it was.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        sound = isinstance(manifest, dict) and manifest.get("digest") == _digest(manifest)
    except FileNotFoundError:
        raise BadCheckpointError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadCheckpointError(f"{MANIFEST} is damaged: {error}") from error
    form = manifest.get("format") if isinstance(manifest, dict) else None
    if form != FORMAT:
        raise BadCheckpointError(_wrong_format(form))
    if not sound:
        raise BadCheckpointError(f"{MANIFEST} is damaged: its digest does not fit")
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise BadCheckpointError(f"{MANIFEST} is damaged: {key}: {fault['msg']}") from None
    if manifest["step"] != _step_of(path):
        raise BadCheckpointError(f"{MANIFEST} is of step {manifest['step']}")
    for name, here in vars(identity).items():
        if manifest[name] != here:
            raise BadCheckpointError(f"of another run: {name} {manifest[name]!r} there, {here!r} here")
    parts, ranks = manifest["files"], manifest["ranks"]
    # compared before names are made of the number
    if len(parts) != ranks + 1 or parts.keys() != {COMMON, *map(rank_file, range(ranks))}:
        raise BadCheckpointError(f"{MANIFEST} is damaged: its files are not those of {ranks} ranks")
    for name, file in parts.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise BadCheckpointError(f"{name} is missing: {error.strerror}") from None
        if size != file["bytes"]:
            raise BadCheckpointError(f"{name} is truncated: {size} of {file['bytes']} bytes")
    return manifest


def check_part(path: Path, manifest: Mapping[str, Any]) -> None:
    """Read a part through. Raises BadCheckpointError: it cannot be read, or is not what was written."""
    try:
        _, digest = _measure(path)
    except OSError as error:
        raise BadCheckpointError(f"{path.name} cannot be read: {error.strerror or error}") from None
    if digest != manifest["files"][path.name]["sha256"]:
        raise BadCheckpointError(f"{path.name} is damaged: its SHA-256 does not fit")


def _step_of(path: Path) -> int:
    match = _SET.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _measure(path: Path) -> tuple[int, str]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _digest(manifest: Mapping[str, Any]) -> str:
    content = {name: value for name, value in manifest.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _wrong_format(form: Any) -> str:
    family, _, number = str(form).rpartition(" ")
    own, _, newest = FORMAT.rpartition(" ")
    if family == own and number.isdigit() and int(number) > int(newest):
        return f"its format {form!r} is newer than this program's, {FORMAT!r}"
    return f"its format is {form!r}, not {FORMAT!r}"
