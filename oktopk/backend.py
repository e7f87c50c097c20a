"""Where gradients live: NumPy arrays and numba kernels here; a GPU overrides all of it, in `oktopk.cuda.backend`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from collectives.cpu.lanes import LINE
from collectives.host_transport import HostTransport
from collectives.shared_vectors import SharedVectors
from collectives.sparse import Array, Entries, Kernels, Vector
from collectives.transport import Transport
from oktopk.cpu import kernels
from oktopk.cpu.update import STREAMED, SparseUpdate
from oktopk.displacement import Displacement
from oktopk.levels import Layout
from oktopk.settings import Settings

if TYPE_CHECKING:
    import cupy

    from collectives.entry_windows import DeviceEntryWindows
    from oktopk.cpu.accumulate import ShardSum
    from oktopk.cuda.shard_sum import DeviceShardSum
    from oktopk.step import Gradient

Stream: TypeAlias = "cupy.cuda.Stream | cupy.cuda.ExternalStream"

Ready: TypeAlias = "Callable[[Stream], None] | None"
"""Called before arrays are read that another stream filled, with the stream that reads them."""


class Backend:
    """Arrays and kernels of one device: the host.

    Attributes:
        kernels: the gradient kernels.
        nvtx: for `StageTimer`; None on the host.
        stream: that kernels run on; None on the host.
    """

    kernels: Kernels = kernels
    nvtx: Any = None
    stream: Stream | None = None

    def connect(self, host: HostTransport) -> Transport:
        """The transport for arrays of this backend, made of a host transport, which it replaces. Collective."""
        return host

    def zeros(self, length: int) -> Vector:
        """float32[length] of zeros. Its pages are touched here, not in the first step."""
        vector = np.empty(length, np.float32)
        vector.fill(0)
        return vector

    def sparse_update(self, vector: Vector) -> SparseUpdate | None:
        """What replaces the entries of float32[n], zero now; None: kernels clear the last entries, and write the new ones."""
        return SparseUpdate(vector) if vector.nbytes >= STREAMED else None

    def validate(self, gradient: Gradient, length: int) -> Gradient:
        """Check the caller's gradient, an array of this backend, a displacement or, on a GPU, a tensor list; returns it as it is.

        Raises:
            TypeError, ValueError: of another type, length or device, or not contiguous.
        """
        if isinstance(gradient, Displacement) and gradient.length == length:
            return gradient
        if not isinstance(gradient, np.ndarray):
            raise TypeError(f"gradient is a {type(gradient).__name__}, not a NumPy array")
        if gradient.dtype != np.float32:
            raise TypeError(f"gradient dtype {gradient.dtype} is not float32")
        if gradient.shape != (length,):
            raise ValueError(f"gradient shape {gradient.shape} is not ({length},)")
        if not gradient.flags.c_contiguous:
            raise ValueError("gradient is not contiguous")
        return gradient

    def stream_scope(self) -> AbstractContextManager[object]:
        """Enter the device and stream that kernels run on."""
        return nullcontext()

    def to_host(self, array: Vector) -> NDArray[np.float32]:
        """A copy on the host."""
        return array.copy()

    def copy_from_host(self, target: Vector, array: NDArray[np.float32]) -> None:
        """Fill an array of this backend."""
        target[:] = array

    def read_only(self, array: Vector) -> Vector:
        """The array, not to be written to; CuPy has no such arrays."""
        view = array.view()
        view.flags.writeable = False
        return view

    def share_memory(self, one: Gradient, other: Vector) -> bool:
        """Whether two contiguous arrays have memory in common; False for a list of tensors, where it is not known."""
        return not isinstance(one, Displacement) and np.may_share_memory(one, other)

    def indices(self, entries: Entries) -> NDArray[np.int32]:
        """int32[nnz] on the host: the indices of ENTRY[nnz]."""
        return np.asarray(entries["index"])

    def p2p_launches(
        self, transport: Transport, length: int, settings: Settings
    ) -> Callable[[int], Any] | None:
        """k -> the launches of steps that read other ranks' memory, `oktopk.cuda.p2p_launches.P2PLaunches`; None without it."""
        return None

    def shared_gradients(
        self, transport: Transport, length: int, shard: int, peer_memory: bool | None
    ) -> SharedGradients:
        """Gradients and shards that the ranks of a host read. Collective.

        Args:
            transport: among them.
            length: elements of the gradient (n).
            shard: elements of the longest shard.
            peer_memory: as `GradientAllreduce` takes it.

        Raises:
            RuntimeError, MemoryError: there is no such memory.
        """
        return SharedGradients(transport, length, shard)

    def entry_windows(self, transport: Transport) -> DeviceEntryWindows | None:
        """Where the ranks of a host read each other's entries; None where these travel as messages. Not collective.

        Args:
            transport: among the ranks of the host, which have shared gradients.
        """
        return None

    def stream_beside(self, number: int) -> Stream | None:
        """Another stream of this priority, one for each number; None on the host."""
        return None

    def follow(self, other: Backend) -> None:
        """Order what is put on the stream next after all that is on another backend's."""

    def wait(self) -> None:
        """Wait until all work on arrays is done, so that MPI may read them."""


class SharedGradients:
    """A gradient and a shard of every rank of a host, which all of them read.

    Args:
        transport: among the ranks of the host. Collective: every rank must construct.
        length: elements of the gradient (n).
        shard: elements of the longest shard.

    Attributes:
        own: float32[n], this rank's.
    """

    def __init__(self, transport: Transport, length: int, shard: int) -> None:
        self._behind = -(-length // LINE) * LINE
        self._rows = SharedVectors(transport, self._behind + shard).rows
        self.own: Array = self._rows[transport.rank, :length]

    def publish(self, gradient: Array) -> None:
        """Make this rank's gradient what the others read; nothing to copy where it is `own`."""
        if not np.may_share_memory(gradient, self.own):
            self.own[:] = gradient

    def shard_of(self, rank: int, length: int) -> Vector:
        """float32[length], the shard of a rank of the host, as this rank maps it."""
        return self._rows[rank, self._behind : self._behind + length]

    def sum_of_shard(self, layout: Layout, shard: int, out: Vector) -> ShardSum | DeviceShardSum:
        """The sum of a shard of all ranks' gradients in rank order, after a barrier that follows `publish`.

        Args:
            out: float32[shard], for the sum where it is taken at once.

        Returns:
            What `accumulate_select` and `undo_accumulate` of the kernels take as a gradient; its `summed()` is the sum in `out`.
        """
        return kernels.ShardSum(self._rows, layout.block, layout.shards, shard, out)

    def close(self) -> None:
        """Let go of the memory, which is freed with the last array that reads it. Collective."""
        self._rows = self._rows[:0]
