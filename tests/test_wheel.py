"""What is published: the sdist, and the wheel that is built from it, which works in an environment of its own.

Only the test marked `long` downloads: what the wheel needs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("collectives", "oktopk")
# what building takes from the checkout
SOURCES = (
    "setup.cfg",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CITATION.cff",
)
INSTALL_SECONDS = 150  # the CPU build of torch is 200 MB
LOOP = re.compile(r"```diff\n(.*?)```", re.DOTALL)
BEFORE_LOOP = """
import torch
from torch.nn.functional import cross_entropy as loss
def Net():
    network = torch.nn.Linear(1000, 10)
    network.initial = network.weight.detach().clone()
    return network
my_ranks_batches = [(torch.randn(8, 1000), torch.randint(10, (8,))) for _ in range(5)]
"""
AFTER_LOOP = """
import collectives, oktopk
from mpi4py import MPI
weights = MPI.COMM_WORLD.allgather(model.weight.detach().numpy().tobytes())
if MPI.COMM_WORLD.rank == 0:
    moved = bool((model.weight != model.initial).any())
    print(len(weights), len(set(weights)), moved, oktopk.__file__, collectives.__file__)
"""


def run(
    *command: str | Path, cwd: Path, seconds: int = 55, **environment: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def install(python: Path, requirement: str) -> None:
    """Install from the index that pip is configured for; skips the test where that cannot be reached, or is slow."""
    pip = [str(python), "-m", "pip", "install", "--retries=0"]
    sample = subprocess.run(
        [*pip, "--dry-run", "--no-deps", "mpi4py"], capture_output=True, text=True, timeout=150, check=False
    )
    if "(from versions: none)" in sample.stderr:
        pytest.skip(f"pip's index cannot be reached: {sample.stderr.strip().splitlines()[-1]}")
    pinned = [*pip, "--constraint", str(ROOT / "constraints.txt"), requirement]
    try:
        done = subprocess.run(pinned, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"torch, MPI and the rest were not installed from pip's index within {INSTALL_SECONDS} s")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, built from a copy of the sources, and the wheel, built from the sdist."""
    folder = tmp_path_factory.mktemp("build")
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; build_meta.build_{}({!r})"
    made = folder / "dist"
    run(sys.executable, "-c", build.format("sdist", str(made)), cwd=folder)
    (sdist,) = made.iterdir()
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    run(sys.executable, "-c", build.format("wheel", str(made)), cwd=unpacked)
    return made


def test_the_wheel_from_the_sdist_holds_every_file(dist: Path) -> None:
    kinds = (".py", ".cu", ".cuh", ".typed")
    expected = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix in kinds
    }
    assert {
        "oktopk/py.typed",
        "collectives/py.typed",
        "oktopk/cuda/kth.cu",
        "collectives/cuda/coo.cuh",
    } <= expected
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        (metadata,) = (name for name in packed if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    assert {name for name in packed if ".dist-info/" not in name} == expected
    assert "Typing :: Typed" in text
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert packed >= expected | set(SOURCES)


@pytest.mark.long("downloads what the wheel needs; `make test` has what sdist and wheel hold")
@pytest.mark.timeout(420)
def test_the_wheel_trains_by_the_readmes_loop(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    site, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    run(sys.executable, "-m", "venv", site, cwd=empty)
    install(site / "bin" / "python", f"{wheel}[torch,mpi]")
    lines = LOOP.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert lines, "README.md has no loop"
    loop = "".join(f"{line[1:]}\n" for line in lines[1].splitlines())
    assert "optimizer.step()" in loop
    (empty / "train.py").write_text(BEFORE_LOOP + loop + AFTER_LOOP)
    done = run(site / "bin" / "oktopk-run", "-n", "2", "train.py", cwd=empty, seconds=110, PYTHONPATH="")
    ranks, distinct, moved, *files = done.stdout.split()
    # two ranks that hold the same weights, and not those of the start
    assert (ranks, distinct, moved) == ("2", "1", "True")
    assert all(Path(file).is_relative_to(site) for file in files)
    for name in ("oktopk-run", "oktopk-doctor", "oktopk-bench", "oktopk-plan"):
        assert f"usage: {name}" in run(site / "bin" / name, "--help", cwd=empty, PYTHONPATH="").stdout
    screen = run(site / "bin" / "oktopk-doctor", cwd=empty, seconds=110, PYTHONPATH="").stdout
    assert "host memory, MPI" in screen and "oktopk[" not in screen
