"""Renders a configuration as TOML with a comment per key: meaning, type, bounds, default."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jobs.config.config import Config

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
        model = section.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel)
        values = sections.get(name, {})
        lines += [*(f"# {line}" for line in _summary(model)), f"[{name}]"]
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


def _summary(model: type[BaseModel]) -> list[str]:
    return [line.strip() for line in (model.__doc__ or "").strip().splitlines() if line.strip()]


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
