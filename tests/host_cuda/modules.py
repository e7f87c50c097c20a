"""CUDA sources compiled for the host."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import re
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_BUILD = _HERE.parent.parent / "build" / "host-cuda"
_EMULATED = ("cuda_on_host.h", "cuda_bf16.h", "cuda_fp16.h")
_COMPILER = (
    "g++",
    "-std=c++17",
    "-O2",
    "-w",
    "-fPIC",
    "-shared",
    "-fno-strict-aliasing",
    "-fno-ipa-ra",  # a coroutine that gives way comes back with other registers
    "-U_FORTIFY_SOURCE",  # which takes a coroutine's jump for a corrupted stack
    "-ffp-contract=off",
)
_KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(')
_ASM = re.compile(r'asm(?:\s+volatile)?\("([\w.]+)[^"]*"\s*:(.*?)\);', re.DOTALL)
_OPERAND = re.compile(r'"(=?)\w"\((\w+)\)')


class HostKernel:
    """A compiled kernel.

    Args:
        library: its module's.
        running: held while one of them runs: they share what a block has.

    Attributes:
        name: in the source.
        arguments: how many it takes.
        sizes: bytes of each.
    """

    def __init__(self, library: ctypes.CDLL, name: str, running: threading.Lock) -> None:
        self.name, self._running = name, running
        self.arguments: int = ctypes.c_int.in_dll(library, f"host_cuda_count_{name}").value
        size_of = library[f"host_cuda_size_{name}"]
        size_of.restype = ctypes.c_size_t
        self.sizes = [int(size_of(i)) for i in range(self.arguments)]
        self._body = ctypes.cast(library[f"host_cuda_body_{name}"], ctypes.c_void_p)
        self._run = library.host_cuda_run

    def run(self, blocks: int, rows: int, threads: int, values: Any) -> int:
        """All of a grid (blocks, rows); void*[arguments] say where values lie. Returns 0 or a CUDA error."""
        with self._running:
            return int(self._run(self._body, *map(ctypes.c_uint, (blocks, rows, threads)), values))


class Module:
    """A compiled source."""

    def __init__(self, library: Path) -> None:
        self._library, self._running = ctypes.CDLL(str(library)), threading.Lock()

    def kernel(self, name: str) -> HostKernel:
        """One of its kernels."""
        return HostKernel(self._library, name, self._running)


def without_ptx(source: str) -> str:
    """Inline assembly as calls of functions of the same names."""

    def call(found: re.Match[str]) -> str:
        operands = _OPERAND.findall(found[2])
        written = [name for sign, name in operands if sign]
        given = [name for sign, name in operands if not sign]
        function = f"ptx_{found[1].replace('.', '_')}"
        if len(written) == 1:
            return f"{written[0]} = {function}({', '.join(given)});"
        return f"{function}({', '.join(written + given)});"

    return _ASM.sub(call, source)


@functools.cache
def compile_module(source: str, options: Sequence[str]) -> Module:
    """A `.cu` source, with -I and -D as options; compiled once in this checkout.

    Raises:
        RuntimeError: it does not compile.
    """
    includes = [Path(option[2:]) for option in options if option.startswith("-I")]
    defines = [option for option in options if option.startswith("-D")]
    headers = {path.name: path.read_text() for folder in includes for path in sorted(folder.glob("*.cuh"))}
    headers |= {name: (_HERE / name).read_text() for name in _EMULATED}
    kernels = _KERNEL.findall(source)
    bodies = [
        f'extern "C" void host_cuda_body_{name}(void** values) {{ host_cuda::call({name}, values); }}\n'
        f'extern "C" int host_cuda_count_{name} = host_cuda::count_of({name});\n'
        f'extern "C" size_t host_cuda_size_{name}(int i) {{ return host_cuda::size_of({name}, i); }}'
        for name in kernels
    ]
    whole = "\n".join(['#include "cuda_on_host.h"', source, *bodies])
    digest = hashlib.sha256(repr((whole, sorted(headers.items()), defines, _COMPILER)).encode()).hexdigest()
    folder = _BUILD / digest[:20]
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "kernels.so"
    with open(folder / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # all ranks come here at the same time
        if not library.exists():
            for name, text in {**headers, "kernels.cpp": whole}.items():
                (folder / name).write_text(without_ptx(text))
            made = folder / "made.so"
            command = [*_COMPILER, *defines, f"-I{folder}", "-o", str(made), str(folder / "kernels.cpp")]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"g++ does not compile a kernel:\n{done.stderr[:4000]}")
            made.replace(library)
    return Module(library)
