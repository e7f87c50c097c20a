"""The cache of compiled kernels: what is in it is of these very sources, and steps find all they call."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numba import types

from collectives.cpu import compiled
from tests.launched import ROOT, run_alone, run_ranks

KERNEL = """
from numba import types
from collectives.cpu.compiled import compiled
from collectives.cpu.lanes import count

@compiled((types.uint64,))
def bits(mask):
    return count(mask)
"""

STEPS = """
import contextlib
import numpy as np
from mpi4py import MPI
from collectives.cpu import compiled
from oktopk import METHODS, GradientAllreduce
from oktopk.rows import RowSparseAllreduce

comm, length = MPI.COMM_WORLD, 4000
rng = np.random.default_rng(comm.rank)
ways = [{"method": name} for name in METHODS]
ways += [{"wire": wire} for wire in ("float32", "bfloat16", "int8", "int4")]
ways += [{"levels": "hosts", "ranks_per_host": 2}]
for way in ways:
    reducer = GradientAllreduce(comm, length, **{"method": "oktopk", "density": 0.01, "threshold_interval": 3, **way})
    for step in range(6):
        gradient = rng.standard_normal(length).astype(np.float32)
        gradient[: length // 2 * (step == 2)] = 1
        gradient[3 * (step == 4)] = np.nan if step == 4 else 1
        with contextlib.suppress(ArithmeticError):
            reducer.step(gradient, measure=step == 3 and way.get("method") != "dense" and not way.get("levels"))
    reducer.close()
for element_type in ("float32", "bfloat16", "float16"):
    table = RowSparseAllreduce(comm, 40, 8, element_type=element_type)
    kind = {"bfloat16": np.uint16}.get(element_type, element_type)
    table.step(rng.integers(40, size=9), rng.integers(9, size=(9, 8)).astype(kind))
if comm.rank == 0:
    for kernel, signatures in compiled._kernels:
        for types in kernel.signatures:
            print(kernel.py_func.__qualname__, types)
"""

SET_UP = """
from collectives.cpu import compiled
from oktopk.cpu import compile_kernels

compile_kernels()
for kernel, signatures in compiled._kernels:
    for types in signatures:
        print(kernel.py_func.__qualname__, types)
"""


def printed(tree: Path, cache: Path) -> str:
    # no bytecode either, which goes by the size and the time of a source
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "NUMBA_CACHE_DIR": str(cache),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import numpy; from collectives.cpu.bits import bits; print(bits(numpy.uint64(13)))",
        ],
        env=environment,
        cwd=tree,
        text=True,
        capture_output=True,
        check=True,
    )
    return done.stdout.strip()


def test_code_of_another_file_that_changed_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "collectives", tree / "collectives", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "collectives" / "cpu" / "bits.py").write_text(KERNEL)
    assert printed(tree, tmp_path / "cache") == "3"
    file = tree / "collectives" / "cpu" / "lanes.py"
    before = file.stat()
    file.write_text(file.read_text().replace("builder.ctpop(arguments[0])", "ir.Constant(_MASK, 0)"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert printed(tree, tmp_path / "cache") == "0"


def test_kernels_of_a_folder_are_cached_by_all_of_its_files(tmp_path: Path) -> None:
    file, other = tmp_path / "kernels.py", tmp_path / "called.py"
    file.write_text("from folder.called import called")
    digests = []
    for text in ("called = 1", "called = 2", "called = 1"):
        other.write_text(text)
        digests.append(compiled._digest.__wrapped__(file))
    assert digests[0] == digests[2] != digests[1]


def test_set_up_compiles_all_that_a_job_calls(tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    set_up, job = run_alone("-c", SET_UP), run_ranks(3, str(script))
    assert (set_up.returncode, job.returncode) == (0, 0), set_up.stderr + job.stderr
    called, prepared = (  # a launcher may add colours
        {line for line in done.stdout.splitlines() if not line.startswith("\x1b")} for done in (job, set_up)
    )
    assert len(called) > 30 and called <= prepared
    assert (
        "mpi4py.MPI was imported" not in job.stderr
    )  # before oktopk, as import sorters put it: on CPUs that is well


def test_kernels_run_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages and home of a container may be read-only."""
    original = compiled.njit

    def njit(cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError(
                "cannot cache function 'twice': no locator available for file '/packages/kernels.py'"
            )
        return original(**options)

    monkeypatch.setattr(compiled, "njit", njit)
    monkeypatch.setattr(compiled, "_kernels", [])
    compiled._say_uncached.cache_clear()

    def twice(number: int) -> int:
        return 2 * number

    with pytest.warns(UserWarning, match="Numba can write to no folder .* set NUMBA_CACHE_DIR"):
        kernel = compiled.compiled((types.int64,))(twice)
    compiled.load.__wrapped__()
    assert kernel(21) == 42 and compiled.cache_problem() == compiled.UNCACHED
