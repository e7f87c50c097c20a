"""Structs and constants that hosts and kernels share are declared once, in Python; CUDA gets what it needs to check them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from collectives.cuda import layouts
from collectives.cuda.layouts import PARAMETERS, Layouts, Struct
from oktopk.cpu.histograms import LEVELS
from oktopk.cuda import layouts as gradient_layouts
from oktopk.thresholds import CANDIDATES

HOST_CUDA = Path(__file__).parents[1] / "host_cuda"


def compiler_says(text: str, folder: Path) -> str:
    """What g++ says against a source with a generated header; "" if it compiles."""
    source = folder / "kernel.cpp"
    source.write_text(f'#include "cuda_on_host.h"\n{text}', encoding="utf-8")
    command = ["g++", "-std=c++17", "-w", "-fsyntax-only", f"-I{HOST_CUDA}", str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.fixture
def made(tmp_path: Path) -> Layouts:
    """Declarations for a folder with one kernel."""
    made = Layouts(tmp_path, {"ROOM": 3, "ignored": 4})
    made.struct("Inner", "unsigned count; long long sizes[ROOM][2];")
    made.struct("Outer", "const float* values; int n; Inner inner; float scale;", "scale_all")
    return made


def test_a_struct_is_laid_out_as_in_c(made: Layouts) -> None:
    outer = PARAMETERS["scale_all"]
    assert issubclass(outer, Struct)
    assert ctypes.sizeof(outer) == 8 + 8 + (8 + 6 * 8) + 8
    assert outer.inner.offset == 16
    assert outer.scale.offset == 72


def test_unknown_fields_are_refused(made: Layouts) -> None:
    params = PARAMETERS["scale_all"](n=5)
    assert (params.n, params.scale) == (5, 0.0)
    with pytest.raises(AttributeError):
        params.scales = 1.0
    with pytest.raises(AttributeError):
        PARAMETERS["scale_all"](size=5)


def test_a_declaration_of_an_unknown_type_is_refused(made: Layouts) -> None:
    with pytest.raises(KeyError, match="short"):
        made.struct("Wrong", "short n;")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_struct_that_a_compiler_lays_out_otherwise_does_not_compile(made: Layouts, tmp_path: Path) -> None:
    assert not compiler_says(made.header, tmp_path)
    for right, wrong, said in [
        ("int n; Inner inner; float scale;", "int n; Inner inner; double scale, more;", "size of Outer"),
        ("int n; Inner inner; float scale;", "int n; float scale; Inner inner;", "offsets of Outer"),
        ("unsigned count;", "unsigned count, more;", ""),  # in what is padding else
        ("ROOM = 3", "ROOM = 4", "size of Inner"),
    ]:
        assert right in made.header
        found = compiler_says(made.header.replace(right, wrong), tmp_path)
        assert bool(found) == bool(said)
        assert said in found


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_kernel_that_takes_another_struct_does_not_compile(made: Layouts, tmp_path: Path) -> None:
    kernel = 'extern "C" __global__ void scale_all(const __grid_constant__ {} p) {{}}\n'
    assert not compiler_says(made.header + kernel.format("Outer"), tmp_path)
    assert "scale_all" in compiler_says(made.header + kernel.format("Inner"), tmp_path)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_librarys_structs_are_laid_out_alike_on_both_sides(tmp_path: Path) -> None:
    assert not compiler_says(gradient_layouts.LAYOUTS.header, tmp_path)


def test_every_kernel_is_declared_and_every_declared_kernel_is_there() -> None:
    sources = [
        source.read_text(encoding="utf-8")
        for module in (layouts, gradient_layouts)
        for source in sorted(Path(module.__file__).parent.glob("*.cu"))
    ]
    assert sum(source.count('extern "C" __global__') for source in sources) == len(
        {name for name in PARAMETERS if any(f" {name}(const __grid_constant__ " in text for text in sources)}
    )
    declared = layouts.LAYOUTS.header + gradient_layouts.LAYOUTS.header
    library = {name for name in PARAMETERS if f"void {name}(" in declared}
    assert all(any(f" {name}(const __grid_constant__ " in text for text in sources) for name in library)


def test_constants_agree_with_the_hosts_own() -> None:
    assert len(CANDIDATES) == layouts.NUM_CANDIDATES
    assert len(LEVELS) == layouts.LEVELS == layouts.SIGNALS - layouts.DIGITS
    assert max(1 << width for _, width in LEVELS) == layouts.MOST_DIGITS
    assert layouts.Decision.counts.offset == 4 * layouts.DECISION_WORDS
    assert max(layouts.NUM_CANDIDATES, layouts.MOST_PEERS + 3) <= layouts.MESSAGE_WORDS
