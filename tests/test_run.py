"""The closing line of `python -m tests.run` must be honest, whatever happens to a test or a group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run import ROOT, Tally, run_group


@pytest.mark.parametrize(
    ("source", "closing"),
    [
        ("def test_one(): pass\ndef test_two(): pass", "2 passed, 0 failed, 0 skipped in"),
        ("def test_one(): pass\ndef test_two(): assert 0", "1 passed, 1 failed, 0 skipped in"),
        ("import os\ndef test_one(): pass\ndef test_two(): os._exit(0)", "1 passed, 1 failed, 0 skipped in"),
        ("import pytest\n@pytest.fixture\ndef f(): 1 / 0\ndef test_one(f): pass", "0 passed, 1 failed, 0"),
        ("import pytest\ndef test_one(): pytest.skip()", "0 passed, 0 failed, 1 skipped in"),
        ("import no_such_module", "0 passed, 1 failed, 0 skipped in"),
        ("", "0 passed, 0 failed, 0 skipped in"),
    ],
    ids=["passes", "fails", "dies", "breaks in set-up", "only skipped", "does not import", "empty"],
)
def test_the_closing_line_counts_every_fate_of_a_test(tmp_path: Path, source: str, closing: str) -> None:
    (tmp_path / "test_sample.py").write_text(source)
    job = subprocess.run(
        [sys.executable, "-m", "tests.run", "--no-lint", "--no-ranks", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTEST_ADDOPTS": "-p tests.conftest"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert job.stdout.splitlines()[-1].startswith(closing)
    assert job.returncode == (0 if closing.startswith("2 passed, 0 failed") else 1)


@pytest.mark.parametrize(
    ("program", "outcomes", "passed", "failure"),
    [
        ("", "passed a", 1, None),
        ("", "", 0, "ran no test (status 0)"),
        ("", "skipped a", 0, "ran no test (status 0)"),
        ("raise SystemExit(3)", "passed a", 1, "ended with status 3"),
        ("import time; time.sleep(60)", "started a\npassed a", 1, "did not end in 2 s"),
        ("import os; os.kill(os.getpid(), 9)", "started a", 0, "a (took the job down)"),
    ],
)
def test_a_group_that_ends_badly_counts_as_failed(
    tmp_path: Path, program: str, outcomes: str, passed: int, failure: str | None
) -> None:
    (tmp_path / "outcomes").write_text(outcomes)
    tally = Tally()
    command = [sys.executable, "-c", program]
    run_group(tally, "group", command, 2.0, os.environ, tmp_path / "outcomes", may_be_empty=False)
    assert tally.counts["passed"] == passed
    assert tally.failures == ([f"group: {failure}"] if failure else [])


def test_a_later_run_closes_with_the_sum(tmp_path: Path) -> None:
    file = tmp_path / "tally"
    first, second = Tally(), Tally()
    first.begin_with(file)
    first.add("passed", "a")
    first.add("failed", "b")
    first.keep(file)
    second.begin_with(file)
    second.add("passed", "c")
    second.add("skipped", "d")
    assert second.closing_line(1) == "2 passed, 1 failed, 1 skipped in 1 s"
    assert second.failures == ["b"]
