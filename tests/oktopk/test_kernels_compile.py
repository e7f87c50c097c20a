"""Every CUDA kernel compiles for the GPUs that it is meant for, on a machine that has none.

By nvcc where there is one, else by NVRTC from its wheel. With neither the tests are skipped, and fail where CI is set.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from collectives.cuda.layouts import source_with_layouts
from oktopk.cuda.layouts import LAYOUTS
from tests import nvrtc

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [ROOT / folder for folder in ("collectives/cuda", "oktopk/cuda", "jobs/bench/gpu")]
SOURCES = sorted(source for folder in FOLDERS for source in folder.glob("*.cu"))
TYPES = ("float", "__nv_bfloat16", "__half")
SOURCES_OF_OTHER_TYPES = [
    ("__nv_bfloat16", "float"),
    ("__half", "float"),
    ("float", "__nv_bfloat16"),
    ("__half", "__nv_bfloat16"),
]
NVCC = shutil.which("nvcc")
NVRTC = nvrtc.find()
MISSING = "no CUDA compiler: put nvcc on PATH, or pip install -e '.[cuda-compile]'"

compiler = pytest.mark.skipif(not (NVCC or NVRTC or os.environ.get("CI")), reason=MISSING)
each_compiler = pytest.mark.parametrize(
    "by",
    [
        pytest.param("nvcc", marks=pytest.mark.skipif(not NVCC, reason="no nvcc")),
        pytest.param("nvrtc", marks=pytest.mark.skipif(not NVRTC, reason="no NVRTC")),
    ],
)


def compiler_says(
    by: str, source: Path, architecture: int, gradient: str, out: Path, element: str = ""
) -> str:
    """Compile a file, with its PTX beside `out`; returns the compiler's messages, "" if it compiles."""
    options = [
        "-ftz=true",
        "-std=c++17",
        f"-arch=sm_{architecture}",
        f"-DGRADIENT={gradient}",
        "-Werror",
        "all-warnings",
    ]
    options += [f"-DSOURCE={element}"] if element else []
    options += [f"-I{folder}" for folder in FOLDERS]
    whole = out.with_name(f"whole-{source.name}")
    whole.write_text(source_with_layouts(source), encoding="utf-8")
    if by == "nvrtc":
        assert NVRTC
        library, headers = NVRTC
        said = nvrtc.compile_source(library, whole, [*options, f"-I{headers}"], whole.with_suffix(".ptx"))
        if "unrecognized option -Werror" in said:
            pytest.skip("this NVRTC has no -Werror")
        return said
    quick = ["-Xcicc", "-O0", "-Xptxas", "-O0"] if architecture == 80 else []
    command = [
        "nvcc",
        *options,
        *quick,
        "--keep",
        f"--keep-dir={out.parent}",
        "-cubin",
        "-o",
        str(out),
        str(whole),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"nvcc ended with {done.returncode}\n{done.stderr}" if done.returncode else ""


def assert_keeps_denormals(folder: Path, kernel: str) -> None:
    """No instruction of the PTX in a folder makes zero of a denormal; conversions to integers would anyway."""
    files = list(folder.glob("*.ptx"))
    assert files, "the compiler kept no PTX"
    lines = (line.strip() for file in files for line in file.read_text(encoding="utf-8").splitlines())
    flushing = {line for line in lines if ".ftz" in line and not line.startswith(("//", "cvt.rzi"))}
    assert not flushing, f"{kernel}: write it by the functions of coo.cuh"


def assert_reads_parameters_as_such(folder: Path, kernel: str) -> None:
    """No instruction of the PTX takes the offset of a kernel's parameter for an address in memory.

    nvcc makes one of `flag ? volatile_word : p.field`, an lvalue of volatile type; the load then fails on the GPU.
    """
    files = list(folder.glob("*.ptx"))
    assert files, "the compiler kept no PTX"
    for entry in (part for file in files for part in file.read_text(encoding="utf-8").split(".entry ")[1:]):
        offsets = set(re.findall(r"mov\.(?:b|u)64\s+(%rd\d+), \w+_param_\d+", entry))
        offsets |= {
            to for to, of in re.findall(r"add\.s64\s+(%rd\d+), (%rd\d+), \d+", entry) if of in offsets
        }
        wrong = [
            line.strip()
            for line, kind, base in re.findall(r"(\s(?:ld|st|atom|red)(\S*)\s.*\[(%rd\d+).*)", entry)
            if base in offsets and ".param" not in kind
        ]
        assert not wrong, f"{kernel}: copy what is volatile before it is compared with a parameter: {wrong}"


NARROW = pytest.mark.long("`make test` has each kernel for float32 and one of the narrow types")
LATER = pytest.mark.long("`make test` has 8.0, which knows less")
ONE_OF_TWO = pytest.mark.long("`make test` has each pair of types with one of the two kernels")
KERNELS = [
    pytest.param(
        *(source, gradient, "", architecture),
        id=f"{source.stem}-{gradient}-{architecture}",
        marks=[NARROW] * (kind == 1 + number % 2) + [LATER] * (architecture == 90),
    )
    for architecture in (80, 90)
    for number, source in enumerate(SOURCES)
    for kind, gradient in enumerate(TYPES)
    if not kind or "gradient.cuh" in source.read_text(encoding="utf-8")
]
KERNELS += [
    pytest.param(
        *(ROOT / "oktopk" / "cuda" / f"{name}.cu", *types, architecture),
        id=f"{name}-{types[0]} from {types[1]}",
        marks=[ONE_OF_TWO] * ((number + at) % 2 == 0),
    )
    # the larger one without the optimizations of 9.0, which take as long as all else
    for number, (name, architecture) in enumerate((("accumulate_select", 80), ("accumulate", 90)))
    for at, types in enumerate(SOURCES_OF_OTHER_TYPES)
]


@compiler
@pytest.mark.parametrize(("source", "gradient", "element", "architecture"), KERNELS)
def test_a_kernel_compiles(
    source: Path, gradient: str, element: str, architecture: int, tmp_path: Path
) -> None:
    """For gradients of a type; for tensors of another one, where `element` names it."""
    assert NVCC or NVRTC, MISSING
    by = "nvcc" if NVCC else "nvrtc"
    assert not compiler_says(by, source, architecture, gradient, tmp_path / "kernel.cubin", element)
    if source.parent != FOLDERS[-1]:
        assert_keeps_denormals(tmp_path, f"{source.name} for {gradient} {element}")
    assert_reads_parameters_as_such(tmp_path, source.name)


@each_compiler
def test_an_addition_that_flushes_denormals_is_found(by: str, tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    text = 'extern "C" __global__ void f(float* x) { x[0] = x[1] + x[2]; }\n'
    source.write_text(text, encoding="utf-8")
    assert not compiler_says(by, source, 90, "float", tmp_path / "kernel.cubin")
    with pytest.raises(AssertionError, match=r"add\.ftz\.f32"):
        assert_keeps_denormals(tmp_path, source.name)


@each_compiler
def test_an_offset_taken_for_an_address_is_found(by: str, tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text(
        """struct Params { const volatile unsigned* words; unsigned most; unsigned* out; };
extern "C" __global__ void f(const __grid_constant__ Params p) { *p.out = *p.words < p.most ? *p.words : p.most; }
""",
        encoding="utf-8",
    )
    assert not compiler_says(by, source, 90, "float", tmp_path / "kernel.cubin")
    with pytest.raises(AssertionError, match=r"ld\.volatile"):
        assert_reads_parameters_as_such(tmp_path, source.name)


@each_compiler
@pytest.mark.parametrize("right", [True, False])
def test_a_kernel_that_is_wrong_does_not_compile(by: str, right: bool, tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    text = f'#include "coo.cuh"\nextern "C" __global__ void f(Entry* e) {{ e[0].{"x" if right else "z"} = 1; }}\n'
    source.write_text(LAYOUTS.header + text, encoding="utf-8")
    said = compiler_says(by, source, 90, "float", tmp_path / "kernel.cubin")
    assert bool(said) != right, said


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_kernel_file_says_how_it_is_used(source: Path) -> None:
    header = source.read_text(encoding="utf-8").split("#include")[0]
    for word in ("Shapes", "Units", "Launch", "Overflow", "NaN"):
        found = f"// {word}" in header or (word == "NaN" and "NaN" in header)
        assert found, f"{source.name} does not say its {word.lower()}"
