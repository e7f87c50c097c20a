"""Every CUDA kernel compiles for the GPUs that it is meant for, on a machine that has none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [ROOT / package / "kernels" for package in ("collectives", "oktopk", "jobs")]
SOURCES = sorted(source for folder in FOLDERS for source in folder.glob("*.cu"))

nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")


def compile_kernel(
    source: Path, architecture: int, gradient: str, out: Path
) -> subprocess.CompletedProcess[str]:
    command = [
        "nvcc",
        "-std=c++17",
        f"-arch=sm_{architecture}",
        f"-DGRADIENT={gradient}",
        "-cubin",
        "-o",
        str(out),
    ]
    includes = [f"-I{folder}" for folder in FOLDERS]
    return subprocess.run(
        [*command, *includes, "-Werror", "all-warnings", str(source)],
        capture_output=True,
        text=True,
        check=False,
    )


@nvcc
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_kernel_compiles(source: Path, architecture: int, tmp_path: Path) -> None:
    text = source.read_text(encoding="utf-8")
    types = ["float", "__nv_bfloat16", "__half"] if "gradient.cuh" in text else ["float"]
    for gradient in types:
        done = compile_kernel(source, architecture, gradient, tmp_path / "kernel.cubin")
        assert done.returncode == 0, done.stderr


@nvcc
def test_a_kernel_that_is_wrong_does_not_compile(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.cu"
    wrong.write_text('#include "coo.cuh"\nextern "C" __global__ void f(Entry* e) { e[0].z = 1; }\n')
    assert compile_kernel(wrong, 90, "float", tmp_path / "kernel.cubin").returncode != 0


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_kernel_file_says_how_it_is_used(source: Path) -> None:
    header = source.read_text(encoding="utf-8").split("#include")[0]
    for word in ("Shapes", "Launch"):
        assert f"// {word}" in header, f"{source.name} does not say its {word.lower()}"
    assert any(word in header for word in ("NaN", "Overflow"))
