"""Plain text in files: documents, which blank lines part, and their sentences."""

import re
from collections.abc import Iterator
from pathlib import Path

from data import DataError

# A full stop, or one and a closing quote, before a space and what can begin a sentence.
_SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["'”’)\]]))\s+(?=["'“‘(\[]?[^\W_a-z])""")


def text_files(source: Path) -> list[Path]:
    """The files of a corpus, in an order that does not depend on the file system.

    Args:
        source: a file, or a folder, searched with its subfolders; what begins with a dot is left out.

    Raises:
        DataError: no such source, or no file in it.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise DataError(f"{source}: no such file or directory")
    files = [
        path
        for path in sorted(source.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(source).parts)
    ]
    if not files:
        raise DataError(f"{source}: no file of text in it")
    return files


def read_documents(path: Path) -> Iterator[tuple[str, int]]:
    """The documents of a file: what stands between blank lines, its lines joined.

    Args:
        path: of UTF-8 text.

    Returns:
        An iterator over documents and the bytes read for each.

    Raises:
        DataError: not readable, empty, or binary: with a zero byte, or not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            start, reported, lines, found = 0, 0, list[str](), False
            for line in file:
                text = _decoded(line, path, start).strip()
                start += len(line)
                if text:
                    lines.append(text)
                    found = True
                elif lines:
                    yield " ".join(lines), start - reported
                    reported, lines = start, []
            if lines:
                yield " ".join(lines), start - reported
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    if not found:
        raise DataError(f"{path}: no text in its {start} bytes")


def _decoded(line: bytes, path: Path, start: int) -> str:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {start + error.start} is not UTF-8: not plain text") from error
    if "\0" in text:
        raise DataError(f"{path}: a zero byte after byte {start}: a binary file, not plain text")
    return text.removeprefix("\ufeff")


def split_sentences(document: str) -> list[str]:
    """The sentences of a document; an abbreviation before a capital ends one as well."""
    return _SENTENCE_END.split(document)
