"""The pages of docs/ build without a warning, and the generated reference is complete."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.config.config import Config
from tests.launched import ROOT

DOCS = ROOT / "docs"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_pages_build_without_a_warning(tmp_path: Path) -> None:
    # a warning is a link or an anchor that leads nowhere, a page in no table of contents, a docstring that does not parse, a name
    # in a signature that nothing documents, a command whose --help fails
    build = ["-b", "dummy", "-W", "--keep-going", "-n", "-q", "-d", str(tmp_path / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *build, str(DOCS), str(tmp_path / "pages")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_reference_has_every_key_and_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    generate = importlib.import_module("generate")
    page = generate.configuration()
    for section, field in Config.model_fields.items():
        assert f"## [{section}]" in page
        for key in field.annotation.model_fields:
            assert f"| `{key}` |" in page
    assert "| `width` | number | `1.0` | > 0.0, <= 8.0 | For vgg16 and lstm:" in page
    assert (
        "| `density` | number | `0.01` |  | Share of the entries that is applied per step, in (0, 1];" in page
    )
    assert '| `nonfinite` | "raise" or "skip" | `"raise"` |' in page
    commands = generate.modules_with_options()
    assert {"jobs.train", "jobs.bench", "jobs.report", "jobs.watch", "data.prepare"} <= commands.keys()
    assert "--set section.key=value" in generate.help_text("jobs.train.__main__:main", "jobs.train")


def test_troubleshooting_has_the_sentences_that_the_library_raises() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").partition("## Of jobs.train")[0]
    cells = [row.split(" | ")[0] for row in page.splitlines() if row.startswith("| `")]
    shown = [sentence for cell in cells for sentence in re.findall("`([^`]+)`", cell)]
    files = [*(ROOT / "oktopk").rglob("*.py"), *(ROOT / "collectives").rglob("*.py")]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    library = "\n".join(text for tree in trees.values() for node in ast.walk(tree) for text in texts(node))
    assert len(shown) > 80
    assert [sentence for sentence in shown if any(part not in library for part in sentence.split("…"))] == []
    # and what the torch side itself raises, or warns of, is there
    raised = {
        text
        for path, tree in trees.items()
        if path.parent.name == "torch"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and re.search("((?<!Attribute)Error|warn)$", ast.unparse(node.func))
        and node.args
        for text in texts(node.args[0])
    }
    assert len(raised) > 20
    assert [sentence for sentence in raised if not any(covers(one, sentence) for one in shown)] == []


def texts(node: ast.AST) -> list[str]:
    """The text of a string, … for what is filled in; nothing for another node."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)]
    return []


def covers(shown: str, raised: str) -> bool:
    """Whether a sentence of the page tells one that is raised, or its beginning."""
    return any(len(part) > 12 and part in raised for part in shown.split("…"))
