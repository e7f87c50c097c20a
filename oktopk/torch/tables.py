"""Tables whose gradients are sparse: `torch.nn.Embedding(sparse=True)` and its like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from collectives.closing import announce
from collectives.connect import Communicator
from collectives.sparse import Array
from collectives.table_rows import Rows
from collectives.transport import Transport
from oktopk.backend import Ready
from oktopk.damage import StateError
from oktopk.rows import RowReport, RowSparseAllreduce
from oktopk.settings import Settings
from oktopk.torch.alive import alive
from oktopk.torch.interop import GRADIENT_TYPES, TYPE_NAMES, TensorMemory
from oktopk.torch.states import as_arrays, as_tensors


def sparse_tables(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those of the parameters that are the weight of a module which makes sparse gradients, in their order."""
    tables = [*alive(nn.Embedding), *alive(nn.EmbeddingBag)]
    weights = {id(table.weight) for table in tables if table.sparse}
    return [parameter for parameter in parameters if id(parameter) in weights]


class SparseTables:
    """The tables of an optimizer or a hook, each reduced row by row. Of none every call returns at once.

    Args:
        comm: as `GradientAllreduce`. Collective.
        tables: of two dimensions, of one type.
        memory: of the tables.
        settings: whose `average`, `nonfinite` and `timeout` hold.
        peer_memory: as `oktopk.rows.RowSparseAllreduce`.
        names: one a table, its key in a state; None: their numbers.

    Attributes:
        tables, names: as given.
        reducers: one a table.
        reports: of the last step, one a table; none where it was skipped.
    """

    def __init__(
        self,
        comm: Communicator | None,
        tables: Sequence[Tensor],
        memory: TensorMemory,
        settings: Settings,
        peer_memory: bool | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.tables = list(tables)
        self.names = list(map(str, range(len(self.tables)))) if names is None else list(names)
        self._memory = memory
        options: dict[str, Any] = {
            "device": memory.device,
            "stream": memory.stream,
            "peer_memory": peer_memory,
        }
        options |= {name: getattr(settings, name) for name in ("average", "nonfinite", "timeout")}
        self.reducers: list[RowSparseAllreduce] = []
        self.reports: list[RowReport] = []
        with ExitStack() as opened:  # closed where this raises
            opened.callback(self.close)
            for table in self.tables:
                kind = TYPE_NAMES[table.dtype]
                self.reducers.append(RowSparseAllreduce(comm, *table.shape, element_type=kind, **options))
            opened.pop_all()
        self._gradients: list[Tensor | None] = []  # while `reduce` has replaced them

    def __len__(self) -> int:
        return len(self.tables)

    def reduce(self, problem: str = "", ready: Ready = None, all_or_none: bool = True) -> bool:
        """Replace each table's gradient by that over the ranks, a coalesced sparse tensor. Collective.

        One that is missing counts as no rows. `put_back` gives each what this rank alone computed.

        Args:
            problem: as `GradientAllreduce.step`.
            ready: called first, with the reducer's stream, on a GPU: to order that after the one that made the gradients.
            all_or_none: where a table is skipped, undo the others; else it alone has a gradient without rows.

        Returns:
            False where a table was skipped, and with it all.

        Raises:
            NonFiniteGradientError, ValueError: as `RowSparseAllreduce.step`; no table was reduced then.
        """
        if ready is not None:
            ready(self._memory.stream)
        self.reports = []
        self._gradients = [table.grad for table in self.tables]
        done: list[RowSparseAllreduce] = []
        for table, reducer in zip(self.tables, self.reducers, strict=True):
            try:
                with self._memory.on_stream():
                    rows, values = rows_of(table.grad, table, self._memory)
                self.reports.append(reducer.step(rows, values, problem))
            except BaseException:
                self._undo(done)
                raise
            if all_or_none and self.reports[-1].skipped:
                self._undo(done)
                return False
            done.append(reducer)
        with self._memory.on_stream():
            for table, reducer in zip(self.tables, self.reducers, strict=True):
                table.grad = gradient_of(reducer.sum, table, self._memory)
        return True

    def take_back(self) -> None:
        """Undo a step that is not to be applied: gradients are as before. Every rank must call."""
        self._undo(self.reducers)
        self.put_back()

    def _undo(self, done: Sequence[RowSparseAllreduce]) -> None:
        self.reports = []
        for reducer in done:
            reducer.take_back()

    def put_back(self) -> None:
        """Give each table what this rank alone computed."""
        for table, gradient in zip(
            self.tables, self._gradients, strict=False
        ):  # none after they were put back
            table.grad = gradient
        self._gradients = []  # `zero_grad` of the model frees what they were

    def leave_out(self, used: Sequence[int]) -> None:
        """Let tables be without a gradient that no rank has one of: 0 in `used`, else 1, one a table."""
        for table, anywhere in zip(self.tables, used, strict=True):
            if not anywhere:
                table.grad = None

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for table in self.tables:
            table.grad = None

    @property
    def has_gradients(self) -> bool:
        """Whether this rank has touched a row."""
        return any(len(rows_of(table.grad, table, self._memory)[0]) > 0 for table in self.tables)

    @property
    def values(self) -> list[Tensor]:
        """The elements of each reduced gradient, to be changed in place."""
        return [table.grad._values() for table in self.tables if table.grad is not None]

    @property
    def reports_by_name(self) -> dict[str, RowReport]:
        """`reports`, by name."""
        return dict(zip(self.names, self.reports, strict=False))

    def state(self) -> dict[str, Any]:
        """The states of the tables, by name."""
        return {
            name: as_tensors(reducer.state_dict())
            for name, reducer in zip(self.names, self.reducers, strict=True)
        }

    def load(self, state: dict[str, Any] | None) -> None:
        """Continue from a `state`; None: as before the first step. Collective.

        Raises:
            ValueError: it is of other tables; on every rank alike.
        """
        for name, reducer in zip(self.names, self.reducers, strict=True):
            if state is None:
                reducer.reset()
            else:
                reducer.load_state_dict(as_arrays(state[name]))

    def check_state(self, state: Any) -> None:
        """Raise StateError where `load` would refuse a state on this rank."""
        if not isinstance(state, dict) or state.keys() != set(self.names):
            if not self.names:
                raise StateError(
                    f"the state has {len(state)} tables with sparse gradients, and the optimizer has none"
                )
            raise StateError(f"the state is not that of {len(self.names)} tables with sparse gradients")
        for name, reducer in zip(self.names, self.reducers, strict=True):
            reducer.check_state(as_arrays(state[name]))

    @property
    def transports(self) -> list[Transport]:
        """Of all tables."""
        return [reducer.transport for reducer in self.reducers]

    def close(self) -> None:
        """Free what the library holds. Collective."""
        announce(self.transports)
        for reducer in self.reducers:
            reducer.close()


def check_tables(tables: Sequence[Tensor], trained: Sequence[Tensor], settings: Mapping[str, Any]) -> None:
    """Raise ValueError where these tables cannot be reduced row by row.

    Args:
        tables: with sparse gradients.
        trained: all parameters that need a gradient.
        settings: keywords of `oktopk.Settings`.
    """
    numbers = set(map(id, trained))
    for table in tables:
        if id(table) not in numbers:
            raise ValueError(
                "sparse has a tensor that is no parameter of the optimizer, or needs no gradient"
            )
        if table.dtype not in TYPE_NAMES:
            known = ", ".join(GRADIENT_TYPES)
            raise ValueError(f"a table with sparse gradients is {table.dtype}, not of {known}")
        if table.dim() != 2 or not table.is_contiguous():
            shape = tuple(table.shape)
            raise ValueError(
                f"a table of shape {shape} with strides {table.stride()} has no rows one after the other"
            )
    if tables and settings.get("deferred"):
        raise ValueError("deferred steps are not for tables with sparse gradients: pass deferred=False")


def rows_of(gradient: Tensor | None, table: Tensor, memory: TensorMemory) -> tuple[Array, Array]:
    """Ids and values of the rows of a table's gradient, as the reducer's arrays. A dense one has those that are not zero.

    A dense one comes from a weight that is used by a module which makes no sparse gradients, too.
    """
    if gradient is None:
        rows, values = table.new_empty(0, dtype=torch.int64), table.new_empty(0, table.shape[1])
    elif gradient.is_sparse:
        rows, values = gradient._indices()[0], gradient._values()
    else:
        rows = (gradient != 0).any(dim=1).nonzero()[:, 0]  # a NaN is not zero
        values = gradient[rows]
    return memory.array(rows.contiguous()), memory.array(values.detach().contiguous())


def gradient_of(rows: Rows | None, table: Tensor, memory: TensorMemory) -> Tensor:
    """A coalesced sparse gradient of a table; None: of no rows."""
    if rows is None:
        ids, values = table.new_empty(0, dtype=torch.int64), table.new_empty(0, table.shape[1])
    else:
        ids, values = memory.tensor(rows.rows).long(), memory.tensor(rows.values, table.dtype)
    return torch.sparse_coo_tensor(
        ids[None], values.detach(), table.shape, is_coalesced=True, check_invariants=False
    )
