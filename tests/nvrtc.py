"""NVRTC from its wheel: the compiler that CuPy uses, on a machine that has neither a GPU nor nvcc."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path


def find() -> tuple[Path, Path] | None:
    """(the library, the folder of CUDA's headers) of the newest CUDA whose wheels are installed."""
    for suffix in ("", "-cu12"):
        library = _installed(f"nvidia-cuda-nvrtc{suffix}", "libnvrtc.so.*")
        header = _installed(f"nvidia-cuda-runtime{suffix}", "cuda_fp16.h")
        if library and header:
            return library, header.parent
    return None


def _installed(distribution: str, pattern: str) -> Path | None:
    try:
        found = [Path(str(file.locate())) for file in files(distribution) or [] if file.match(pattern)]
    except PackageNotFoundError:
        return None
    return next((path for path in found if path.exists()), None)


def compile_source(library: Path, source: Path, options: Sequence[str], ptx: Path) -> str:
    """Compile a `.cu` file and write its PTX; returns NVRTC's messages, "" if it compiles."""
    nvrtc = ctypes.CDLL(str(library))
    program = ctypes.c_void_p()
    code, name = source.read_bytes(), source.name.encode()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), code, name, 0, None, None)
    if status:
        raise RuntimeError(f"nvrtcCreateProgram: error {status}")
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
    text = _text(nvrtc, program, "ProgramLog" if status else "PTX")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if status:
        return f"NVRTC error {status}\n{text}"
    ptx.write_text(text, encoding="utf-8")
    return ""


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, name: str) -> str:
    size = ctypes.c_size_t()
    status = getattr(nvrtc, f"nvrtcGet{name}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    status = status or getattr(nvrtc, f"nvrtcGet{name}")(program, text)
    if status:
        raise RuntimeError(f"nvrtcGet{name}: error {status}")
    return text.value.decode(errors="replace")
