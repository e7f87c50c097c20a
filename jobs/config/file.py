"""Reads a configuration from a TOML file and overrides `section.key=value`; renders one as commented TOML."""

from __future__ import annotations

import argparse
import copy
import difflib
import json
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from jobs.config.config import Config


class ConfigError(ValueError):
    """A configuration that cannot be used; the message has one line per fault."""


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file and put the overrides on top.

    Args:
        path: TOML.
        overrides: "section.key=value" each; the value is read as TOML, and as a string where it is none.

    Raises:
        ConfigError: unreadable file, no TOML, an unknown key (the valid ones are named) or a bad value.
    """
    try:
        return validate(apply_overrides(read_toml(path), overrides))
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply") from None


def add_overrides(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the option --set, explained by a text, to a parser; it fills `overrides`, as `load` takes them."""
    kind: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    parser.add_argument("--set", dest="overrides", metavar="section.key=value", help=text, **kind)


def shown(path: str | None, overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Section -> key -> value of a configuration; without a file that of the overrides alone. Raises ConfigError."""
    if path is not None:
        return load(path, overrides).model_dump()
    # the defaults alone are no run: it would never end
    steps = apply_overrides({}, overrides).get("training", {}).get("steps", 0)
    sections = validate(apply_overrides({}, [*overrides, f"training.steps={steps or 1}"])).model_dump()
    sections["training"]["steps"] = steps
    return sections


def read_toml(path: str | Path) -> dict[str, Any]:
    """The file as nested dictionaries, not validated. Raises ConfigError."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def apply_overrides(document: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of the document with each "section.key=value" set, later ones winning. Raises ConfigError."""
    merged = copy.deepcopy(dict(document))
    for override in overrides:
        name, equals, text = override.partition("=")
        *tables, key = name.strip().split(".")
        if not (equals and tables and all(tables) and key):
            raise ConfigError(f"--set {override}: expected section.key=value")
        part = merged
        for table in tables:
            part = part.setdefault(table, {})
            if not isinstance(part, dict):
                kind = "section" if table is tables[0] else "table"
                raise ConfigError(f"--set {override}: {table} is not a {kind}")
        part[key] = _override_value(text.strip())
    return merged


def _override_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    # A line break in the text could have smuggled in a second key: then it is a string, oddly written.
    return parsed["value"] if len(parsed) == 1 else text


def validate(document: Mapping[str, Any]) -> Config:
    """The document as a Config. Raises ConfigError with one line per fault."""
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        raise ConfigError("\n".join(_fault_lines(error))) from None


def _fault_lines(error: ValidationError) -> list[str]:
    lines: dict[str, str] = {}
    for fault in error.errors():
        place = tuple(str(part) for part in fault["loc"][:2])
        name = ".".join(place)
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            line = _unknown_name(place)
        elif fault["type"] == "missing":
            line = f"{name} is missing"
        elif len(place) < 2:
            line = f"[{name}] {message}" if place else message
        else:
            line = f"{name} = {json.dumps(fault['input'], default=str, ensure_ascii=False)}: {message}"
        # A value of none of several allowed types is several faults to pydantic, and one to its author.
        lines[name] = f"{lines[name]}; or {message}" if name in lines and len(place) == 2 else line
    return list(lines.values())


def _unknown_name(place: tuple[str, ...]) -> str:
    sections: dict[str, Any] = {name: field.annotation for name, field in Config.model_fields.items()}
    if len(place) == 1:
        unknown, kind, valid = place[0], "section", list(sections)
    else:
        unknown, kind, valid = place[1], f"key in [{place[0]}]", list(sections[place[0]].model_fields)
    close = difflib.get_close_matches(unknown, valid, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{'.'.join(place)}: unknown {kind}{hint}; valid: {', '.join(valid)}"


_BOUNDS = (
    ("ge", ">= {}"),
    ("gt", "> {}"),
    ("le", "<= {}"),
    ("lt", "< {}"),
    ("multiple_of", "a multiple of {}"),
)
_TYPES: dict[Any, str] = {str: "string", bool: "true or false", int: "integer", float: "number"}


def commented_toml(sections: Mapping[str, Any]) -> str:
    """The sections' keys with their comments; keys that are not given have their defaults.

    Args:
        sections: section -> key -> value, valid or not.

    Returns:
        TOML that file.load() reads back to the same configuration.
    """
    lines: list[str] = []
    for name, section in Config.model_fields.items():
        model: Any = section.annotation
        values = sections.get(name, {})
        about = map(str.strip, (model.__doc__ or "").splitlines())
        lines += [*(f"# {line}" for line in about if line), f"[{name}]"]
        for key, field in model.model_fields.items():
            default = field.get_default(call_default_factory=True)
            lines.append(f"# {key_comment(field)}")
            lines.append(f"{key} = {to_toml(values.get(key, default))}")
        lines.append("")
    return "\n".join(lines)


def key_comment(field: FieldInfo) -> str:
    """Description, type, bounds and default of a key, on one line."""
    default = to_toml(field.get_default(call_default_factory=True))
    kind = ", ".join([type_name(field.annotation), *bounds(field)])
    return f"{' '.join((field.description or '').split())} ({kind}; default {default})"


def type_name(annotation: Any) -> str:
    """A type in TOML's words, or the values that are allowed."""
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return _either([json.dumps(value) for value in arguments])
    if origin in (typing.Union, UnionType):
        return _either([type_name(each) for each in arguments])
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is tuple:
        return f"list of {type_name(arguments[0])}s"
    return "table" if origin is dict else _TYPES[annotation]


def to_toml(value: Any) -> str:
    """A value as TOML: strings, numbers and booleans are written as in JSON."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{json.dumps(key)} = {to_toml(each)}" for key, each in value.items())
        return f"{{{inside}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


def bounds(field: FieldInfo) -> Iterator[str]:
    """The bounds of a value in words."""
    for bound, words in _BOUNDS:
        for constraint in field.metadata:
            if (limit := getattr(constraint, bound, None)) is not None:
                yield words.format(limit)


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
