"""Compile the kernels for this processor into Numba's cache, so that no job waits for it: python -m oktopk.cpu."""

from __future__ import annotations

from collectives.cpu.compiled import fill
from oktopk.cpu import kernels  # noqa: F401 - what is to be compiled

print(f"kernels for this CPU: {fill()} compiled, the rest was there")
