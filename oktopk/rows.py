"""Gradients of tables of which a step touches a few rows, as an embedding's: their sum over the ranks, row by row."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from collectives.closing import announce, closes
from collectives.connect import Communicator, connect
from collectives.cpu.compiled import load
from collectives.cpu.rows import HostRowKernels
from collectives.element_types import ELEMENT_TYPES
from collectives.errors import EVERY_RANK_CALLS, FlaggedRanksError, refuse
from collectives.limit import Limit
from collectives.rows import row_sparse_allreduce
from collectives.sparse import Array
from collectives.table_rows import LONGEST_ON_GPU, Rows, row_type
from collectives.transport import Transport
from oktopk.allreduce import NonFiniteGradientError
from oktopk.backend import Stream
from oktopk.damage import StateError, state_errors
from oktopk.devices import make_backend
from oktopk.settings import Settings, timeout_of

if TYPE_CHECKING:
    from collectives.row_windows import DeviceRowWindows


@dataclass(frozen=True)
class RowReport:
    """What a step did.

    Attributes:
        step: counted from 0, skipped ones apart.
        touched: rows of this rank's gradient, each counted once.
        sent: rows that this rank gave to the sum.
        summed: rows of the sum, equal on all ranks.
        skipped: whether nothing was summed, since a gradient or the sum was not finite.
        bytes, messages: that this rank sent.
        control_bytes, control_messages: see `collectives.traffic.Traffic`.
        seconds: of the whole step.
    """

    step: int
    touched: int
    sent: int
    summed: int
    skipped: bool
    bytes: int
    messages: int
    control_bytes: int
    control_messages: int
    seconds: float


class RowSparseAllreduce:
    """Sums the rows that the ranks touched of one table, step after step. Nothing is lost, and no rank holds the whole gradient.

    Args:
        comm: as `GradientAllreduce`. Collective: every rank must construct, with the same arguments.
        length, width: rows of the table, at most 2^33 on a GPU, and elements of a row.
        element_type: of the table: "float32", "float16" or "bfloat16" (its bits in uint16). Sums are taken in float32 and rounded
            once a rank and once a sum.
        average: the mean over the ranks, else the sum.
        nonfinite: what a gradient or a sum with NaN or Inf does: "raise" or "skip", on all ranks.
        device: "cpu" for NumPy arrays, "cuda" for CuPy arrays on the current GPU.
        stream: as `GradientAllreduce`.
        timeout: seconds that ranks may come late to a step.
        peer_memory: as `GradientAllreduce`; the bits are those of messages.

    Raises:
        RuntimeError: as `GradientAllreduce`, and where ranks do not come.
        ValueError: an argument is out of range, or ranks disagree; on every rank alike.

    Attributes:
        transport: where the ranks meet.
        p2p_unavailable_reason: why rows travel as messages; "" where kernels read them in the memory of the other GPUs.
        windows: where kernels of the other GPUs read this rank's rows; None where they travel as messages.
        sum: the rows of the last step, ascending, equal on all ranks; None before the first one, and where it was skipped.

    Memory: in a step the rows of its own, those that arrive for its region, that region's sums, and the sums of all: with r rows
        a rank and u in the sum, about 2(r + u) where regions balance. On a GPU some 13 bytes more a row that is added up. With
        peer memory the sums of all, and a window of two slots, in which own rows and the region's sums lie: each has room for a
        quarter more rows than a rank has ever sent, or summed for its region.
    Traffic: see `collectives.rows.row_sparse_allreduce`.
    Source: Li & Hoefler, PPoPP 2022, section 3.1, with rows for entries.

    Example:
        >>> table = RowSparseAllreduce(MPI.COMM_WORLD, length=200_000, width=64)
        >>> report = table.step(rows, values)
        >>> parameters[table.sum.rows] -= learning_rate * table.sum.values
    """

    def __init__(
        self,
        comm: Communicator | None,
        length: int,
        width: int,
        *,
        element_type: str = "float32",
        average: bool = True,
        nonfinite: Literal["raise", "skip"] = "raise",
        device: str = "cpu",
        stream: Stream | None = None,
        timeout: float = Settings.timeout,
        peer_memory: bool | None = None,
    ) -> None:
        arguments = {"length": length, "width": width, "element_type": element_type, "average": average}
        arguments |= {"nonfinite": nonfinite, "device": device}
        self.length, self.width, self.element_type = length, width, element_type
        self.steps = 0
        self.sum: Rows | None = None
        self._average, self._nonfinite = average, nonfinite
        self._timeout = timeout_of({"timeout": timeout})
        with ExitStack() as opened:  # closed where this raises
            self.transport: Transport = connect(comm, Limit("RowSparseAllreduce(...)", self._timeout))
            opened.callback(self.transport.close)
            with self.transport.together(ValueError) as alike:
                _check(length, width, element_type, device)
                Settings(average=average, nonfinite=nonfinite, timeout=timeout)
                alike |= arguments | {"peer_memory": peer_memory, "timeout": timeout}
            self.kernels = HostRowKernels()
            self._scope: Callable[[], AbstractContextManager[None]] = nullcontext
            self.windows: DeviceRowWindows | None = None
            self.p2p_unavailable_reason = "gradients are on the host"
            if device == "cpu":
                load()
            else:
                self._use_gpu(stream, peer_memory)
            opened.pop_all()

    def _use_gpu(self, stream: Stream | None, peer_memory: bool | None) -> None:
        """Put kernels, transport and windows on the current GPU. Collective."""
        host: Any = self.transport
        with host.together(ValueError):
            backend: Any = make_backend("cuda", self.element_type, stream)
        from collectives.cuda.rows import DeviceRowKernels

        self._scope = backend.stream_scope
        self.transport = backend.connect(host)
        self.kernels = kernels = DeviceRowKernels(backend.device, self.element_type)
        host.close()
        with self._scope():
            self.p2p_unavailable_reason = self.transport.open_p2p(peer_memory)
        if self.transport.p2p and self.transport.size > 1:
            from collectives.row_windows import DeviceRowWindows

            types = row_type(self.length), ELEMENT_TYPES[self.element_type].dtype
            self.windows = DeviceRowWindows(self.transport, backend.device, kernels, *types, self.width)

    def step(self, rows: Array, values: Array, problem: str = "") -> RowReport:
        """Sum one gradient; the result is in `sum`. Collective: every rank must call, with no rows where it touched none.

        Args:
            rows: int32[m] or int64[m], row ids in any order; values of one that comes several times are added up.
            values: [m, width] of the element type, C-contiguous.
            problem: as `GradientAllreduce.step`.

        Raises:
            NonFiniteGradientError: a gradient is NaN or Inf on some rank, or a sum is; on every rank alike.
            ValueError: rows that are out of range, or not as many as values, or of another width or type, or no memory to add
                equal ones up, on some rank; on every rank alike, before anything is sent.
            RuntimeError: ranks do not come within the timeout, see `GradientAllreduce.step`.
        """
        with self._scope():
            return self._step(rows, values, problem)

    def _step(self, rows: Array, values: Array, problem: str) -> RowReport:
        began = time.perf_counter()
        local, nonfinite = self._empty(), 0
        into: HostRowKernels | DeviceRowWindows = self.kernels if self.windows is None else self.windows
        try:
            refuse(problem)
            self._check_given(rows, values)
            local, nonfinite = into.coalesce(rows, values, self.length, 1.0)
        except ValueError as error:
            problem = str(error)
        except MemoryError as error:
            problem = f"no memory to add up {len(rows)} rows: {error}"
        touched, flagged = len(local), bool(problem or nonfinite)
        self.transport.take_traffic()
        self.transport.expect_all(f"step {self.steps}", self._timeout, EVERY_RANK_CALLS)
        scale = 1.0 / self.transport.size if self._average else 1.0
        self.sum = None
        try:
            self.sum = row_sparse_allreduce(
                local,
                self.length,
                self.transport,
                self.kernels,
                scale=scale,
                flag=flagged,
                windows=self.windows,
            )
        except FlaggedRanksError as error:
            if error.ranks:
                self.transport.agree({}, problem)  # raises it on all ranks
            if self._nonfinite == "raise":
                raise NonFiniteGradientError(error.ranks, self.steps) from None
        finally:
            self.transport.expect_none()
        traffic = dict(vars(self.transport.take_traffic()))
        del traffic["bytes_between"]
        self.steps += self.sum is not None
        return RowReport(
            step=self.steps - (self.sum is not None),
            touched=touched,
            sent=0 if self.sum is None else len(local),
            summed=0 if self.sum is None else len(self.sum),
            skipped=self.sum is None,
            seconds=time.perf_counter() - began,
            **traffic,
        )

    def take_back(self) -> None:
        """Count the last step as skipped, whose sum is then not to be applied. Every rank must call. No traffic."""
        self.steps -= self.sum is not None
        self.sum = None

    def _empty(self) -> Rows:
        empty, kind = self.kernels.arrays.empty, ELEMENT_TYPES[self.element_type].dtype
        return Rows(empty(0, row_type(self.length)), empty((0, self.width), kind))

    def _check_given(self, rows: Array, values: Array) -> None:
        """Raise ValueError where a step cannot take what it was given."""
        kind, array = ELEMENT_TYPES[self.element_type].dtype, self.kernels.arrays.ndarray
        for name, argument in (("rows", rows), ("values", values)):
            if not isinstance(argument, array):
                wanted = f"{array.__module__}.{array.__name__}"
                raise ValueError(f"{name} are a {type(argument).__name__}, not a {wanted}")
        if rows.ndim != 1 or rows.dtype.kind != "i" or rows.dtype.itemsize < 4:
            raise ValueError(f"rows are {rows.dtype}{list(rows.shape)}, not int32 or int64 of one dimension")
        if values.dtype != kind or values.ndim != 2 or values.shape[1] != self.width:
            shape = f"{values.dtype}{list(values.shape)}"
            raise ValueError(f"values are {shape}, not {kind}[{len(rows)}, {self.width}]")
        if len(values) != len(rows):
            raise ValueError(f"there are {len(rows)} row ids and {len(values)} rows of values")
        if not values.flags.c_contiguous:
            raise ValueError("values are not C-contiguous")

    def state_dict(self) -> dict[str, Any]:
        """What a restart of this rank needs: arrays and plain values."""
        return {"length": self.length, "width": self.width, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the `state_dict` of this rank was taken, bit for bit. Collective.

        Raises:
            ValueError: the state is of another table on some rank; on every rank alike.
        """
        self.transport.expect_all("load_state_dict", self._timeout)
        with self.transport.together(ValueError) as alike:
            self.check_state(state)
            alike["steps"] = state["steps"]
        self.steps = int(state["steps"])

    def check_state(self, state: Any) -> None:
        """Raise StateError where `load_state_dict` would refuse a state on this rank."""
        with state_errors(what="the state is not that of a table: "):
            length, width, steps = state["length"], state["width"], state["steps"]
        if (length, width) != (self.length, self.width):
            own = f"{self.length} x {self.width}"
            raise StateError(f"the state is of a table of {length} x {width}, this one has {own}")
        if not isinstance(steps, int) or steps < 0:
            raise StateError(f"the state is damaged: {steps!r} steps")

    def reset(self) -> None:
        """Forget the number of steps. Collective."""
        self.transport.expect_all("reset", self._timeout)
        self.transport.barrier()
        self.transport.expect_none()
        self.steps = 0

    @closes
    def close(self) -> None:
        """Free what the library holds. Collective."""
        announce([self.transport])
        if self.windows is not None:
            self.windows.close()
        self.transport.close()


def _check(length: int, width: int, element_type: str, device: str) -> None:
    """Raise ValueError where an argument of `RowSparseAllreduce` is out of range."""
    for name, value in (("length", length), ("width", width)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} {value!r} is not a number of at least 1")
    if element_type not in ELEMENT_TYPES:
        raise ValueError(f"element_type {element_type!r} is not one of {', '.join(ELEMENT_TYPES)}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is not 'cpu' or 'cuda'")
    if device == "cuda" and length > LONGEST_ON_GPU:
        raise ValueError(f"a table on a GPU has at most {LONGEST_ON_GPU} rows, not {length}")
