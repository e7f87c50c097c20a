"""Device kernels that touch gradients: the functions of `oktopk.cpu.kernels`, on one GPU and stream.

Gradients may be float32, bfloat16 or float16; residual and update are float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from collectives.cuda.device import CuArray, Device, DeviceEntries, address_of
from collectives.cuda.launch import Kernel, compiled
from collectives.cuda.layouts import COMPACT_THREADS, COMPACT_TILE
from collectives.element_types import ELEMENT_TYPES
from oktopk.cpu.histograms import INFINITE_DIGIT, LEVELS
from oktopk.cpu.kernels import Packing
from oktopk.cuda.adamw import DeviceAdamW
from oktopk.cuda.displacement import DeviceDisplacement
from oktopk.cuda.multi_tensor import ComposedGradient, GradientTensors, pointer_of
from oktopk.cuda.select import SelectLaunches
from oktopk.cuda.step_check import StepCheck
from oktopk.displacement import Displacement

_KERNELS = Path(__file__).parent


def _kernels(gradient: str, source: str, **places: str) -> dict[str, Kernel]:
    """Kernels of one folder by the names that they are called by.

    Args:
        gradient: their GRADIENT, an element type.
        source: their SOURCE, another one, in memory; "" or the same for none.
        places: "file.kernel" for each name.
    """
    defines = [f"GRADIENT={ELEMENT_TYPES[gradient].cuda}"]
    if source not in ("", gradient):
        defines.append(f"SOURCE={ELEMENT_TYPES[source].cuda}")
    split = {name: place.split(".") for name, place in places.items()}
    return {
        name: Kernel(compiled(_KERNELS / f"{file}.cu", *defines), kernel)
        for name, (file, kernel) in split.items()
    }


def _gradient_kernels(gradient_type: str) -> dict[str, Kernel]:
    """The kernels that read a gradient, by name."""
    passes = "accumulate", "accumulate_moments", "undo_accumulate", "copy_scaled"
    selecting = {name: f"accumulate_select.{name}" for name in ("accumulate_select", "compact_selection")}
    return _kernels(gradient_type, "", **selecting, **{name: f"accumulate.{name}" for name in passes})


def _listed_kernels(gradient_type: str, element_type: str, **places: str) -> dict[str, Kernel]:
    """As `_kernels`, of tensor lists, with what locates chunks in these."""
    locate = {"locate_chunks": Kernel(compiled(_KERNELS / "multi_tensor.cu"), "locate_chunks")}
    return _kernels(gradient_type, element_type, **places) | locate


class DeviceKernels:
    """The gradient kernels of one instance. `accumulate_select` and `undo_accumulate` take composed gradients, too.

    Args:
        device: where they run.
        gradient_type: "float32", "bfloat16" or "float16".
    """

    BLOCK = 0
    """Spare entries that a list to pack into needs at its end."""
    LEVELS = LEVELS

    def __init__(self, device: Device, gradient_type: str = "float32") -> None:
        self.device = device
        self.gradient_bytes = ELEMENT_TYPES[gradient_type].nbytes
        self._gradient_type = gradient_type
        # the sum of a host's gradients is float32 whatever these are
        self._typed = {16: _gradient_kernels(gradient_type), 32: _gradient_kernels("float32")}
        select = compiled(_KERNELS / "select.cu")
        apply = compiled(_KERNELS / "apply.cu")
        self._select_at_least = Kernel(select, "select_at_least")
        self._magnitude_histogram = Kernel(select, "magnitude_histogram")
        names = (
            "clear_support",
            "clear_common",
            "write_scaled",
            "add_entries",
            "to_whole_indices",
            "take_values",
        )
        self._apply = {name: Kernel(apply, name) for name in names}
        self._nonfinite = device.scratch("nonfinite", 1, np.uint32)
        self._launches: dict[int, SelectLaunches] = {}  # by the bytes of a gradient's element
        self._boundaries: NDArray[np.int64] | None = None  # that were posted last

    def accumulate_select(
        self,
        gradient: CuArray | ComposedGradient,
        residual: CuArray,
        threshold_bits: int,
        entries: DeviceEntries,
        boundaries: NDArray[np.int64] | None = None,
    ) -> Packing:
        """As the host's; finds offsets and splits on the way."""
        device = self.device
        regions = 0 if boundaries is None else len(boundaries) - 1
        report = device.report("select", 3 + 2 * regions)
        width = self.gradient_bytes if isinstance(gradient, ComposedGradient) else gradient.dtype.itemsize
        launches = self.select_launches(width, residual.size, entries).for_kernels(self.kernels_of(gradient))
        if boundaries is not None and boundaries is not self._boundaries:
            device.post("boundaries", boundaries)
            self._boundaries = boundaries  # which stay the same for many steps
        address = 0 if boundaries is None else device.address("post boundaries")
        launches.run(pointer_of(gradient), residual.data.ptr, threshold_bits, address, regions)
        device.synchronize()
        nnz, nonfinite, *layout = report[: 2 + 2 * regions].tolist()
        offsets, splits = np.split(np.array(layout, np.int64), [regions + 1])
        return Packing(nnz, nonfinite, offsets, splits) if regions else Packing(nnz, nonfinite)

    def select_launches(self, width: int, n: int, entries: DeviceEntries) -> SelectLaunches:
        """The launches that select from a gradient of so many bytes an element into this list."""
        sizes = (n, entries.pointer, len(entries))
        launches = self._launches.get(width)
        if launches is None or launches.sizes != sizes:
            nonfinite = int(self._nonfinite.data.ptr)
            launches = SelectLaunches(self.device, self.kernels_for(width), nonfinite, n, entries)
            self._launches[width] = launches
        return launches

    def accumulate(self, gradient: CuArray, residual: CuArray | None, out: CuArray) -> int:
        address = 0 if residual is None else residual.data.ptr
        return self._counted("accumulate", gradient, out.size, residual=address, out=out.data.ptr)

    def start_accumulate(self, gradient: CuArray, residual: CuArray | None, out: CuArray) -> None:
        """As `accumulate`, without a wait; `take_nonfinite` must follow where an element was not finite."""
        address = 0 if residual is None else residual.data.ptr
        self._launch_counting("accumulate", gradient, out.size, residual=address, out=out.data.ptr)

    def accumulate_moments(self, gradient: CuArray, residual: CuArray) -> tuple[float, float, int]:
        """As the host's; the last bits of the sums depend on the run."""
        n = residual.size
        sums = self.device.scratch("moments", 2, np.float64)
        self.device.zero(sums.data.ptr, 16)
        nonfinite = self._counted(
            "accumulate_moments", gradient, n, residual=residual.data.ptr, sums=sums.data.ptr
        )
        total, squares = sums[:2].get(stream=self.device.stream)
        return float(total), float(squares), nonfinite

    def undo_accumulate(
        self, gradient: CuArray | ComposedGradient, residual: CuArray, all_added: bool = False
    ) -> None:
        if isinstance(gradient, Displacement):  # that stays
            return
        kernel = self.kernels_of(gradient)["undo_accumulate"]
        fields = {"gradient": pointer_of(gradient), "residual": residual.data.ptr, "all_added": all_added}
        self.device.launch_for(kernel, residual.size, **fields)

    def select_at_least(self, vector: CuArray, threshold_bits: int, ties: int, entries: DeviceEntries) -> int:
        device, n = self.device, vector.size
        tiles = -(-n // COMPACT_TILE)
        report = device.report("select at least", 2)
        device.launch(
            self._select_at_least, tiles, COMPACT_THREADS,
            vector=vector.data.ptr, n=n, threshold=threshold_bits, ties=max(0, ties), entries=entries.pointer,
            capacity=len(entries), scan=device.scan("select at least", tiles), report=device.address("select at least"),
        )  # fmt: skip
        device.synchronize()
        return int(report[0])

    def magnitude_histogram(
        self, values: CuArray | DeviceEntries, level: int, prefix: int
    ) -> NDArray[np.int64]:
        device = self.device
        shift, width = LEVELS[level]
        counts = device.scratch("histogram", 1 << max(width for _, width in LEVELS), np.uint32)
        device.zero(counts.data.ptr, 4 << width)
        packed = isinstance(values, DeviceEntries)
        device.launch_for(
            self._magnitude_histogram, values.size,
            words=address_of(values), first=int(packed), stride=1 + packed, shift=shift, width=width, prefix=prefix,
            counts=counts.data.ptr,
        )  # fmt: skip
        counted = counts[: 1 << width].get(stream=device.stream)
        device.pending = False
        return np.asarray(counted).astype(np.int64)

    def top_histogram(self, values: CuArray | DeviceEntries, k: int) -> NDArray[np.int64]:
        """As the host's, but exact everywhere."""
        return self.magnitude_histogram(values, 0, 0)

    def count_nonfinite(self, values: CuArray | DeviceEntries) -> int:
        """As the host's."""
        return int(self.magnitude_histogram(values, 0, 0)[INFINITE_DIGIT:].sum())

    def clear_support(self, vector: CuArray, entries: DeviceEntries) -> None:
        self._on_entries("clear_support", vector, entries)

    def clear_common(
        self, vector: Any, entries: DeviceEntries, others: DeviceEntries, keep_values: bool = False
    ) -> None:
        self._set_common(vector, entries, others, keep_values=keep_values, add=False)

    def add_common(self, vector: CuArray, entries: DeviceEntries, others: DeviceEntries) -> None:
        self._set_common(vector, entries, others, keep_values=True, add=True)

    def _set_common(
        self, vector: CuArray, entries: DeviceEntries, others: DeviceEntries, **how: bool
    ) -> None:
        fields = {"vector": vector.data.ptr, "entries": entries.pointer, "entries_nnz": len(entries), **how}
        self.device.launch_for(self._apply["clear_common"], len(others), others=others.pointer, **fields)

    def write_scaled(self, vector: CuArray, entries: DeviceEntries, scale: float) -> None:
        self._on_entries("write_scaled", vector, entries, scale=scale)

    def add_entries(self, vector: CuArray, entries: DeviceEntries, scale: float) -> None:
        self._on_entries("add_entries", vector, entries, scale=scale)

    def to_whole_indices(self, entries: DeviceEntries, block: int, shards: int, shard: int) -> None:
        fields = {"entries": entries.pointer, "block": block, "shards": shards, "shard": shard}
        self.device.launch_for(self._apply["to_whole_indices"], len(entries), **fields)

    def take_values(self, vector: CuArray, support: DeviceEntries, out: DeviceEntries) -> None:
        fields = {"vector": vector.data.ptr, "support": support.pointer, "out": out.pointer}
        self.device.launch_for(self._apply["take_values"], len(support), **fields)

    def write_block_scaled(self, block: DeviceEntries, scale: float, out: CuArray) -> None:
        kernel = self.kernels_of(out)["copy_scaled"]
        self.device.launch_for(kernel, out.size, values=block.pointer, out=out.data.ptr, scale=scale)

    @cached_property
    def shard_sum_kernels(self) -> dict[str, Kernel]:
        """The kernels of `shard_sum`, compiled when they are first asked for: flat steps do not need `sum_shard`."""
        return _kernels(
            self._gradient_type, "",
            accumulate_select="accumulate_select.accumulate_select_sum", undo_accumulate="accumulate.undo_accumulate_sum",
            sum_shard="sum_shard.sum_shard",
        )  # fmt: skip

    @property
    def clear_kernel(self) -> Kernel:
        """The kernel that clears a support."""
        return self._apply["clear_support"]

    def kernels_for(self, width: int) -> dict[str, Kernel]:
        """The kernels for gradients of so many bytes an element."""
        return self._typed[8 * width]

    def kernels_of(self, gradient: CuArray | ComposedGradient) -> Mapping[str, Kernel]:
        """The kernels that read this gradient, an array or a composed one."""
        if isinstance(gradient, ComposedGradient):
            return gradient.kernels
        return self.kernels_for(gradient.dtype.itemsize)

    def gradient_tensors(self, sizes: Sequence[int], element_type: str) -> GradientTensors:
        """A gradient as a list of tensors of so many elements, each "float32", "bfloat16" or "float16"."""
        kernels = _listed_kernels(
            self._gradient_type, element_type,
            accumulate_select="accumulate_select.accumulate_select_tensors",
            undo_accumulate="accumulate.undo_accumulate_tensors",
        )  # fmt: skip
        return GradientTensors(self.device, kernels, sizes, ELEMENT_TYPES[element_type].nbytes)

    def step_check(self, sizes: Sequence[int], element_type: str, samples: int = 0) -> StepCheck:
        """What checks gradients, and samples of parameters, of so many elements, each "float32", "bfloat16" or "float16"."""
        kernels = _listed_kernels("float32", element_type, check_step="step_check.check_step")
        return StepCheck(self.device, kernels, sizes, ELEMENT_TYPES[element_type].nbytes, samples)

    def displacement(
        self, sizes: Sequence[int], element_type: str, reference: CuArray, share: float
    ) -> DeviceDisplacement:
        """What parameters of so many elements, each "float32", "bfloat16" or "float16", have moved."""
        kernels = _listed_kernels(
            "float32", element_type,
            accumulate_select="accumulate_select.accumulate_select_displacement", show="displacement.show",
        )  # fmt: skip
        return DeviceDisplacement(
            self.device, kernels, sizes, ELEMENT_TYPES[element_type].nbytes, reference, share
        )

    def adamw_displacement(self, sizes: Sequence[int], element_type: str) -> DeviceAdamW:
        """What AdamW moves parameters of so many elements by, of gradients and moments of this type."""
        select = "accumulate_select.accumulate_select_adamw"
        kernels = _listed_kernels("float32", element_type, accumulate_select=select)
        return DeviceAdamW(self.device, kernels, sizes, ELEMENT_TYPES[element_type].nbytes)

    def _on_entries(self, name: str, vector: CuArray, entries: DeviceEntries, **more: Any) -> None:
        fields = {"vector": vector.data.ptr, "entries": entries.pointer, **more}
        self.device.launch_for(self._apply[name], len(entries), **fields)

    def _counted(self, name: str, gradient: CuArray, n: int, **fields: Any) -> int:
        """Run a pass over a gradient that counts elements that are not finite; waits."""
        self._launch_counting(name, gradient, n, **fields)
        return self.take_nonfinite()

    def _launch_counting(self, name: str, gradient: CuArray, n: int, **fields: Any) -> None:
        kernel = self.kernels_of(gradient)[name]
        pointer = self._nonfinite.data.ptr
        self.device.launch_for(kernel, n, gradient=gradient.data.ptr, nonfinite=pointer, **fields)

    def take_nonfinite(self) -> int:
        """Elements that were not finite since the last call; waits."""
        count = int(cupy.asnumpy(self._nonfinite[:1], stream=self.device.stream)[0])
        self.device.pending = False
        if count:
            self.device.zero(self._nonfinite.data.ptr, 4)
        return count
