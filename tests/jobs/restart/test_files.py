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
from jobs.restart.files import BadCheckpointError, Identity
from jobs.restart.packing import Snapshot, unpack

IDENTITY = Identity(model="abc", method="oktopk", length=1000)


def snapshot(state: dict[str, Any]) -> Snapshot:
    taken = Snapshot()
    taken.take(state)
    return taken


def write_set(folder: Path, step: int, *, keep: int = 9, about: dict[str, Any] | None = None) -> Path:
    """A set of two ranks."""
    draft = files.draft_folder(folder, step)
    parts = [
        files.write_part(draft / name, snapshot({"value": torch.full((500,), float(step))}))
        for name in (files.COMMON, files.rank_file(0), files.rank_file(1))
    ]
    return files.seal(folder, step, parts, {**vars(IDENTITY), "ranks": 2, **(about or {})}, keep)


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


def test_the_newest_sets_are_kept_and_later_steps_do_not_count_among_them(tmp_path: Path) -> None:
    for step in (10, 100, 110, 20, 30):
        write_set(tmp_path, step, keep=2)
    left = ["step-00000110", "step-00000100", "step-00000030", "step-00000020"]
    assert [path.name for path in files.list_sets(tmp_path)] == left
    assert {path.name for path in tmp_path.iterdir()} == {*left}


def test_a_run_that_starts_afresh_leaves_no_set_of_the_one_before(tmp_path: Path) -> None:
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


def test_a_part_that_rank_0_cannot_see_is_no_set(tmp_path: Path) -> None:
    part = files.write_part(files.draft_folder(tmp_path, 10) / files.COMMON, snapshot({"a": torch.ones(1)}))
    elsewhere = files.Part(files.rank_file(1), 100, "")
    with pytest.raises(OSError, match=r"rank-00001\.safetensors"):
        files.seal(tmp_path, 10, [part, elsewhere], vars(IDENTITY), 2)
    assert files.list_sets(tmp_path) == []


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / files.rank_file(1)).read_bytes())
    data[len(data) // 2] ^= 1
    (path / files.rank_file(1)).write_bytes(data)


def flip_the_manifest(path: Path) -> None:
    text = (path / files.MANIFEST).read_text()
    (path / files.MANIFEST).write_text(text.replace('"step": 20', '"step": 21'))


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, size)


def lose(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def change(**values: Any) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        manifest = json.loads((path / files.MANIFEST).read_text())
        manifest.update(values)
        manifest["digest"] = files._digest(manifest)
        (path / files.MANIFEST).write_text(json.dumps(manifest))

    return apply


def deep(key: str) -> Callable[[Path], None]:
    """A manifest that holds 5,000 lists in each other."""

    def apply(path: Path) -> None:
        nested = f'{{"{key}": {"[" * 5000}{"]" * 5000}}}'
        (path / files.MANIFEST).write_text(nested)

    return apply


def change_part(name: str = files.COMMON, **values: Any) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        parts = json.loads((path / files.MANIFEST).read_text())["files"]
        change(files={**parts, name: {**parts[files.COMMON], **values}})(path)

    return apply


def drop(key: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        manifest = json.loads((path / files.MANIFEST).read_text())
        del manifest[key]
        (path / files.MANIFEST).write_text(json.dumps(manifest))
        change()(path)

    return apply


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (cut(files.rank_file(1), 100), r"rank-00001\.safetensors is truncated: 100 of \d+ bytes"),
    (flip_a_bit, r"rank-00001\.safetensors is damaged: its SHA-256 does not fit"),
    (flip_the_manifest, r"manifest\.json is damaged: its digest does not fit"),
    (lose(files.rank_file(0)), r"rank-00000\.safetensors is missing"),
    (lose(files.MANIFEST), r"manifest\.json is missing"),
    (cut(files.MANIFEST, 200), r"manifest\.json is damaged"),
    (change(model="other"), r"of another run: model 'other' there, 'abc' here"),
    (change(length=999), r"of another run: length 999 there, 1000 here"),
    (change(format="oktopk checkpoint 2"), r"its format 'oktopk checkpoint 2' is newer than this program's"),
    (
        change(format="another 1"),
        r"its format 'another 1', not 'oktopk checkpoint 1'|its format is 'another 1'",
    ),
    (change(step=7), r"manifest\.json is of step 7"),
    (deep("format"), r"manifest\.json is damaged: maximum recursion depth"),
    (drop("ranks"), r"manifest\.json is damaged: ranks: Field required"),
    (drop("model"), r"manifest\.json is damaged: model: Field required"),
    (drop("files"), r"manifest\.json is damaged: files: Field required"),
    (change(step="20"), r"manifest\.json is damaged: step: Input should be a valid integer"),
    (change(ranks="two"), r"manifest\.json is damaged: ranks: Input should be a valid integer"),
    (change(ranks=0), r"manifest\.json is damaged: ranks: Input should be greater than or equal to 1"),
    (change(ranks=10**30), r"manifest\.json is damaged: its files are not those of 10{30} ranks"),
    (change(files=[]), r"manifest\.json is damaged: files: Input should be a valid dictionary"),
    (change(files={}), r"manifest\.json is damaged: its files are not those of 2 ranks"),
    (
        change(config={"run": 3}),
        r"manifest\.json is damaged: config\.run: Input should be a valid dictionary",
    ),
    (change_part("../../outside"), r"manifest\.json is damaged: its files are not those of 2 ranks"),
    (change_part("a\0b"), r"manifest\.json is damaged: its files are not those of 2 ranks"),
    (change_part(bytes="1"), r"common\.safetensors\.bytes: Input should be a valid integer"),
    (change_part(bytes=10**30), r"common\.safetensors is truncated: \d+ of 10{30} bytes"),
    (change_part(sha256=None), r"common\.safetensors\.sha256: Input should be a valid string"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_a_damaged_set_is_refused_by_name(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    path = write_set(tmp_path, 20)
    damage(path)
    with pytest.raises(BadCheckpointError, match=said):
        manifest = files.read_manifest(path, IDENTITY)
        for name in manifest["files"]:
            files.check_part(path / name, manifest)
