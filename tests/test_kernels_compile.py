"""Every CUDA kernel compiles for the GPUs that it is meant for, on a machine that has none."""

from __future__ import annotations

import re
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
    for word in ("Shapes", "Units", "Launch", "Overflow", "NaN"):
        found = f"// {word}" in header or (word == "NaN" and "NaN" in header)
        assert found, f"{source.name} does not say its {word.lower()}"


def constants(source: Path) -> dict[str, int]:
    """The plain integers and enumerators that a header defines."""
    text = source.read_text(encoding="utf-8")
    found = {name: int(value) for name, value in re.findall(r"\b([A-Z_]+) = (\d+)[,; }]", text)}
    return found


def test_hosts_and_kernels_lay_windows_and_notes_out_alike() -> None:
    kernels = ROOT / "collectives" / "kernels"
    peer, region = constants(kernels / "peer.cuh"), constants(kernels / "region.cuh")
    python = {
        name: source.read_text(encoding="utf-8")
        for name, source in {
            "window": ROOT / "collectives" / "peer_memory.py",
            "launches": ROOT / "oktopk" / "peer_launches.py",
            "step": ROOT / "oktopk" / "peer_step.py",
            "regions": ROOT / "collectives" / "device_kernels.py",
            "naming": ROOT / "oktopk" / "naming_launches.py",
        }.items()
    }
    layout = (peer["NOTES"], peer["SLOTS"], peer["NOTE_WORDS"], peer["MOST_DIGITS"])
    assert f"_NOTES, _SLOTS, _NOTE_WORDS, _MOST_DIGITS = {', '.join(map(str, layout))}" in python["window"]
    assert f"MOST_PEERS = {peer['MOST_PEERS']}\n" in python["window"]
    assert f"_COUNTS = {peer['COUNTS']} " in python["launches"]
    assert int(re.search(r"_STEP_WORDS = (\d+)", python["launches"])[1]) > peer["TILES"]
    assert f"_BAD_SELECTION = {peer['BAD_SELECTION']} " in python["step"]
    assert f"NARROWEST, WIDEST = {region['NARROWEST']}, {region['WIDEST']} " in python["regions"]
    assert f"RUNGS = {region['RUNGS']}\n" in python["regions"]
    search = constants(ROOT / "oktopk" / "kernels" / "kth.cu")
    assert f"_SEARCH_WORDS = {search['TIES'] + 1} " in python["naming"]
