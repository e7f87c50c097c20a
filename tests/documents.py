"""Text that a network learns in seconds."""

from __future__ import annotations

import random
from pathlib import Path

from data.text.prepare import Recipe, prepare_text


def write_documents(folder: Path, count: int = 400) -> Path:
    """Documents of one word each, packed: what is masked can be told from what is not, a pair from its words, and the next word.

    text.h5 is for BERT, contiguous.h5 beside it has the words in their order.
    """
    (folder / "text").mkdir()
    drawn = random.Random(2)
    words = [f"{a}{b}{c}" for a in "bdk" for b in "aou" for c in "mt"]
    lines = []
    for _ in range(count):
        word = drawn.choice(words)
        lines += [" ".join([word.capitalize(), *[word] * 6]) + "."] * drawn.randint(1, 6)
        lines.append("")
    (folder / "text" / "made.txt").write_text("\n".join(lines), encoding="utf-8")
    prepare_text(folder / "text", folder / "text.h5", Recipe(length=32, held_out=0.1))
    recipe = Recipe(length=32, held_out=0.1, contiguous=True)
    prepare_text(folder / "text", folder / "contiguous.h5", recipe)
    return folder / "text.h5"
