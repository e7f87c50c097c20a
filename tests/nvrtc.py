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


def compile_source(library: Path, source: Path, options: Sequence[str]) -> str:
    """What NVRTC says against a `.cu` file; "" if it compiles."""
    nvrtc = ctypes.CDLL(str(library))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    code, name = source.read_bytes(), source.name.encode()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), code, name, 0, None, None)
    if status:
        raise RuntimeError(f"nvrtcCreateProgram: error {status}")
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), given)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return f"NVRTC error {status}\n{log.value.decode(errors='replace')}" if status else ""
