"""CIFAR-10 from its official layout into the image file, and what is refused on the way."""

import errno
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import DataError
from data.images import cifar10
from data.images.cifar10 import CLASSES, FILES, RECORD_BYTES
from data.images.file import open_image_file
from data.prepare import main, prepare_cifar10

RECORDS = 20


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the official number of records per file be small."""
    monkeypatch.setattr(cifar10, "BATCH_RECORDS", RECORDS)


def records(number: int, count: int = RECORDS) -> np.ndarray:
    content = np.random.default_rng(number).integers(0, 256, (count, RECORD_BYTES), dtype=np.uint8)
    content[:, 0] %= len(CLASSES)
    return content


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "batches.meta.txt").write_text("\n".join(CLASSES))
    for number, name in enumerate(FILES):
        records(number).tofile(folder / name)
    return folder


def pack(folder: Path, archive: Path, mode: str = "w:gz") -> Path:
    """An archive in an order that is not the official one."""
    with tarfile.open(archive, mode) as tar:  # type: ignore[call-overload]
        for path in sorted(folder.iterdir(), reverse=True):
            tar.add(path, f"cifar-10-batches-bin/{path.name}")
    return archive


@pytest.fixture
def archive(folder: Path, tmp_path: Path) -> Path:
    return pack(folder, tmp_path / "c.tar.gz")


def assert_is_cifar10(path: Path) -> None:
    train, test = open_image_file(path)
    expected = np.concatenate([records(number) for number in range(6)])
    images, labels = np.concatenate([train.images, test.images]), np.concatenate([train.labels, test.labels])
    assert (len(train), len(test)) == (5 * RECORDS, RECORDS)
    assert np.array_equal(images, expected[:, 1:].reshape(-1, 3, 32, 32))
    assert np.array_equal(labels, expected[:, 0])


def prepare(source: Path, output: Path, *options: str) -> int:
    return main(["cifar10", str(source), "-o", str(output), *options])


def test_a_folder_and_the_one_above_become_the_same_file(folder: Path, tmp_path: Path) -> None:
    for number, source in enumerate((folder, folder.parent)):
        assert prepare(source, tmp_path / f"{number}.h5") == 0
        assert_is_cifar10(tmp_path / f"{number}.h5")


@pytest.mark.parametrize("mode", ["w:gz", "w"])
def test_an_archive_in_any_order_becomes_the_same_file(folder: Path, tmp_path: Path, mode: str) -> None:
    archive = pack(folder, tmp_path / "c.tar", mode)
    assert prepare(archive, tmp_path / "c.h5") == 0
    assert_is_cifar10(tmp_path / "c.h5")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.h5", "c.tar", "cifar-10-batches-bin"]
    assert open_image_file(tmp_path / "c.h5")[0].source == "CIFAR-10 binary version, c.tar"


def test_an_output_that_exists_is_replaced_only_if_forced(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "c.h5"
    output.write_text("the only copy of something")
    assert prepare(archive, output) == 1
    assert capsys.readouterr().err == f"error: {output} exists; --force replaces it\n"
    assert output.read_text() == "the only copy of something"
    assert prepare(archive, output, "--force") == 0
    assert_is_cifar10(output)
    output.unlink()
    output.mkdir()
    assert prepare(archive, output, "--force") == 1
    assert "c.h5 is not a regular file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("cut", r"data_batch_2\.bin: 61459 bytes are not the 61460 of 20 records"),
        ("label", r"data_batch_2\.bin: label 10 of record 5 is not in \[0, 9\]"),
        ("no test", "test_batch.bin missing of the 6 files"),
        ("nothing", "data_batch_1.bin, .* missing of the 6 files of CIFAR-10, binary version"),
    ],
)
def test_a_damaged_source_is_refused_and_leaves_no_output(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: str,
    message: str,
) -> None:
    content = records(1)
    second = folder / FILES[1]
    if damage == "cut":
        second.write_bytes(content.tobytes()[:-1])
    elif damage == "label":
        content[5, 0] = 10
        content.tofile(second)
    else:
        for name in {"no test": FILES[5:], "nothing": FILES}[damage]:
            (folder / name).unlink()
    source = pack(folder, tmp_path / "c.tar.gz")
    assert prepare(source, tmp_path / "c.h5") == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {source}")
    with pytest.raises(DataError, match=message):
        prepare_cifar10(source, tmp_path / "c.h5")
    assert not list(tmp_path.glob("*.h5*"))
    assert not list(tmp_path.glob(".*"))


def test_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent: no such file or folder: the archive is at https"):
        prepare_cifar10(tmp_path / "absent", tmp_path / "c.h5")


def test_a_cut_or_foreign_archive_is_refused(folder: Path, tmp_path: Path) -> None:
    archive = pack(folder, tmp_path / "c.tar.gz")
    content = archive.read_bytes()
    for part in (0.0, 0.3, 0.95):
        archive.write_bytes(content[: int(part * len(content))])
        with pytest.raises(DataError, match=r"c\.tar\.gz: not a whole tar archive"):
            prepare_cifar10(archive, tmp_path / "c.h5")
    archive.write_bytes(b"something else entirely" * 100)
    with pytest.raises(DataError, match=r"c\.tar\.gz: not a whole tar archive"):
        prepare_cifar10(archive, tmp_path / "c.h5")


def test_links_and_doubles_in_an_archive_are_not_followed(folder: Path, tmp_path: Path) -> None:
    (folder / FILES[0]).unlink()
    archive = tmp_path / "c.tar"
    secret = tmp_path / "secret"
    records(0).tofile(secret)
    pack(folder, archive, "w")
    with tarfile.open(archive, "a") as tar:
        link = tarfile.TarInfo(FILES[0])
        link.type, link.linkname = tarfile.SYMTYPE, str(secret)
        tar.addfile(link)
    with pytest.raises(DataError, match=r"data_batch_1\.bin missing"):
        prepare_cifar10(archive, tmp_path / "c.h5")
    with tarfile.open(archive, "a") as tar:
        for prefix in ("a", "b"):
            member = tarfile.TarInfo(f"../{prefix}/{FILES[0]}")
            member.size = RECORDS * RECORD_BYTES
            tar.addfile(member, io.BytesIO(records(0).tobytes()))
    with pytest.raises(DataError, match=r"data_batch_1\.bin is there more than once"):
        prepare_cifar10(archive, tmp_path / "c.h5")


def test_a_folder_that_cannot_be_written_is_named(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: Any) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), arguments[0])

    monkeypatch.setattr(os, "open", refused)
    assert prepare(archive, tmp_path / "c.h5") == 1
    assert f"{os.strerror(errno.EROFS)}: " in capsys.readouterr().err
