"""Raw results in one archive: pages of training runs, their series, and documents of the bench that no page draws from.

    python docs/raw.py                 unpack docs/results/raw.tar.xz into docs/results/raw/
    python docs/raw.py --pack FOLDER   make the archive anew from a folder that it was unpacked into

The same files make the same archive: names in order, no times, no owners.
"""

from __future__ import annotations

import argparse
import lzma
import tarfile
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
ARCHIVE, FOLDER = RESULTS / "raw.tar.xz", RESULTS / "raw"


def unpack(folder: Path) -> list[str]:
    """Names of the files that lie in `folder` now."""
    with tarfile.open(ARCHIVE, "r:xz") as archive:
        archive.extractall(folder, filter="data")
        return archive.getnames()


def pack(folder: Path) -> int:
    """Number of files that the archive has now."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with lzma.open(ARCHIVE, "wb", preset=9) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for path in files:
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            entry.size = path.stat().st_size
            with open(path, "rb") as file:
                archive.addfile(entry, file)
    return len(files)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Unpack the raw results, or pack them anew.")
    parser.add_argument(
        "--pack", type=Path, metavar="FOLDER", help="Folder whose files the archive shall have."
    )
    options = parser.parse_args()
    if options.pack is None:
        print(f"{len(unpack(FOLDER))} files in {FOLDER}")
    else:
        print(f"{pack(options.pack)} files in {ARCHIVE}")
