"""The closing line of `python -m tests.run` must be honest, whatever happens to a test or a group."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import LONGEST, STARTING_RANKS
from tests.run import (
    ALL_TESTS,
    FOR_ANY_RANKS,
    HOST_CUDA_RANKS,
    HOSTS_RANKS,
    MANY_RANKS,
    ROOT,
    Tally,
    announce,
    beside,
    files_of_ranks_alone,
    files_of_tests,
    files_with_rank_tests,
    marked,
    not_alone,
    parse,
    rank_groups,
    run,
    run_group,
)

EVERY_FATE = """
import os, pytest
@pytest.fixture
def broken(): 1 / 0
def test_passes(): pass
def test_fails(): assert 0
def test_breaks_in_set_up(broken): pass
def test_is_skipped(): pytest.skip()
def test_dies(): os._exit(0)
"""
LEFT_OUT = """
import pytest
for_gpus = pytest.mark.skipif(True, reason='no GPU')
def test_one(): pass
@pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=for_gpus)])
def test_two(device): pass
@for_gpus
def test_three(): pass
@pytest.mark.long('a reason')
def test_four(): pass
"""
OF_A_GROUP = pytest.mark.long(
    "starts a run; `make test` has a group whose tests are skipped, and one without tests"
)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("source", "workers", "closing"),
    [
        (LEFT_OUT, 0, "2 passed, 0 failed, 0 skipped in"),
        (EVERY_FATE, 0, "1 passed, 3 failed, 1 skipped in"),
        pytest.param(
            EVERY_FATE,
            2,
            "1 passed, 3 failed, 1 skipped in",
            marks=pytest.mark.long("`make test` has one process"),
        ),
        pytest.param(
            "import pytest\ndef test_one(): pytest.skip()",
            0,
            "0 passed, 0 failed, 1 skipped in",
            marks=OF_A_GROUP,
        ),
        ("import no_such_module", 0, "0 passed, 1 failed, 0 skipped in"),
        pytest.param("", 0, "0 passed, 0 failed, 0 skipped in", marks=OF_A_GROUP),
    ],
    ids=[
        "passes, some left out",
        "every fate",
        "every fate, two workers",
        "only skipped",
        "does not import",
        "empty",
    ],
)
def test_the_closing_line_counts_every_fate_of_a_test(
    tmp_path: Path, source: str, workers: int, closing: str
) -> None:
    (tmp_path / "test_sample.py").write_text(source)
    job = subprocess.run(
        [sys.executable, "-m", "tests.run", "--no-lint", "--no-ranks", f"--workers={workers}", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTEST_ADDOPTS": "-p tests.conftest"},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    *_, said, last = job.stdout.splitlines()
    assert last.startswith(closing), job.stdout
    assert source != LEFT_OUT or said == "There is no GPU: 2 tests that need one were not run."
    assert job.returncode == (0 if closing.startswith("2 passed, 0 failed") else 1)


@pytest.mark.parametrize(
    ("program", "outcomes", "passed", "failure"),
    [
        ("", "passed a", 1, None),
        ("", "", 0, "ran no test (status 0)"),
        ("", "without_gpu a", 0, "ran no test (status 0)"),
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


def test_what_runs_beside_is_counted_and_shown_last(capfd: pytest.CaptureFixture[str]) -> None:
    def work(own: Tally) -> None:
        announce("its group", own.output)
        assert run(own, [sys.executable, "-c", "print('of its own')"], 60) == 0
        own.add("failed", "its group: a")
        own.ran, own.without_gpu = {"a"}, {"a", "b"}

    tally = Tally()
    tally.add("passed", "before")
    with beside(tally, work):
        time.sleep(0.2)
        print("of the others", flush=True)
    assert capfd.readouterr().out.split("\n") == ["of the others", "", "=== its group ===", "of its own", ""]
    assert (tally.counts, tally.failures) == ({"passed": 1, "failed": 1}, ["its group: a"])
    assert tally.without_gpu - tally.ran == {"b"}


def test_what_runs_beside_ends_with_an_interrupt(tmp_path: Path) -> None:
    program = "import sys, time; open(sys.argv[1], 'w').write('up'); time.sleep(600)"
    files = [tmp_path / name for name in ("first", "second")]

    def work(own: Tally) -> None:
        for file in files:
            command = [sys.executable, "-c", program, str(file)]
            run_group(own, "group", command, 300, os.environ, tmp_path / "outcomes", may_be_empty=True)

    with pytest.raises(KeyboardInterrupt), beside(Tally(), work):
        end = time.monotonic() + 60
        while not files[0].exists() and time.monotonic() < end:
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert [file.exists() for file in files] == [True, False]


def test_what_test_leaves_out_long_runs_and_all_runs_both() -> None:
    """Every file of rank tests on 1 and 3 ranks, those of jobs and torch on 1 in the long run, those of the library on more."""

    def jobs(*words: str) -> set[tuple[int, str, str]]:
        groups = rank_groups(parse(words), files_with_rank_tests(ALL_TESTS))
        return {(ranks, file, mark) for ranks, files, mark in groups for file in files}

    files = files_with_rank_tests(ALL_TESTS)
    library = [file for file in files if file.startswith(FOR_ANY_RANKS)]
    assert 0 < len(library) < len(files)
    everything = {(ranks, file) for ranks in (1, 3) for file in files}
    everything |= {(ranks, file) for ranks in (2,) for file in library}
    more = {(ranks, file) for ranks in (4, 5, 8) for file in library}
    of_four, of_five, of_six, many = (
        {
            (ranks, file, f"mpi and not long and also(ranks={ranks})")
            for file in marked(files, "also(ranks=", ranks)
        }
        for ranks in (4, 5, 6, 8)
    )
    assert HOSTS_RANKS == (4, 5, 6) and MANY_RANKS == 8
    of_hosts = of_four | of_five | of_six
    assert {"tests/oktopk/test_levels.py"} < {file for _, file, _ in of_six} & {*library}
    names = ("replicas", "kinds_of_replicas", "shards")
    assert {f"tests/oktopk/test_{name}.py" for name in names} <= {file for _, file, _ in of_four}
    assert of_five
    assert jobs("--all") == {(*job, "mpi") for job in everything | more} | of_six
    one, other, long = jobs(), jobs("--long"), "mpi and long"
    assert everything <= {job[:2] for job in one | other}
    assert many and many < one
    assert of_hosts < other
    alone = {(1, file, "mpi and not long") for file in not_alone(files)}
    assert {
        f"tests/{name}.py" for name in ("jobs/bench/test_hook", "oktopk/test_updates", "test_blocks")
    } <= {file for _, file, _ in alone}
    assert alone < other and not alone & one
    of_one = {(1, file, "mpi and not long and also(ranks=1)") for file in marked(files, "also(ranks=", 1)}
    assert of_one and of_one < one and {mark for _, _, mark in one - many - of_one} == {"mpi and not long"}
    other -= of_hosts | alone
    assert {(ranks, mark) for ranks, _, mark in other} == {(2, "mpi and not long"), (1, long), (3, long)}
    assert jobs("--ranks", "4") == {(4, file, "mpi and not long") for file in files}


def test_ignored_files_have_tests_of_ranks_alone() -> None:
    ignored, files = files_of_ranks_alone(), files_with_rank_tests(ALL_TESTS)
    assert (
        {"tests/oktopk/test_contract.py", "tests/collectives/test_cuda_dense_p2p.py"} < {*ignored} < {*files}
    )
    assert not {"tests/oktopk/test_levels.py", "tests/jobs/bench/test_bench.py"} & {*ignored}


def test_tests_of_four_ranks_are_run_on_four_or_eight() -> None:
    """On 8 by `make test`, on 4 by `.ci/run`, where 8 would start torch for this test alone."""
    for file in files_with_rank_tests(ALL_TESTS):
        nodes = ast.parse((ROOT / file).read_text("utf-8")).body
        of_all = " ".join(ast.unparse(node) for node in nodes if "pytestmark =" in ast.unparse(node))
        for node in nodes:
            marks = " ".join(map(ast.unparse, getattr(node, "decorator_list", ())))
            ranks = re.search(r"min_size=(\d+)", marks)
            if ranks and int(ranks[1]) > 3:
                where = f"{file}::{node.name}"  # type: ignore[attr-defined]
                assert re.search(r"also\(ranks=[48]\)|host_cuda\(ranks=4\)", of_all + marks), where


def test_files_that_come_first_are_there() -> None:
    assert [file for file in (*STARTING_RANKS, *LONGEST) if not (ROOT / file).is_file()] == []


def test_marks_name_ranks_of_a_run_and_tests_on_gpus() -> None:
    """Others are left out there, as tests/conftest.py does by their marks."""
    known = {"also": {1, *HOSTS_RANKS, MANY_RANKS}, "host_cuda": {0, *HOST_CUDA_RANKS}}
    for mark, numbers in known.items():
        for file in marked(files_of_tests(ALL_TESTS), mark):
            text = (ROOT / file).read_text("utf-8")
            assert {int(n) for n in re.findall(rf"mark\.{mark}\(ranks=(\d+)\)", text)} <= numbers, file
            on_gpus = re.search(r"\bDEVICES\b|\bon_gpus\b|\b(cuda|device): str", text)
            assert mark == "also" or on_gpus, file


def test_a_run_begins_with_what_the_one_before_has_kept(tmp_path: Path) -> None:
    file, first, second = tmp_path / "tally", Tally(), Tally()
    file.touch()  # as `.ci/run` makes it
    first.begin_with(file)
    for state, name in (("passed", "a"), ("failed", "b"), ("skipped", "c")):
        first.add(state, name)
    first.without_gpu, first.ran = {"c", "d"}, {"d"}
    first.keep(file)
    second.begin_with(file)
    second.add("passed", "e")
    assert (second.counts, second.failures) == ({"passed": 2, "failed": 1, "skipped": 1}, ["b"])
    assert second.without_gpu - second.ran == {"c"}


def test_the_options_of_the_run_of_everything_are_known() -> None:
    words = (ROOT / ".ci" / "run").read_text("utf-8")
    (given,) = re.findall(r'TEST_ARGS="(--\w+) ', words)
    assert getattr(parse([given, "file"]), given.removeprefix("--")) == Path("file")
