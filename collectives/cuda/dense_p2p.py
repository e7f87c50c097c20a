"""Dense allreduce among the GPUs of a host: kernels that write into each other's symmetric memory, see `dense_p2p.cu`."""

from __future__ import annotations

import ctypes

import cupy
import numpy as np

from collectives.closing import closes
from collectives.cuda.dense_algorithms import (
    ALGORITHMS,
    algorithm_for,
    areas,
    blocks_of,
    bytes_sent,
    counters,
    dense_kernels,
    lines_arrive_whole,
    most_units,
)
from collectives.cuda.dense_calls import abort_error
from collectives.cuda.device import Device
from collectives.cuda.launch import PreparedLaunch
from collectives.cuda.layouts import DENSE_ABORT, DENSE_THREADS, MOST_DENSE_RANKS, P2P
from collectives.element_types import ELEMENT_TYPES
from collectives.errors import NoPeerMemoryError
from collectives.symmetric_memory import SymmetricMemory
from collectives.transport import Transport


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

    Raises:
        ValueError: more ranks; on every rank alike.
        NoPeerMemoryError: a rank has no memory or window, or a kernel cannot be compiled; a RuntimeError, on every rank alike,
            naming the ranks. Those of float16 are compiled by the first call with it, whose error is that of one rank alone.

    Attributes:
        transport: the one given; another one of the same ranks may take its place, which then counts the traffic.
        number, users: of those who share it among themselves, see `P2PDenseAllreduce`.

    Memory: a window of 59 to 92 MB, 76 for two ranks.
    Traffic: none but of `enqueue`; control: allgathers at construction.
    """

    def __init__(self, transport: Transport, device: Device, timeout: float = 600.0) -> None:
        ranks = transport.size
        if ranks > MOST_DENSE_RANKS:
            raise ValueError(
                f"{ranks} ranks are more than {MOST_DENSE_RANKS}, the most of a dense allreduce over peer memory"
            )
        self._device, self._timeout = device, timeout
        self.number = self.users = 0
        self._most_units = most_units(ranks)
        within, first = areas(ranks), SymmetricMemory.first
        with transport.together_or("no peer memory", NoPeerMemoryError):
            self._counts = [device.allocate(count, np.uint64) for count in (*counters(ranks), 1)]
            with device.gpu:
                self._report_memory = cupy.cuda.alloc_pinned_memory(4)  # its own: a Device outlives an abort
            for element_type in ("float32", "bfloat16"):
                dense_kernels(element_type, ranks)
        self._memory = SymmetricMemory(transport, device, within.nbytes)
        with transport.together_or("no peer memory", NoPeerMemoryError):
            device.zero(self._memory.array(within.nbytes, np.uint8).data.ptr, within.nbytes)
            starts = 1, 0, 0, 0  # launches of one_shot begin at 1
            for counts, start in zip(self._counts, starts, strict=True):
                counts.set(np.full(counts.size, start, np.uint64), stream=device.stream)
            device.synchronize()
        self._report = ctypes.c_uint32.from_address(self._report_memory.ptr)
        self._report.value = 0
        self._lines = lines_arrive_whole(transport, device)  # and no rank writes before all have zeroed
        windows = self._memory.bases
        p2p = P2P(windows=self._memory.windows, ranks=ranks, rank=transport.rank, timeout=int(1e9 * timeout))
        self._calls_at = first + within.calls
        self._fields = {
            "p2p": p2p, "windows": (ctypes.c_uint64 * MOST_DENSE_RANKS)(*windows), "capacity": self._most_units,
            "report": self._report_memory.ptr, "calls_at": self._calls_at, "calls": self._counts[3].data.ptr,
        }  # fmt: skip
        one_shot, in_tiles, in_lines = (
            {"area": first + area, "counts": counts.data.ptr}
            for area, counts in zip((within.flagged, within.tiles, within.lines), self._counts, strict=False)
        )
        in_tiles["flags"] = first + within.flags
        self._areas = {"one_shot": one_shot, "two_shot": in_tiles}
        self._areas |= dict.fromkeys(("lines", "two_shot_lines"), in_lines)
        self._launches: dict[tuple[str, str], PreparedLaunch] = {}  # by element type and algorithm

    @property
    def transport(self) -> Transport:
        return self._memory.transport

    @transport.setter
    def transport(self, other: Transport) -> None:
        self._memory.transport = other

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
        """Put the sum over the ranks on a stream. Collective: every rank must call, with the same length, type and scale.

        Args:
            array: device address of the vector, which each of its elements is aligned to.
            out: of the result, of the same type and length: that of `array` or `addend`, or it overlaps neither.
            addend: of a vector of the same type and length, which is added to the scaled and rounded sum; 0 for none.
            length: elements of the vector.
            element_type: "float32", "bfloat16" or "float16".
            scale: of the sum, in float32.
            nonfinite: of uint32[1], to which the number of results that are not finite is added; 0 for none.
            stream: None: the device's.
            algorithm: one of ALGORITHMS; None: as `algorithm_for` says.

        Raises:
            ValueError: an algorithm that does not take the vector, see `can_run`; `out` overlaps another vector and is not it.
            MissingRanksError, RuntimeError: an earlier call was aborted, see `check`.

        A captured call must not be replayed after `close`: the windows that it writes to are then freed.

        Traffic: `bytes_sent` of dense_algorithms, in one message to each other rank; flags beside them count as control traffic.
        """
        self.raise_if_aborted()
        nbytes = length * ELEMENT_TYPES[element_type].nbytes
        for name, other in (("array", array), ("addend", addend)):
            if other not in (0, out) and abs(other - out) < nbytes:
                raise ValueError(f"out overlaps {name} and is not {name}")
        algorithm = algorithm or self.algorithm_for(nbytes)
        if not self.can_run(algorithm, nbytes):
            raise ValueError(f"{algorithm} takes no vector of {nbytes} bytes here: see can_run")
        key = element_type, algorithm
        if key not in self._launches:
            kernel = dense_kernels(element_type, self.transport.size)[algorithm]
            call = tuple(ELEMENT_TYPES).index(element_type) | ALGORITHMS.index(algorithm) << 2
            self._launches[key] = kernel.prepare(call=call, **self._fields, **self._areas[algorithm])
        launch, width = self._launches[key], 8 if algorithm == "one_shot" else 16
        params = launch.params
        params.n, params.scale, params.aligned = length, scale, (array | out | addend) % width == 0
        params.out, params.addend, params.nonfinite = out, addend, nonfinite
        setattr(params, "in", array)
        blocks = blocks_of(algorithm, length, ELEMENT_TYPES[element_type].nbytes, self.transport.size)
        launch(1 + blocks, DENSE_THREADS, self._device.stream.ptr if stream is None else stream)
        self._device.pending = True
        sent, flags = bytes_sent(algorithm, nbytes, self.transport.size)
        self.transport.traffic.count(sent, self.transport.size - 1)
        self.transport.traffic.count_control(flags, 0)

    def algorithm_for(self, nbytes: int) -> str:
        """Which algorithm a vector of so many bytes takes."""
        return algorithm_for(nbytes, self.transport.size, self._lines)

    def can_run(self, algorithm: str, nbytes: int) -> bool:
        """Whether an algorithm takes a vector of so many bytes: lines only where NVLink joins the GPUs, each rank's its own."""
        if algorithm == "one_shot":
            return nbytes <= 8 * self._most_units
        return self._lines or algorithm == "two_shot"

    def check(self) -> None:
        """Wait for the calls so far on the device's stream, and look for an abort that none of them met.

        Raises:
            MissingRanksError: ranks did not come in time; on the others, and on a missing rank when it comes.
            RuntimeError: one was aborted otherwise: the sentence names the ranks that raised, or says how their calls differ.

        No call can follow either.
        """
        if self.aborted:
            self._report.value = 1
        self.raise_if_aborted()

    def abort(self) -> None:
        """End the waiting of all ranks' kernels, now and later. Not collective; for a rank that raises where others may wait."""
        if not self._report.value:  # else they do not wait, and the reason is another one
            self._memory.abort(DENSE_ABORT)
            self._report.value = 1

    @property
    def aborted(self) -> bool:
        """Whether no call can follow; waits for the calls so far on the device's stream."""
        return self._memory.aborted

    @closes
    def close(self) -> None:
        """Free the windows. Collective, but after an abort. No captured call may be replayed after it."""
        self._memory.close()

    def raise_if_aborted(self) -> None:
        """As `check`, of what this rank's calls that are over have met."""
        if self._report.value:
            words = self._memory.read(self._calls_at, 2 * self.transport.size * 4)
            raise abort_error(self._memory.reasons(), words, self.transport.rank, self._timeout)
