"""Dense allreduce among the GPUs of a host: kernels that write into each other's symmetric memory, see `dense_p2p.cu`."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cupy
import numpy as np

from collectives.cuda.device import Device
from collectives.cuda.launch import Kernel, PreparedLaunch, compiled
from collectives.cuda.layouts import DENSE_ABORT, MOST_DENSE_RANKS, P2P
from collectives.symmetric_memory import SymmetricMemory, abort_reasons
from collectives.transport import Transport

ELEMENT_TYPES = {
    np.dtype(np.float32): "float32",
    np.dtype(np.float16): "float16",
    np.dtype(np.uint16): "bfloat16",
}
"""Element type of a CuPy array; bfloat16 is given as its bits."""

ALGORITHMS = ("one_shot", "pushed", "two_shot")

_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of an element
_CUDA = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
_SOURCE = Path(__file__).with_name("dense_p2p.cu")
_THREADS, _VECTORS, _AHEAD = 512, 4, 1  # of a block; packs of 16 bytes a thread of a tile; see `dense_p2p.cu`
_MOST_BLOCKS = 512  # of any launch
_RING_BLOCKS = 256  # of a launch in tiles, for two ranks: fewer for more, which send each tile to more
_TILE = _THREADS * _VECTORS * 16  # bytes
_FLAGGED = 2 << 20  # bytes of data that all sources together may send by `one_shot`
MEASURED = (*(4096 << i for i in range(0, 9)), 2 << 20, 4 << 20, 16 << 20, 64 << 20)
"""Lengths in bytes that are measured; a vector takes what is fastest at the next one."""

_UNMEASURED = ((1 << 20, "one_shot"), (None, "two_shot"))


class Choice(NamedTuple):
    """Which algorithm vectors of at most so many bytes take; None: all that are longer."""

    nbytes: int | None
    algorithm: str


class DenseP2P:
    """Sums of vectors over the ranks of one host, the same bits whatever the length, the algorithm or the alignment.

    Neighbouring ranks are added first, then neighbouring pairs, in float32, as `collectives.dense_allreduce.DenseAllreduce` adds;
    the sum is rounded once to the vector's type. A call puts one kernel on a stream and does not wait. It can be captured in a
    CUDA graph. All ranks make the same calls in the same order, replays of captured ones included. Who calls on several streams
    must order them.

    Args:
        transport: of the ranks, at most 8, which must be able to use symmetric memory. Collective: every rank must construct.
        device: the GPU of this rank and the stream that calls go to.
        timeout: seconds that a kernel waits for another rank.
        measure: lengths in bytes at which it is measured, once, which algorithm is fastest: 50 ms for MEASURED. () takes a table
            that was measured on two GPUs.

    Raises:
        ValueError: more ranks; on every rank alike.
        RuntimeError: a window cannot be allocated or mapped, or a kernel compiled or measured; on every rank alike, naming the
            ranks.

    Attributes:
        choices: by length in bytes, see `Choice`.

    Memory: a window of 84 to 143 MB, 143 for two ranks.
    Traffic: none but of `dense_allreduce`; control: allgathers at construction.
    """

    def __init__(
        self, transport: Transport, device: Device, timeout: float = 600.0, measure: Sequence[int] = MEASURED
    ) -> None:
        ranks = transport.size
        if ranks > MOST_DENSE_RANKS:
            raise ValueError(
                f"{ranks} ranks are more than {MOST_DENSE_RANKS}, the most of a dense allreduce over peer memory"
            )
        self._transport, self._device, self._timeout = transport, device, timeout
        self._most_units = _FLAGGED // ranks // 8
        flagged = 2 * ranks * self._most_units * 16
        rings = 2 * ranks * ring_blocks(ranks) * (2 * _AHEAD + 2)
        nbytes = flagged + rings * (_TILE + 8)
        self._memory = SymmetricMemory(transport, device, nbytes)
        device.zero(self._memory.array(nbytes, np.uint8).data.ptr, nbytes)
        # launches of one_shot, from 1 on; tiles of the others
        self._counts = (
            device.allocate(_MOST_BLOCKS, np.uint64),
            device.allocate(2 * ring_blocks(ranks), np.uint64),
        )
        for counts, first in zip(self._counts, (1, 0), strict=True):
            counts.set(np.full(counts.size, first, np.uint64), stream=device.stream)
        with device.gpu:
            self._report_memory = cupy.cuda.alloc_pinned_memory(4)  # its own: a Device outlives an abort
        self._report = ctypes.c_uint32.from_address(self._report_memory.ptr)
        self._report.value = 0
        device.synchronize()
        transport.barrier()  # no rank writes before all have zeroed
        windows = self._memory.bases
        p2p = P2P(windows=self._memory.windows, ranks=ranks, rank=transport.rank, timeout=int(1e9 * timeout))
        first = SymmetricMemory.first
        self._fields = {
            "p2p": p2p, "windows": (ctypes.c_uint64 * MOST_DENSE_RANKS)(*windows), "capacity": self._most_units,
            "report": self._report_memory.ptr,
        }  # fmt: skip
        in_tiles = {
            "area": first + flagged, "flags": first + flagged + rings * _TILE, "counts": self._counts[1].data.ptr,
        }  # fmt: skip
        self._areas = {
            "one_shot": {"area": first, "counts": self._counts[0].data.ptr},
            "pushed": in_tiles,
            "two_shot": in_tiles,
        }
        self._launches: dict[tuple[str, str], PreparedLaunch] = {}  # by element type and algorithm
        self.choices = tuple(Choice(*choice) for choice in _UNMEASURED)
        if len(measure) and ranks > 1:
            self.choices = self._measured(measure)

    def dense_allreduce(
        self, array: Any, out: Any = None, *, addend: Any = None, scale: float = 1.0, nonfinite: Any = None
    ) -> Any:
        """Put the sum over the ranks on the device's stream. Collective: every rank must call, with the same length and type.

        Args:
            array: CuPy array of float32, float16, or uint16 for bfloat16; contiguous, on this GPU.
            out: of the same type and length, where the result goes; None: into `array`. It is `array` or `addend`, or overlaps
                neither.
            addend: of the same type and length, or None: is added to the scaled and rounded sum.
            scale: of the sum, in float32.
            nonfinite: uint32[1] on the GPU, to which the number of results that are not finite is added; or None.

        Returns:
            `out`.

        Raises:
            TypeError, ValueError: an argument is none of these; on this rank alone.
            RuntimeError: an earlier call was aborted, since a rank did not come within `timeout` or raised; see `check`.

        Traffic: `nbytes_sent`, in one message to each other rank.
        """
        out = array if out is None else out
        kind = _element_type(array, out, addend)
        source, target, more, count = (
            0 if each is None else each.data.ptr for each in (array, out, addend, nonfinite)
        )
        self.enqueue(source, target, more, array.size, kind, scale=scale, nonfinite=count)
        return out

    def enqueue(
        self,
        array: int,
        out: int,
        addend: int,
        length: int,
        element_type: str,
        *,
        scale: float = 1.0,
        nonfinite: int = 0,
        stream: int | None = None,
        algorithm: str | None = None,
    ) -> None:
        """As `dense_allreduce`, by device addresses; 0 for what is not there.

        Args:
            element_type: "float32", "bfloat16" or "float16".
            stream: None: the device's.
            algorithm: one of ALGORITHMS; None: by `choices`.

        Raises:
            ValueError: `one_shot` for a vector longer than it takes; `out` overlaps another vector and is not it.
        """
        self._raise_if_aborted()
        if not length:
            return
        nbytes = length * _SIZES[element_type]
        for name, other in (("array", array), ("addend", addend)):
            if other not in (0, out) and abs(other - out) < nbytes:
                raise ValueError(f"out overlaps {name} and is not {name}")
        algorithm = algorithm or self.algorithm_for(nbytes)
        if not self.can_run(algorithm, nbytes):
            raise ValueError(f"{nbytes} bytes are more than the {8 * self._most_units} that one_shot takes")
        stream = self._device.stream.ptr if stream is None else stream
        self._launch(array, out, addend, length, element_type, scale, nonfinite, stream, algorithm)
        self._device.pending = True
        sent = self.nbytes_sent(algorithm, nbytes)
        self._transport.traffic.count(sent, self._transport.size - 1)
        if algorithm == "one_shot":
            self._transport.traffic.count_control(sent, 0)

    def algorithm_for(self, nbytes: int) -> str:
        """Which algorithm a vector of so many bytes takes."""
        fits = (
            choice.algorithm for choice in self.choices if choice.nbytes is None or nbytes <= choice.nbytes
        )
        return next(algorithm for algorithm in fits if self.can_run(algorithm, nbytes))

    def can_run(self, algorithm: str, nbytes: int) -> bool:
        """Whether an algorithm takes a vector of so many bytes."""
        return algorithm != "one_shot" or nbytes <= 8 * self._most_units

    def nbytes_sent(self, algorithm: str, nbytes: int) -> int:
        """Bytes of data that a rank sends in a call; by `one_shot` as many flags besides, which count as control traffic."""
        ranks = self._transport.size
        return 2 * nbytes * (ranks - 1) // ranks if algorithm == "two_shot" else nbytes * (ranks - 1)

    def check(self) -> None:
        """Wait for the calls so far on the device's stream.

        Raises:
            RuntimeError: one was aborted: the sentence names the ranks that did not come or raised. No call can follow.
        """
        self._device.synchronize()
        self._raise_if_aborted()

    def abort(self) -> None:
        """End the waiting of all ranks' kernels, now and later. Not collective; for a rank that raises between calls."""
        self._memory.abort(DENSE_ABORT)

    def close(self) -> None:
        """Free the windows. Collective, but after an abort."""
        self._memory.close()

    def _raise_if_aborted(self) -> None:
        if self._report.value:
            reasons = self._memory.reasons()
            raise RuntimeError(
                f"a dense allreduce over peer memory was aborted: {abort_reasons(reasons, self._timeout)}"
            )

    def _launch(
        self, array: int, out: int, addend: int, length: int, element_type: str, scale: float, nonfinite: int, stream: int,
        algorithm: str,
    ) -> None:  # fmt: skip
        key = element_type, algorithm
        if key not in self._launches:
            kernel = dense_kernels(element_type, self._transport.size)[algorithm]
            self._launches[key] = kernel.prepare(**self._fields, **self._areas[algorithm])
        launch, width = self._launches[key], 8 if algorithm == "one_shot" else 16
        params = launch.params
        params.n, params.scale, params.aligned = length, scale, (array | out | addend) % width == 0
        params.out, params.addend, params.nonfinite = out, addend, nonfinite
        setattr(params, "in", array)
        launch(self._blocks(algorithm, length * _SIZES[element_type]), _THREADS, stream)

    def _blocks(self, algorithm: str, nbytes: int) -> int:
        if algorithm == "one_shot":
            return min(-(-nbytes // (8 * _THREADS)), _MOST_BLOCKS)
        tile = _TILE * (self._transport.size if algorithm == "two_shot" else 1)
        return min(-(-nbytes // tile), ring_blocks(self._transport.size))

    def _measured(self, lengths: Sequence[int]) -> tuple[Choice, ...]:
        """The fastest algorithm at each length, by the slowest rank. Collective."""
        runs = [(nbytes, name) for nbytes in lengths for name in ALGORITHMS if self.can_run(name, nbytes)]
        times: list[float] = []
        problem = ""
        try:
            vector = self._device.allocate(max(lengths) // 4, np.float32)
            with self._device.gpu:
                stream = cupy.cuda.Stream(non_blocking=True)
                with stream:
                    vector.fill(0)
                for nbytes, name in runs:
                    call = self._repeatable(vector.data.ptr, nbytes, name, stream.ptr)
                    times.append(_graph_seconds(call, stream))
                    self._raise_if_aborted()
        except Exception as error:
            problem = str(error) or type(error).__name__
            self.abort()  # the others' kernels wait for this rank's
        everyone = self._transport.allgather_objects((problem, times))
        if any(theirs for theirs, _ in everyone):
            texts = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in enumerate(everyone) if text)
            raise RuntimeError(f"dense allreduces over peer memory cannot be measured: {texts}")
        slowest = [max(each) for each in zip(*(theirs for _, theirs in everyone), strict=True)]
        return choices_by(dict(zip(runs, slowest, strict=True)))

    def _repeatable(self, address: int, nbytes: int, algorithm: str, stream: int) -> Callable[[], None]:
        return functools.partial(
            self._launch, address, address, 0, nbytes // 4, "float32", 0.5, 0, stream, algorithm
        )


class P2PDenseAllreduce:
    """As `collectives.dense_allreduce.DenseAllreduce`, through peer memory: the sum of one fixed vector, in place.

    Args:
        vector: CuPy float32[n] on the GPU of `device`; must not move.
        transport, device, timeout: as `DenseP2P`. Collective: every rank must construct.

    Memory: windows, see `DenseP2P`.
    Traffic: `DenseP2P.nbytes_sent`.
    """

    same_everywhere = True

    def __init__(self, vector: Any, transport: Transport, device: Device, timeout: float) -> None:
        length = min(max(vector.nbytes, 4), MEASURED[-1])
        self._sum = DenseP2P(transport, device, timeout, measure=(length,))
        self._vector, self._device = vector, device
        self._nonfinite = device.report("dense nonfinite", 1)

    def run(self, scale: float = 1.0) -> bool:
        """Sum over the ranks, times `scale`; waits. Collective. Returns whether all sums are finite.

        Raises:
            RuntimeError: as `DenseP2P.check`.
        """
        self._nonfinite[0] = 0
        pointer, device = self._vector.data.ptr, self._device
        self._sum.enqueue(
            pointer,
            pointer,
            0,
            self._vector.size,
            "float32",
            scale=scale,
            nonfinite=device.address("dense nonfinite"),
        )
        self._sum.check()
        return not self._nonfinite[0]

    def free(self) -> None:
        """Free the windows. Collective."""
        self._sum.close()


def ring_blocks(ranks: int) -> int:
    """Blocks of a launch in tiles, at most."""
    return _RING_BLOCKS // max(1, ranks - 1)


def choices_by(seconds: Mapping[tuple[int, str], float]) -> tuple[Choice, ...]:
    """The table of choices from measured times.

    Args:
        seconds: by length in bytes and algorithm.
    """
    fastest: dict[int, str] = {}
    for nbytes in sorted({nbytes for nbytes, _ in seconds}):
        fastest[nbytes] = min((time, name) for (size, name), time in seconds.items() if size == nbytes)[1]
    lengths = list(fastest)
    joined = [
        Choice(nbytes, fastest[nbytes])
        for nbytes, longer in itertools.pairwise(lengths)
        if fastest[longer] != fastest[nbytes]
    ]
    return (*joined, Choice(None, fastest[lengths[-1]]))


def _graph_seconds(call: Callable[[], None], stream: Any, calls: int = 10, replays: int = 5) -> float:
    """Seconds of a call in a CUDA graph of several, the shortest of several replays."""
    call()
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        for _ in range(calls):
            call()
        graph = stream.end_capture()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    times = []
    for _ in range(replays):
        begin.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3 / calls)
    return float(min(times))


@functools.cache
def dense_kernels(element_type: str, ranks: int) -> dict[str, Kernel]:
    """The kernels of all algorithms, by name, for so many ranks."""
    constants = {
        "THREADS": _THREADS, "VECTORS": _VECTORS, "AHEAD": _AHEAD, "BLOCKS": _MOST_BLOCKS,
        "RING_BLOCKS": ring_blocks(ranks),
    }  # fmt: skip
    defines = (f"DENSE_{name}={value}" for name, value in constants.items())
    module = compiled(_SOURCE, f"GRADIENT={_CUDA[element_type]}", f"RANKS={ranks}", *defines)
    return {name: Kernel(module, f"dense_{name}") for name in ALGORITHMS}


def _element_type(array: Any, out: Any, addend: Any) -> str:
    """The element type that all vectors have.

    Raises:
        TypeError, ValueError: they are not CuPy arrays of one type and length.
    """
    for name, vector in (("array", array), ("out", out), ("addend", addend)):
        if vector is None:
            continue
        if not isinstance(vector, cupy.ndarray):
            raise TypeError(f"{name} is a {type(vector).__name__}, not a CuPy array")
        if vector.dtype not in ELEMENT_TYPES or vector.dtype != array.dtype:
            known = ", ".join(map(str, ELEMENT_TYPES))
            raise TypeError(
                f"{name} dtype {vector.dtype} is not one of {known}, or not that of array, {array.dtype}"
            )
        if vector.size != array.size or not vector.flags.c_contiguous:
            raise ValueError(
                f"{name} of shape {vector.shape} is not contiguous with the {array.size} elements of array"
            )
    return ELEMENT_TYPES[array.dtype]
