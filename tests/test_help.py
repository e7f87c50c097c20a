"""Every command explains itself: a description, an example that parses, and a sentence or a phrase for every option and key."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from jobs.config.config import Config

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (
    "jobs.bench",
    "jobs.demo",
    "jobs.experiment",
    "jobs.report",
    "jobs.train",
    "jobs.watch",
    "data.prepare",
    "oktopk.bench",
    "oktopk.doctor",
    "oktopk.launch",
    "oktopk.plan",
    "tests.mutants",
    "tests.run",
)
# files that make the parser of a command that is in another file
PARSERS_OF = {"jobs/bench/options.py": "jobs.bench", "jobs/experiment/__main__.py": "jobs.experiment"}


class _ParsedError(Exception):
    """A command has parsed its words."""


def parser_of(command: str, words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The parser of a command, which is stopped where it parses its words: before, or with `words` after that."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *given: Any, **more: Any) -> NoReturn:
        if words is not None:
            parse_args(parser, *given, **more)
        raise _ParsedError(parser)

    path = ROOT.joinpath(*command.split("."))
    module = importlib.import_module(f"{command}.__main__" if path.is_dir() else command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        with pytest.raises(_ParsedError) as caught:
            module.main(list(words or ()))
    parser = caught.value.args[0]
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)


def examples(parser: argparse.ArgumentParser, command: str) -> list[list[str]]:
    """The arguments of each example in the epilog, one a line."""
    name = parser.prog if command.startswith("oktopk.") else f"-m {command}"
    lines = [line.strip() for line in (parser.epilog or "").splitlines() if f"{name} " in f"{line} "]
    return [shlex.split(line.partition(name)[2]) for line in lines]


def is_explained(text: str | None) -> bool:
    """Whether a help text has four words or more and begins as a sentence does, or with a name in backticks."""
    return bool(text) and len(str(text).split()) >= 4 and bool(re.match(r"[A-Z]|`\w", str(text)))


def test_every_command_is_listed() -> None:
    files = [path for folder in ("jobs", "data", "oktopk", "tests") for path in (ROOT / folder).rglob("*.py")]
    files.remove(Path(__file__).resolve())
    files.remove(ROOT / "data" / "command.py")
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    made = [
        file
        for file, text in texts.items()
        if "command_parser(" in text or ("argparse.ArgumentParser" in text and "prog=" in text)
    ]
    names = {PARSERS_OF.get(file, file.removesuffix(".py").replace("/", ".")) for file in made}
    assert {name.removesuffix(".__main__") for name in names} <= {*COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained_and_every_example_parses(command: str) -> None:
    for parser in parsers(parser_of(command)):
        assert is_explained(parser.description), f"{parser.prog}: {parser.description}"
        for action in parser._actions:
            if (
                isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
                or action.help is argparse.SUPPRESS
            ):
                continue
            assert is_explained(action.help), f"{parser.prog}: {action.dest}: {action.help}"
        found = examples(parser, command)
        assert found, f"{parser.prog}: --help has no example of {command}"
        for words in found:
            parser_of(command, words)
        assert parser.format_help()


def test_every_key_of_a_configuration_is_explained() -> None:
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    keys = {
        f"{name}.{key}": field
        for name, section in sections.items()
        for key, field in getattr(section, "model_fields", {}).items()
    }
    assert keys
    assert not {
        name: field.description for name, field in keys.items() if not is_explained(field.description)
    }


@pytest.mark.parametrize(
    ("text", "explained"),
    [
        ("Seconds between updates; default: 2.0", True),
        ("`density` of every method", True),
        ("of the gradients; default 1", False),
        ("Default: all", False),
        (None, False),
    ],
)
def test_a_fragment_is_told_from_a_phrase(text: str | None, explained: bool) -> None:
    assert is_explained(text) == explained
