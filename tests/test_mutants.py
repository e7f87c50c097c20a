"""The mutation check fits this checkout, and tells mutants that are found from those that survive."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT, MutantError, check, mutated
from tests.mutants.mutants import MUTANTS, Mutant
from tests.run import parse

FOUND = Mutant("a", "kept.py", "A = 1", "A = 2", "", "a")
SURVIVES = Mutant("b", "kept.py", "B = 1", "B = 2", "", "a")


def test_every_mutant_fits_the_tree_and_is_a_program() -> None:
    for mutant in MUTANTS:
        assert mutant.new != mutant.old
        text = mutated(mutant, (ROOT / mutant.file).read_text("utf-8"))
        if mutant.file.endswith(".py"):
            compile(text, mutant.file, "exec")  # else whatever imports it finds the mutant
        for path in parse(mutant.first.split()).paths:
            assert (ROOT / path).exists(), mutant.name
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert sum(Path(mutant.file).suffix in (".cu", ".cuh") for mutant in MUTANTS) >= 6


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two lines, and a run of tests that looks at the first; it notes its arguments."""
    root = tmp_path / "tree"
    (root / "tests").mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    (root / "kept.py").write_text("A = 1\nB = 1\n")
    (root / "tests" / "run.py").write_text(
        "import sys, kept\n"
        f"print(sys.argv[1:], file=open({str(tmp_path / 'runs')!r}, 'a'))\n"
        "if kept.A != 1: sys.exit('FAILED group: tests/test_kept.py::test_a[1]')\n"
    )
    return root


def test_a_mutant_is_found_or_survives_all_tests(tree: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    found = check(tree, [FOUND, SURVIVES], results)
    assert [found["a"]["found"], found["b"]["found"]] == ["group: tests/test_kept.py::test_a[1]", ""]
    expected = [["a"], ["tests/test_kept.py", "-k", "test_a"], ["a"], []]
    said = (tmp_path / "runs").read_text().splitlines()
    assert said == [str(["--no-lint", "-x", *arguments]) for arguments in expected]
    assert (tree / "kept.py").read_text() == "A = 1\nB = 1\n"
    assert json.loads(results.read_text()) == found
    assert check(tree, [FOUND, SURVIVES], results) == found  # from the file
    assert len((tmp_path / "runs").read_text().splitlines()) == len(expected)


@pytest.mark.parametrize(("old", "times"), [("= 1", 2), ("C", 0)])
def test_a_mutant_whose_text_is_not_there_once_is_refused(tree: Path, old: str, times: int) -> None:
    with pytest.raises(MutantError, match=f"a: its text occurs {times} times in kept.py, not once"):
        check(tree, [replace(FOUND, old=old)], None)


def test_a_test_that_fails_without_the_mutant_finds_nothing(tree: Path) -> None:
    (tree / "kept.py").write_text("A = 3\nB = 1\n")
    with pytest.raises(MutantError, match=r"b: group: tests/test_kept.py::test_a\[1\] fails without it too"):
        check(tree, [SURVIVES], None)


def test_a_failed_run_without_failed_tests_is_an_error(tree: Path) -> None:
    (tree / "tests" / "run.py").write_text("raise SystemExit('no test was run')")
    with pytest.raises(MutantError, match="no test was run"):
        check(tree, [FOUND], None)
