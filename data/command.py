"""Builds the parser of a command: name, description, examples."""

from __future__ import annotations

import argparse


def command_parser(
    name: str, description: str, *examples: str, program: str = "python -m"
) -> argparse.ArgumentParser:
    """A parser whose help ends with examples.

    Args:
        name: module that `program` runs.
        description: of the command, a sentence.
        examples: what follows the module's name, or a whole line that holds it.
    """
    lines = [line if f"-m {name} " in line else f"python -m {name} {line}" for line in examples]
    return argparse.ArgumentParser(
        prog=f"{program} {name}",
        description=description,
        epilog="\n  ".join(["examples:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
