"""Compile the kernels for this processor into Numba's cache, so that no job waits for it: python -m oktopk.cpu."""

from __future__ import annotations

from oktopk.cpu import compile_kernels

print(f"kernels for this CPU: {compile_kernels()} compiled, the rest was there")
