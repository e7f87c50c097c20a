"""The image file: what was written is read, and nothing that is damaged or foreign is taken for it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from data import DataError
from data.images.file import open_image_file, write_image_file
from data.prepared_file import data_checksum

CLASSES = ("left", "right", "middle")
COUNTS = {"train": 12, "test": 5}


def pixels(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 2, 4, 6), dtype=np.uint8)


def write(path: Path, *parts: tuple[str, int, np.ndarray, np.ndarray], **changed: Any) -> None:
    described = {"classes": CLASSES, "source": "a test", "shape": (2, 4, 6), "counts": COUNTS} | changed
    write_image_file(path, parts, name="sides", **described)


TEST = ("test", 0, pixels(5, 1), np.arange(5) % 3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "sides.h5"
    first = ("train", 0, pixels(12, 0)[:8], np.zeros(8, np.int64))
    write(path, TEST, ("train", 8, pixels(12, 0)[8:], np.ones(4, np.uint8)), first)
    return path


def test_what_was_written_in_any_order_is_read(path: Path) -> None:
    train, test = open_image_file(path)
    assert np.array_equal(train.images, pixels(12, 0))
    assert np.array_equal(test.images, pixels(5, 1))
    assert train.labels.tolist() == [0] * 8 + [1] * 4
    assert test.labels.tolist() == [0, 1, 2, 0, 1]
    assert (train.classes, train.name, train.source) == (CLASSES, "sides", "a test")
    assert np.allclose(train.mean, pixels(12, 0).mean(axis=(0, 2, 3)) / 255)
    assert np.allclose(train.std, pixels(12, 0).std(axis=(0, 2, 3)) / 255)
    assert test.mean == train.mean
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_prepared_files_checksum_tells_its_contents(path: Path) -> None:
    with h5py.File(path) as file:
        said = [int(file[split].attrs["crc32"]) for split in ("train", "test")]
    assert data_checksum(path) == f"{said[0]:08x}-{said[1]:08x}"
    again, other = path.with_name("again.h5"), path.with_name("other.h5")
    for copied, seed in ((again, 0), (other, 2)):
        write(copied, TEST, ("train", 0, pixels(12, seed), np.arange(12) >= 8))
    assert data_checksum(again) == data_checksum(path) != data_checksum(other)
    with h5py.File(other, "r+") as file:
        del file["test"].attrs["crc32"]
    cut = path.with_name("cut.h5")
    cut.write_bytes(path.read_bytes()[:100])
    for none in ("", path.parent, path.with_name("none.h5"), __file__, other, cut):
        assert data_checksum(none) == ""


def test_images_are_mapped_and_the_file_cannot_be_changed(path: Path) -> None:
    train, _ = open_image_file(path)
    assert isinstance(train.images.base, np.memmap)
    train.images[0] = 0
    assert np.array_equal(open_image_file(path)[0].images, pixels(12, 0))


def test_compressed_images_are_read_as_well(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        images = file["train/images"][:]
        del file["train/images"]
        file.create_dataset("train/images", data=images, compression="gzip")
    train, _ = open_image_file(path)
    assert np.array_equal(train.images, pixels(12, 0))


def test_an_interrupted_writer_leaves_nothing_and_keeps_what_was_there(path: Path) -> None:
    before = path.read_bytes()
    for error in (RuntimeError, KeyboardInterrupt):

        def interrupted(error: type[BaseException] = error) -> Iterator[Any]:
            yield TEST
            raise error

        with pytest.raises(error):
            write_image_file(
                path,
                interrupted(),
                name="",
                classes=CLASSES,
                source="",
                shape=(2, 4, 6),
                counts=COUNTS,
            )
    with pytest.raises(DataError, match="12 images of split 'train' were never written"):
        write(path, TEST)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_labels_out_of_range_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"label 3 of record 1 is not in \[0, 2\]"):
        write(tmp_path / "x.h5", ("test", 0, pixels(5, 1), np.array([0, 3, 0, 0, 0])))
    assert not list(tmp_path.iterdir())


def test_a_missing_directory_or_an_empty_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: no such directory"):
        write(tmp_path / "nowhere" / "x.h5")
    with pytest.raises(DataError, match="0 samples in split 'test', not at least 1"):
        write(tmp_path / "x.h5", counts={"train": 1, "test": 0})


def test_a_path_without_a_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.h5: no such file"):
        open_image_file(tmp_path / "absent.h5")
    with pytest.raises(DataError, match="not a file"):
        open_image_file(tmp_path)


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_refused_with_its_name(path: Path, part: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    with pytest.raises(DataError, match=r"sides\.h5: not a whole HDF5 file of images"):
        open_image_file(path)


def put(name: str, value: object = None) -> Callable[[h5py.File], None]:
    """Change a data set or, with "@" before its name, an attribute; None: remove it."""

    def change(file: h5py.File) -> None:
        place = file.attrs if name[0] == "@" else file
        del place[name.removeprefix("@")]
        if value is not None:
            place[name.removeprefix("@")] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("@format"), "format None is not oktopk-images"),
        (put("@format", np.arange(3)), "format"),
        (put("@version", 2), "version 2 is not 1"),
        (put("@classes", 5), "not a whole HDF5 file of images"),
        (put("@mean", [0.5]), "mean .* is not one finite number for each of 2 channels"),
        (put("@std"), "std"),
        (put("test"), "test"),
        (put("train/labels"), "labels"),
        (put("test/images", np.zeros((5, 2, 4, 4), np.uint8)), "test images of shape"),
        (put("train/labels", np.full(12, 3)), r"split 'train': .*label 3 of record 0 is not in \[0, 2\]"),
        (put("train/labels", np.zeros(12, np.float32)), "labels are float32, not int64"),
    ],
)
def test_a_file_of_another_layout_is_refused_with_its_name(
    path: Path, change: Callable[[h5py.File], None], message: str
) -> None:
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(DataError, match=rf"sides\.h5.*{message}"):
        open_image_file(path)
