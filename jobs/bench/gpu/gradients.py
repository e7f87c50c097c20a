"""Draws the gradients of jobs.bench.gradients on a GPU, equal to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cupy
import numpy as np

from collectives.cuda.launch import compiled
from jobs.bench.gradients import GradientSource

STORED: dict[str, Any] = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
"""Gradient type -> what CuPy holds it in; bfloat16 as its bits."""

_KERNELS = Path(__file__).parent / "gradients.cu"
_THREADS = 256


class DeviceGradients(GradientSource):
    """Gradients in device memory. Memory: n words for the gradient, 4 MB for the pool."""

    def __init__(self, name: str, length: int, rank: int, seed: int) -> None:
        super().__init__(name, length, rank, seed)
        self._vector = cupy.zeros(length, np.float32)
        self._pool = cupy.asarray(self.pool)
        self._weights = cupy.asarray(self.common_weights), cupy.asarray(self.own_weights)
        self._advance = compiled(_KERNELS).get_function("advance")

    def next(self) -> Any:
        """cupy float32[n]; put on the current stream, not waited for."""
        common, own = (cupy.asarray(starts.astype(np.int32)) for starts in self.starts())
        length, memory = np.int64(self.length), np.float32(self.memory)
        common_weights, own_weights = self._weights
        arguments = (self._vector, length, self._pool, memory, common_weights, common, own_weights, own)
        self._advance((len(common),), (_THREADS,), arguments)
        return self._vector


def convert(source: Any, out: Any) -> None:
    """Round cupy float32[n] into an array of one of STORED. Put on the current stream, not waited for."""
    if out.dtype != np.uint16:
        cupy.copyto(out, source, casting="unsafe")
        return
    kernel = compiled(_KERNELS).get_function("narrow_bfloat16")
    processors = cupy.cuda.Device().attributes["MultiProcessorCount"]
    blocks = min(-(-len(source) // _THREADS), 16 * processors)
    kernel((blocks,), (_THREADS,), (source, out, np.int64(len(source))))
