"""Compares a text with a file beside the tests, for what a program renders."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest


def same_as(golden: Path, text: str, folder: Path) -> None:
    """Fail with the difference where a text is not the file's.

    Args:
        golden: the file.
        text: what was rendered.
        folder: gets the text under the file's name where they differ, to be copied if the change is meant.
    """
    old = golden.read_text(encoding="utf-8").splitlines()
    lines = difflib.unified_diff(old, text.splitlines(), "golden", "rendered", lineterm="", n=1)
    difference = "\n".join(lines)
    if difference:
        (folder / golden.name).write_text(text, encoding="utf-8")
        pytest.fail(f"{difference}\n\nIf this is meant: cp {folder / golden.name} {golden}", pytrace=False)
