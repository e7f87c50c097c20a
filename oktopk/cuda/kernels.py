"""Device kernels that touch gradients: the functions of `oktopk.cpu.kernels`, on one GPU and stream.

Gradients may be float32, bfloat16 or float16; residual, velocity and update are float32. Methods of an object, for the
reason that `collectives.cuda.kernels` gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from collectives.cuda.device import Device, DeviceEntries
from collectives.cuda.kernels import COMPACT_TILE
from collectives.cuda.launch import Kernel, compiled, float_bits
from oktopk.cpu.kernels import LEVELS, Packing
from oktopk.cuda.multi_tensor import GradientTensors, pointer_of
from oktopk.cuda.select import SelectLaunches

_KERNELS = Path(__file__).parent
_CUDA_TYPES = {"float32": "float", "bfloat16": "__nv_bfloat16", "float16": "__half"}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MOST_HEADER = 128  # words of a selection's report
_COMPACT_THREADS = 256


def _gradient_kernels(gradient_type: str) -> dict[str, Kernel]:
    """The kernels that read a gradient, by name."""
    define = f"GRADIENT={_CUDA_TYPES[gradient_type]}"
    fused = compiled(_KERNELS / "accumulate_select.cu", define)
    passes = compiled(_KERNELS / "accumulate.cu", define)
    sizes = {
        "accumulate": 5,
        "accumulate_moments": 5,
        "undo_accumulate": 4,
        "accumulate_momentum": 5,
        "undo_momentum": 4,
        "copy_scaled": 4,
    }
    return {name: Kernel(passes, name, size) for name, size in sizes.items()} | {
        "accumulate_select": Kernel(fused, "accumulate_select", 12),
        "compact_selection": Kernel(fused, "compact_selection", 21),
    }


def _pieces_kernels(gradient_type: str, element_type: str) -> dict[str, Kernel]:
    """The kernels for a gradient in pieces of another type, or of its own, by the names of those that read one vector."""
    defines = [f"GRADIENT={_CUDA_TYPES[gradient_type]}"]
    if element_type != gradient_type:
        defines.append(f"SOURCE={_CUDA_TYPES[element_type]}")
    fused = compiled(_KERNELS / "accumulate_select.cu", *defines)
    passes = compiled(_KERNELS / "accumulate.cu", *defines)
    return {
        "accumulate_select": Kernel(fused, "accumulate_select_pieces", 12),
        "undo_accumulate": Kernel(passes, "undo_accumulate_pieces", 4),
        "place_pieces": Kernel(compiled(_KERNELS / "pieces.cu"), "place_pieces", 4),
    }


class DeviceKernels:
    """The gradient kernels of one instance.

    `accumulate_select` and `undo_accumulate` take a gradient in pieces, too.

    Args:
        device: where they run.
        gradient_type: "float32", "bfloat16" or "float16".
    """

    BLOCK = 0
    """Spare entries that a list to pack into needs at its end."""
    LEVELS = LEVELS

    def __init__(self, device: Device, gradient_type: str = "float32") -> None:
        self.device = device
        self.gradient_bytes = _BYTES[gradient_type]
        self._gradient_type = gradient_type
        # momentum correction selects from a velocity, which is float32 whatever the gradient is
        self._typed = {16: _gradient_kernels(gradient_type), 32: _gradient_kernels("float32")}
        select = compiled(_KERNELS / "select.cu")
        apply = compiled(_KERNELS / "apply.cu")
        self._select_at_least = Kernel(select, "select_at_least", 11)
        self._magnitude_histogram = Kernel(select, "magnitude_histogram", 8)
        sizes = {"clear_support": 4, "clear_common": 5, "write_scaled": 4, "add_entries": 3}
        self._apply = {name: Kernel(apply, name, size) for name, size in sizes.items()}
        self._nonfinite = device.scratch("nonfinite", 1, np.uint32)
        self._launches: dict[int, SelectLaunches] = {}  # by the bytes of a gradient's element

    def accumulate_select(
        self,
        gradient: Any,
        residual: Any,
        threshold_bits: int,
        entries: DeviceEntries,
        boundaries: NDArray[np.int64] | None = None,
    ) -> Packing:
        """As the host's; finds where the regions begin on the way."""
        device = self.device
        regions = 0 if boundaries is None else len(boundaries) - 1
        where = None if boundaries is None else (device.post("boundaries", boundaries), regions)
        report = device.report("select", 4 + regions)
        width = self.gradient_bytes if isinstance(gradient, GradientTensors) else gradient.dtype.itemsize
        launches = self.select_launches(width, residual.size, entries).reading(self.reading(gradient))
        launches(pointer_of(gradient), residual.data.ptr, threshold_bits, where)
        device.synchronize()
        found = report[: 3 + regions].tolist()
        return Packing(found[0], found[1], np.array(found[2:], np.int64) if where else None)

    def select_launches(self, width: int, n: int, entries: DeviceEntries) -> SelectLaunches:
        """What selects from a gradient of so many bytes an element into this list."""
        sizes = (n, entries.pointer, len(entries))
        launches = self._launches.get(width)
        if launches is None or launches.sizes != sizes:
            launches = self._launches[width] = SelectLaunches(self, width, n, entries)
        return launches

    def header(self, regions: int) -> int:
        """Address of what the last selection reported, for kernels that follow it."""
        return int(self.device.scratch("select header", max(_MOST_HEADER, 3 + regions), np.uint32).data.ptr)

    def accumulate(self, gradient: Any, residual: Any, out: Any) -> int:
        """As the host's."""
        pointer = 0 if residual is None else residual.data.ptr
        return self._counted(
            gradient, "accumulate", out.size, gradient.data.ptr, pointer, out.data.ptr, out.size
        )

    def accumulate_moments(self, gradient: Any, residual: Any) -> tuple[float, float, int]:
        """As the host's; the last bits of the sums depend on the run."""
        n = residual.size
        sums = self.device.scratch("moments", 2, np.float64)
        self.device.zero(sums.data.ptr, 16)
        nonfinite = self._counted(
            gradient,
            "accumulate_moments",
            n,
            gradient.data.ptr,
            residual.data.ptr,
            n,
            sums.data.ptr,
        )
        total, squares = sums[:2].get(stream=self.device.stream)
        return float(total), float(squares), nonfinite

    def undo_accumulate(self, gradient: Any, residual: Any) -> None:
        """As the host's."""
        n = residual.size
        kernel = self.reading(gradient)["undo_accumulate"]
        self.device.launch_for(kernel, n, pointer_of(gradient), residual.data.ptr, n, 0)

    def accumulate_momentum(self, gradient: Any, velocity: Any, momentum: float) -> int:
        """As the host's."""
        n = velocity.size
        return self._counted(
            gradient,
            "accumulate_momentum",
            n,
            gradient.data.ptr,
            velocity.data.ptr,
            n,
            float_bits(momentum),
        )

    def undo_momentum(self, gradient: Any, velocity: Any, momentum: float) -> None:
        """As the host's."""
        n = velocity.size
        kernel = self.kernels_for(gradient.dtype.itemsize)["undo_momentum"]
        self.device.launch_for(kernel, n, gradient.data.ptr, velocity.data.ptr, n, float_bits(momentum))

    def select_at_least(self, vector: Any, threshold_bits: int, ties: int, entries: DeviceEntries) -> int:
        """As the host's."""
        device, n = self.device, vector.size
        tiles = -(-n // COMPACT_TILE)
        scan = device.scan("select at least", tiles)
        report = device.report("select at least", 2)
        device.launch(
            self._select_at_least,
            tiles,
            _COMPACT_THREADS,
            vector.data.ptr,
            n,
            threshold_bits,
            max(0, ties),
            entries.pointer,
            len(entries),
            scan.status,
            scan.second,
            scan.ticket,
            scan.epoch,
            device.address("select at least"),
        )
        device.synchronize()
        return int(report[0])

    def select_counting(self, vector: Any, threshold_bits: int, entries: DeviceEntries) -> int:
        """As the host's."""
        return self.select_at_least(vector, threshold_bits, 2**31 - 1, entries)

    def magnitude_histogram(self, values: Any, level: int, prefix: int) -> NDArray[np.int64]:
        """As the host's."""
        device = self.device
        shift, width = LEVELS[level]
        counts = device.scratch("histogram", 1 << max(width for _, width in LEVELS), np.uint32)
        device.zero(counts.data.ptr, 4 << width)
        packed = isinstance(values, DeviceEntries)
        pointer = values.pointer if packed else values.data.ptr
        device.launch_for(
            self._magnitude_histogram,
            values.size,
            pointer,
            values.size,
            1 if packed else 0,
            2 if packed else 1,
            shift,
            width,
            prefix,
            counts.data.ptr,
        )
        found = counts[: 1 << width].get(stream=device.stream)
        device.pending = False
        return np.asarray(found).astype(np.int64)

    def clear_support(self, vector: Any, entries: DeviceEntries) -> None:
        """As the host's."""
        self._on_entries("clear_support", vector, entries, 0)

    def clear_common(self, vector: Any, mine: DeviceEntries, theirs: DeviceEntries) -> None:
        """As the host's."""
        self.device.launch_for(
            self._apply["clear_common"],
            len(theirs),
            vector.data.ptr,
            mine.pointer,
            len(mine),
            theirs.pointer,
            len(theirs),
        )

    def write_scaled(self, vector: Any, entries: DeviceEntries, scale: float) -> None:
        """As the host's."""
        self._on_entries("write_scaled", vector, entries, float_bits(scale))

    def add_entries(self, vector: Any, entries: DeviceEntries) -> None:
        """As the host's."""
        self._on_entries("add_entries", vector, entries)

    def write_block_scaled(self, block: DeviceEntries, scale: float, out: Any) -> None:
        """As the host's."""
        kernel, n = self.kernels_for(out.dtype.itemsize)["copy_scaled"], out.size
        self.device.launch_for(kernel, n, block.pointer, out.data.ptr, n, float_bits(scale))

    def _on_entries(self, name: str, vector: Any, entries: DeviceEntries, *more: Any) -> None:
        count = len(entries)
        self.device.launch_for(self._apply[name], count, vector.data.ptr, entries.pointer, count, *more)

    @property
    def clear_kernel(self) -> Kernel:
        """The kernel that clears a support."""
        return self._apply["clear_support"]

    @property
    def nonfinite(self) -> int:
        """Address of the count of what is not finite."""
        return int(self._nonfinite.data.ptr)

    def kernels_for(self, width: int) -> dict[str, Kernel]:
        """The kernels for gradients of so many bytes an element."""
        return self._typed[8 * width]

    def reading(self, gradient: Any) -> Mapping[str, Kernel]:
        """The kernels that read this gradient, an array or in pieces."""
        if isinstance(gradient, GradientTensors):
            return gradient.kernels
        return self.kernels_for(gradient.dtype.itemsize)

    def gradient_tensors(self, sizes: Sequence[int], element_type: str) -> GradientTensors:
        """A gradient in pieces of so many elements, each "float32", "bfloat16" or "float16"."""
        kernels = _pieces_kernels(self._gradient_type, element_type)
        return GradientTensors(self.device, kernels, sizes, _BYTES[element_type])

    def _counted(self, gradient: Any, name: str, n: int, *arguments: Any) -> int:
        """Run a pass that counts what is not finite; waits."""
        pointer = self._nonfinite.data.ptr
        self.device.launch_for(self.kernels_for(gradient.dtype.itemsize)[name], n, *arguments, pointer)
        found = int(cupy.asnumpy(self._nonfinite[:1], stream=self.device.stream)[0])
        self.device.pending = False
        if found:
            self.device.zero(pointer, 4)
        return found
