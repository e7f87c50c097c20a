"""Reads a configuration from a TOML file and overrides `section.key=value`."""

from __future__ import annotations

import argparse
import copy
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

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
    sections: dict[str, type[BaseModel]] = {
        name: field.annotation
        for name, field in Config.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }
    if len(place) == 1:
        unknown, kind, valid = place[0], "section", list(sections)
    else:
        unknown, kind, valid = place[1], f"key in [{place[0]}]", list(sections[place[0]].model_fields)
    close = difflib.get_close_matches(unknown, valid, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{'.'.join(place)}: unknown {kind}{hint}; valid: {', '.join(valid)}"
