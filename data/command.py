"""A command's parser, with examples, and what it prints, without the control characters of files and their names."""

from __future__ import annotations

import argparse
import re
from typing import IO, Any

# what moves the cursor, sets the terminal or turns the text around, and what no encoding has; lines end as they do
_CONTROLS = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]"
)


def escaped(text: str) -> str:
    """A text with control characters and bytes that are no UTF-8 as Python writes them, such as a backslash and x1b."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def escaped_values(value: Any) -> Any:
    """Nested dicts and lists whose texts, keys too, are `escaped`."""
    if isinstance(value, dict):
        return {escaped_values(name): escaped_values(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [escaped_values(inner) for inner in value]
    return escaped(value) if isinstance(value, str) else value


def show(text: object, *, file: IO[str] | None = None, flush: bool = False) -> None:
    """Print a text, `escaped`: parts of it may come from a file."""
    print(escaped(str(text)), file=file, flush=flush)


def attribute_texts(described: type) -> dict[str, str]:
    """Attribute -> what the class's docstring says of it, on one line."""
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", described.__doc__ or "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def command_parser(
    name: str, description: str, *examples: str, program: str = "python -m", further: str = ""
) -> argparse.ArgumentParser:
    """A parser whose help ends with examples.

    Args:
        name: module that `program` runs.
        description: of the command, a sentence.
        examples: what follows the module's name, or a whole line that holds it.
        further: stands above the examples.
    """
    lines = [line if f"-m {name} " in line else f"python -m {name} {line}" for line in examples]
    return argparse.ArgumentParser(
        prog=f"{program} {name}",
        description=description,
        epilog=further + "\n  ".join(["examples:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
