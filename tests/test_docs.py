"""The pages of docs/ build without a warning, and the generated reference is complete."""

from __future__ import annotations

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


def test_what_users_are_told_to_load_cannot_run_code() -> None:
    """Before 2.6 torch.load ran code of a file in spite of weights_only (CVE-2025-32434)."""
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    oldest = [tuple(map(int, found)) for found in re.findall(r"^ +torch>=(\d+)\.(\d+)$", setup, re.MULTILINE)]
    assert len(oldest) == 3 and min(oldest) >= (2, 6)
    pages = [ROOT / "README.md", *DOCS.glob("*.md"), *(ROOT / "examples").iterdir()]
    sources = [path for package in ("oktopk", "jobs") for path in (ROOT / package).rglob("*.py")]
    for path in (path for path in (*pages, *sources) if path.is_file()):
        text = path.read_text(encoding="utf-8")
        assert text.count("torch.load(") == len(re.findall(r"torch\.load\([^()]*weights_only=True", text)), (
            path
        )


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
