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
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def fill_in(app: object, page: str, source: list[str]) -> None:
    """Replace the line `<!-- generated: NAME -->` of a page by what NAME generates."""
    parts = {"configuration": configuration, "commands": commands}
    source[0] = re.sub(r"^<!-- generated: (\w+) -->$", lambda mark: parts[mark[1]](), source[0], flags=re.M)


def configuration() -> str:
    """A table for each section of a training run's configuration."""
    from jobs.config.config import Config
    from jobs.config.file import bounds, to_toml, type_name

    pages = []
    for section, field in Config.model_fields.items():
        model: Any = field.annotation
        rows = ["| key | type | default | bounds | description |", "|---|---|---|---|---|"]
        for key, value in model.model_fields.items():
            default = to_toml(value.get_default(call_default_factory=True))
            cells = [f"`{key}`", type_name(value.annotation), f"`{default}`"]
            cells += [", ".join(bounds(value)), value.description or ""]
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        pages.append("\n".join([f"## [{section}]", "", inspect.getdoc(model) or "", "", *rows]))
    return "\n\n".join(pages)


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
    """Name -> module with `main`, of what is run in jobs and data and takes options."""
    found = {}
    for path in sorted([*ROOT.glob("jobs/**/*.py"), *ROOT.glob("data/*.py")]):
        text = path.read_text(encoding="utf-8")
        if any(is_main(node) for node in ast.parse(text).body):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if "command_parser" in text or "import argparse" in text or path.stem == "__main__":
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
