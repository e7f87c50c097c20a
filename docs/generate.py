"""The generated parts of the reference: every key of the configuration, and the help text of every command."""

from __future__ import annotations

import ast
import configparser
import contextlib
import importlib
import inspect
import io
import os
import re
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent
BOUNDS = {"gt": "> {}", "ge": "≥ {}", "lt": "< {}", "le": "≤ {}", "multiple_of": "multiple of {}"}


def fill_in(app: object, page: str, source: list[str]) -> None:
    """Replace the line `<!-- generated: NAME -->` of a page by what NAME generates."""
    parts = {"configuration": configuration, "commands": commands}
    source[0] = re.sub(r"^<!-- generated: (\w+) -->$", lambda mark: parts[mark[1]](), source[0], flags=re.M)


def configuration() -> str:
    """A table for each section of a training run's configuration."""
    from jobs.config.config import Config
    from oktopk import Settings

    settings = documented_attributes(Settings)
    pages = []
    for section, field in Config.model_fields.items():
        model: Any = field.annotation
        rows = ["| key | type | default | bounds | description |", "|---|---|---|---|---|"]
        for key, value in model.model_fields.items():
            bounds = [
                text.format(getattr(rule, name))
                for rule in value.metadata
                for name, text in BOUNDS.items()
                if getattr(rule, name, None) is not None
            ]
            meaning = value.description or (settings.get(key, "") if section == "reduction" else "")
            cells = [
                f"`{key}`",
                type_name(value.annotation),
                toml(value.get_default(call_default_factory=True)),
                ", ".join(bounds),
            ]
            rows.append("| " + " | ".join([*cells, meaning.replace("|", "\\|")]) + " |")
        pages.append("\n".join([f"## [{section}]", "", inspect.getdoc(model) or "", "", *rows]))
    return "\n\n".join(pages)


def documented_attributes(documented: type) -> dict[str, str]:
    """attribute -> its lines in the `Attributes:` of a class's docstring, joined."""
    text = (inspect.getdoc(documented) or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): ((?:.+\n?)(?:^ {8}.+\n?)*)", text, flags=re.M)
    return {name: " ".join(meaning.split()) for name, meaning in entries}


def type_name(kind: Any) -> str:
    """A type as Markdown: names, or the values that are allowed."""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{toml(value, quoted=False)}`" for value in get_args(kind))
    if get_origin(kind) is tuple:
        return f"list of {type_name(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "table"
    if args := get_args(kind):
        return " or ".join(type_name(arg) for arg in args)
    return str(getattr(kind, "__name__", kind))


def toml(value: Any, quoted: bool = True) -> str:
    """A value as a configuration file writes it."""
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, tuple):
        text = str(list(value))
    else:
        text = repr(value)
    return f"`{text}`" if quoted else text


def commands() -> str:
    """What `--help` prints: of every console script of setup.cfg, and every module with options of its own."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    scripts = setup.get("options.entry_points", "console_scripts", fallback="").split("\n")
    entries = dict(re.split(r"\s*=\s*", script.strip()) for script in scripts if script.strip())
    entries |= {f"python -m {name}": f"{module}:main" for name, module in modules_with_options().items()}
    pages = []
    for name, entry in entries.items():
        text = help_text(entry, name)
        several = re.search(r" \{([\w,]+)\} \.\.\.$", text, flags=re.M)  # commands of this command
        more = several[1].split(",") if several else []
        texts = [text, *(help_text(entry, name, command) for command in more)]
        pages.append(f"## `{name}`\n\n" + "\n\n".join(f"```text\n{text}\n```" for text in texts))
    return "\n\n".join(pages)


def modules_with_options() -> dict[str, str]:
    """Name -> module with `main`, of what is run in jobs and data and takes options by argparse."""
    found = {}
    for path in sorted([*ROOT.glob("jobs/**/*.py"), *ROOT.glob("data/*.py")]):
        text = path.read_text(encoding="utf-8")
        if any(is_main(node) for node in ast.parse(text).body):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if "import argparse" in text or path.stem == "__main__":
                found[module.removesuffix(".__main__")] = module
    return found


def is_main(node: ast.stmt) -> bool:
    """Whether a statement is `if __name__ == "__main__"`."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def help_text(entry: str, *words: str) -> str:
    """What a command prints for `--help`.

    Args:
        entry: "module:function".
        words: of the command line, before `--help`.

    Raises:
        RuntimeError: it leaves with another status than 0.
    """
    module, function = entry.split(":")
    printed = io.StringIO()
    argv, environment = sys.argv, dict(os.environ)
    sys.argv = [*words, "--help"]
    os.environ.update(COLUMNS="100", NO_COLOR="1")
    try:
        with contextlib.redirect_stdout(printed):
            status = getattr(importlib.import_module(module), function)()
    except SystemExit as leaving:
        status = leaving.code
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(environment)
    if status:
        raise RuntimeError(f"{' '.join(words)} --help leaves with status {status}")
    return printed.getvalue().rstrip()
