"""The text that is read once: files of the Linux source to train.txt.xz and held.txt.xz, for tokens.py.

    apt-get download linux-source-6.1 && dpkg -x linux-source-6.1_*.deb x && tar -xJf x/usr/src/linux-source-6.1.tar.xz
    python linux_text.py linux-source-6.1 OUT

Measured with 6.1.192-2 of Debian 12. The source is GPL-2.0; nothing of it is in this repository.
"""

import lzma
import random
import sys
from pathlib import Path

SUFFIXES = {".c", ".h", ".rst", ".S", ".py", ".pl", ".sh", ".txt"}
HELD, TRAIN = 3_000_000, 330_000_000  # bytes


def texts(root: Path):
    """The files in an order that is shuffled, without those that are generated, long, or not UTF-8."""
    files = [path for path in root.rglob("*") if path.suffix in SUFFIXES and "asic_reg" not in str(path)]
    files = [
        path for path in files if path.is_file() and not path.is_symlink() and path.stat().st_size < 400_000
    ]
    files.sort(key=str)
    random.Random(0).shuffle(files)
    for path in files:
        text = path.read_bytes()
        try:
            text.decode()
        except UnicodeDecodeError:
            continue
        yield text


def main(root: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    source = texts(root)
    for name, most in (("held", HELD), ("train", TRAIN)):
        written = 0
        with lzma.open(out / f"{name}.txt.xz", "wb") as file:
            for text in source:
                file.write(text)
                written += len(text)
                if written >= most:
                    break


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
