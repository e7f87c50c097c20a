"""Checkpoints as files: what is written is read, and what is not whole is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobs.restart import files
from jobs.restart.files import BadCheckpointError, Manifest, Part
from jobs.restart.packing import Snapshot, unpack

IDENTITY = {"model": "abc", "method": "oktopk", "length": 1000}


def snapshot(state: dict[str, Any]) -> Snapshot:
    taken = Snapshot()
    taken.take(state)
    return taken


def seal(folder: Path, step: int, parts: dict[str, Part], keep: int = 9) -> None:
    content = {
        **IDENTITY,
        "format": files.FORMAT,
        "config": {},
        "step": step,
        "ranks": max(1, len(parts) - 1),
        "files": parts,
    }
    files.seal(folder, Manifest.model_validate(content), keep)


def write_set(folder: Path, step: int, keep: int = 9) -> Path:
    """A set of two ranks."""
    state, draft = snapshot({"value": torch.full((500,), float(step))}), files.draft_folder(folder, step)
    names = files.COMMON, files.rank_file(0), files.rank_file(1)
    seal(folder, step, {name: files.write_part(draft / name, state) for name in names}, keep)
    return files.set_folder(folder, step)


def test_a_state_survives_packing_bit_for_bit(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "floats": torch.tensor([0.1, -0.0, float("nan"), float("inf"), 1e-45]),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "array": np.arange(5, dtype=np.int64),
        "nested": {0: {"momentum": torch.ones(2, 2)}, "groups": [{"lr": 0.1, "betas": (0.9, 0.999)}]},
        "plain": [None, True, 7, 0.1 + 0.2, "text", np.float64(0.3)],
    }
    files.write_part(tmp_path / "part", snapshot(state))
    read = files.read_part(tmp_path / "part")
    assert read.keys() == state.keys()
    for name in ("floats", "half", "scalar", "empty", "transposed"):
        assert read[name].dtype == state[name].dtype
        assert read[name].view(-1).view(torch.uint8).tolist() == (
            state[name].contiguous().view(-1).view(torch.uint8).tolist()
        )
    assert isinstance(read["array"], np.ndarray)
    assert read["array"].tolist() == [0, 1, 2, 3, 4]
    assert read["nested"][0]["momentum"].tolist() == [[1, 1], [1, 1]]
    assert read["nested"]["groups"] == [{"lr": 0.1, "betas": (0.9, 0.999)}]
    assert read["plain"] == [None, True, 7, 0.1 + 0.2, "text", 0.3]


def test_a_snapshot_does_not_follow_what_it_was_taken_of() -> None:
    weights = torch.zeros(3)
    taken = snapshot({"weights": weights})
    weights += 1
    assert unpack(taken.tree, taken.tensors)["weights"].tolist() == [0, 0, 0]
    taken.take({"weights": weights})
    assert unpack(taken.tree, taken.tensors)["weights"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("foreign", [object(), {"f": print}, {(1, 2): 3}, [b"bytes"], {True: 1}])
def test_only_data_is_packed(foreign: object) -> None:
    with pytest.raises(TypeError, match=r"^place"):
        snapshot({"place": foreign})


def test_only_data_is_unpacked() -> None:
    with pytest.raises(ValueError, match="not a packed state"):
        unpack('{"call": ["os.system", "true"]}', {})


def test_the_newest_sets_up_to_here_are_kept(tmp_path: Path) -> None:
    for step in (10, 100, 110, 20, 30):
        write_set(tmp_path, step, keep=2)
    left = ["step-00000110", "step-00000100", "step-00000030", "step-00000020"]
    assert [path.name for path in files.list_sets(tmp_path)] == left
    assert {path.name for path in tmp_path.iterdir()} == {*left}


def test_a_fresh_run_leaves_no_set_of_before(tmp_path: Path) -> None:
    for _ in range(2):
        assert files.set_aside(write_set(tmp_path, 10)).name == "step-00000010.refused"
    write_set(tmp_path, 20)
    files.remove_sets(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_set_is_written_again_over_one_that_was_refused(tmp_path: Path) -> None:
    (write_set(tmp_path, 10) / files.COMMON).write_bytes(b"damaged")
    path = write_set(tmp_path, 10)
    files.check_part(path / files.COMMON, files.read_manifest(path, IDENTITY))
    assert os.listdir(tmp_path) == ["step-00000010"]


def test_a_draft_is_no_set_and_is_removed(tmp_path: Path) -> None:
    files.write_part(files.draft_folder(tmp_path, 10) / files.COMMON, snapshot({"a": torch.ones(1)}))
    (tmp_path / "notes.txt").write_text("mine")
    assert files.list_sets(tmp_path) == []
    files.remove_drafts(tmp_path)
    assert os.listdir(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("unseen", [files.COMMON, files.rank_file(1)])
def test_a_part_that_rank_0_cannot_see_makes_no_set(tmp_path: Path, unseen: str) -> None:
    path = files.draft_folder(tmp_path, 10) / files.COMMON
    parts = {files.COMMON: files.write_part(path, snapshot({"a": torch.ones(1)}))}
    with pytest.raises(OSError, match=unseen):
        seal(tmp_path, 10, {**parts, unseen: Part(bytes=1000, sha256="")})
    assert files.list_sets(tmp_path) == []


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / files.rank_file(1)).read_bytes())
    data[len(data) // 2] ^= 1
    (path / files.rank_file(1)).write_bytes(data)


def put_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def change(name: str = "", **values: Any) -> Callable[[Path], None]:
    """Write the manifest anew with these values, of the file of that name if there is one; None removes a key."""

    def apply(path: Path) -> None:
        manifest = json.loads((path / files.MANIFEST).read_text())
        if name:
            manifest["files"].setdefault(name, {**manifest["files"][files.COMMON]}).update(values)
        else:
            manifest = {key: value for key, value in {**manifest, **values}.items() if value is not None}
        (path / files.MANIFEST).write_text(json.dumps(manifest))

    return apply


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda path: os.truncate(path / files.rank_file(1), 100),
        r"rank-00001\S+ is truncated: 100 of \d+ bytes",
    ),
    (
        lambda path: os.truncate(path / files.rank_file(1), 1 << 40),
        r"rank-00001\S+ is truncated: 1099511627776 of \d+ bytes",
    ),
    (lambda path: put_a_pipe(path / files.rank_file(1)), r"rank-00001\S+ cannot be read: it is no regular"),
    (lambda path: put_a_pipe(path / files.MANIFEST), r"manifest\.json cannot be read: it is no regular"),
    (flip_a_bit, r"rank-00001\.safetensors is damaged: its SHA-256 does not fit"),
    (lambda path: (path / files.rank_file(0)).unlink(), r"rank-00000\S+ cannot be read: No such file"),
    (lambda path: (path / files.MANIFEST).unlink(), r"manifest\.json cannot be read: No such file"),
    (lambda path: os.truncate(path / files.MANIFEST, 200), "of another format: Invalid JSON: EOF"),
    # 5,000 lists in each other
    (
        lambda path: (path / files.MANIFEST).write_text("[" * 5000 + "]" * 5000),
        "Invalid JSON: recursion limit",
    ),
    (change(model="other"), "of another run: model 'other' there, 'abc' here"),
    (change(length=999), "of another run: length 999 there, 1000 here"),
    (change(format="oktopk checkpoint 2"), "another format: format: Input should be 'oktopk checkpoint 1'"),
    (change(step=7), r"manifest\.json is of step 7"),
    (change(ranks=None), "damaged or of another format: ranks: Field required"),
    (change(step="20"), "another format: step: Input should be a valid integer"),
    (change(ranks=0), "another format: ranks: Input should be greater than or equal to 1"),
    (change(ranks=10**30), r"manifest\.json is damaged: its files are not those of 10{30} ranks"),
    (change(files={}), r"manifest\.json is damaged: its files are not those of 2 ranks"),
    (change(config={"run": 3}), "another format: config: run: Input should be an object"),
    (change("../../outside"), r"manifest\.json is damaged: its files are not those of 2 ranks"),
    (change("a\0b"), r"manifest\.json is damaged: its files are not those of 2 ranks"),
    (change(files.COMMON, bytes="1"), r"common\.safetensors: bytes: Input should be a valid integer"),
    (change(files.COMMON, bytes=10**30), r"common\.safetensors is truncated: \d+ of 10{30} bytes"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_a_damaged_set_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    path = write_set(tmp_path, 20)
    damage(path)
    with pytest.raises(BadCheckpointError, match=said):
        manifest = files.read_manifest(path, IDENTITY)
        for name in manifest.files:
            files.check_part(path / name, manifest)
