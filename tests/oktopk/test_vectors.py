"""Kernels that run on vectors give the same bits whatever registers a processor has."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from llvmlite.binding import get_host_cpu_features

from collectives.cpu.kernels import sum_sorted_lists
from collectives.sparse import ENTRY
from oktopk.cpu import kernels
from oktopk.cpu.update import SparseUpdate

ROOT = Path(__file__).resolve().parents[2]
REGISTERS = {"x86-64": "sse2", "haswell": "avx2"}
"""A processor for the compiler -> what this one must have to run its code. This one's widest are compared with."""


def digest_of_the_kernels() -> str:
    """What the kernels that run on vectors make of ugly floats."""
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 2**32, (2, 5000), np.uint32).view(np.float32)
    residual = rng.integers(0, 2**32, 5000, np.uint32).view(np.float32)
    residual[~np.isfinite(residual)] = -0.0
    rows[:, 100:400], residual[200:500] = -0.0, 1e-45
    digest = hashlib.sha256()
    for threshold in (1, 2, 0x3F800000, 0x7F800000 - 1, 0x7F800000):
        for total in (rows[1], kernels.ShardSum(rows, 777, 1, 0, np.empty(5000, np.float32))):
            entries, after = np.zeros(5000 + kernels.BLOCK, ENTRY), residual.copy()
            packing = kernels.accumulate_select(total, after, threshold, entries)
            out = np.zeros(2 * packing.nnz, ENTRY)
            ends = np.full(2, packing.nnz)
            pool = entries[: packing.nnz].copy()
            summed = sum_sorted_lists(pool, ends * 0, ends, 0, 5000, threshold, out)
            update = np.zeros(5000, np.float32)
            SparseUpdate(update).replace(out[: summed[0]], 0.5)
            again = np.zeros(packing.nnz + 1, ENTRY)
            found = kernels.select_at_least(after, threshold, 3, again)
            counts = np.array([packing.nnz, packing.nonfinite, *summed, found])
            for result in (entries, after, out[: summed[0]], update, again, counts):
                digest.update(result.tobytes())
    return digest.hexdigest()


@pytest.mark.long(
    "compiles the kernels for each width; `make test` has this processor's"
)  # each compiles the kernels
@pytest.mark.parametrize("processor", REGISTERS)
def test_vectors_of_every_width_give_the_same_bits(processor: str) -> None:
    if not get_host_cpu_features().get(REGISTERS[processor]):
        pytest.skip(f"this processor has no {REGISTERS[processor]}")
    environment = {**os.environ, "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": ""}
    code = f"from {__name__} import digest_of_the_kernels; print(digest_of_the_kernels())"
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, text=True, capture_output=True, check=True
    )
    assert found.stdout.strip() == digest_of_the_kernels()
