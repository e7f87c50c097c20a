"""What reduces the gradients of a DistributedDataParallel as it hands them over, in buckets that never move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from collectives.connect import Communicator
from oktopk.buckets import BucketedAllreduce
from oktopk.results import StepReport
from oktopk.torch.agreement import FoundOptimizers
from oktopk.torch.as_wrapped import AsWrapped
from oktopk.torch.engine import Engine
from oktopk.torch.gradients import is_dense, missing_spans
from oktopk.torch.interop import GRADIENT_TYPES, TYPE_NAMES, TensorMemory
from oktopk.torch.overlap import when_accumulated
from oktopk.torch.step_agreement import StepAgreement
from oktopk.torch.tables import SparseTables


class DdpBucket:
    """A bucket of DDP's that it has handed over.

    Args:
        parameters: in the order in which their gradients lie in `buffer`.
        buffer: the gradients; of a table a sparse one.

    Attributes:
        mean: what DDP waits for: the mean over the ranks, as the buffer is laid out, or the error of the step.
    """

    def __init__(self, parameters: list[Tensor], buffer: Tensor) -> None:
        self.parameters, self.buffer = parameters, buffer
        self._error: Exception | None = None
        self._done: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        self.mean: Future[Tensor] = self._done.then(self._result)

    def end(self, mean: Tensor, error: Exception | None) -> None:
        """Give DDP the mean, or the error where there is one."""
        self._error = error
        self._done.set_result(mean)

    def _result(self, done: Future[Tensor]) -> Tensor:
        if self._error is not None:
            raise self._error
        return done.value()

    @property
    def pieces(self) -> dict[Tensor, Tensor]:
        """Of each parameter its gradient, as it lies in memory; of a table the sparse one."""
        if self.buffer.is_sparse:
            return {self.parameters[0]: self.buffer}
        return _pieces(self.parameters, self.buffer)


class HookEngine(Engine):
    """Reduces gradients as a DDP hands them over, and tables behind them.

    While DDP's buckets have the parameters of the reducer's, each is reduced as it comes, where it
    lies. From the first that has others on, buckets are copied, and start when all have come.

    Args:
        comm, method, options: as `BucketedAllreduce`. Collective.
        bucket_parameters: a list for each of the reducer's buckets, in the order in which they
            start; none: the reducer has an element of its own.
        tables: the parameters with sparse gradients, each alone in a bucket of DDP's.
        names: of all parameters.
        memory: of all.
        orders: strides that DDP has been seen to keep to, of parameters; filled here.

    Attributes:
        bucket_parameters: as given.
        parameters: of buckets and tables.
        optimizers: those that are found to have any parameter of `names`.
        came: DDP has begun to hand over buckets in the backward pass that runs, or ran last.

    Memory: that of `BucketedAllreduce`; n elements more where buckets are copied.
    Traffic: that of the method for each bucket, and of `RowSparseAllreduce.step` for each table.
    """

    reducer: BucketedAllreduce

    def __init__(
        self,
        comm: Communicator | None,
        bucket_parameters: list[list[Tensor]],
        tables: Sequence[Tensor],
        names: dict[Tensor, str],
        memory: TensorMemory,
        *,
        method: str,
        orders: dict[Tensor, tuple[int, ...]],
        **options: Any,
    ) -> None:
        self.bucket_parameters, self._names, self._memory = bucket_parameters, names, memory
        self._own: list[Tensor] = (
            []
            if bucket_parameters
            else [nn.Parameter(torch.zeros(1, dtype=torch.float32, device=tables[0].device))]
        )
        self._layout = bucket_parameters or [self._own]
        every = [parameter for parameters in self._layout for parameter in parameters]
        types = {parameter.dtype for parameter in every}
        if len(types) == 1 and memory.device != "cpu":
            options = {"gradient_type": TYPE_NAMES[types.pop()]} | options
        sizes = [sum(parameter.numel() for parameter in parameters) for parameters in self._layout]
        with ExitStack() as opened:  # closed where this raises
            place: dict[str, Any] = {"device": memory.device, "stream": memory.stream}
            reducer = BucketedAllreduce(comm, sizes, method, **place, **options)
            opened.callback(reducer.close)
            peer_memory, named = options.get("peer_memory"), [names[table] for table in tables]
            sparse = SparseTables(comm, tables, memory, reducer.settings, peer_memory, named)
            super().__init__(reducer, sparse, memory)
            opened.pop_all()
        self.parameters = dict.fromkeys([*(every if bucket_parameters else ()), *tables])
        self._dtype = GRADIENT_TYPES[options.get("gradient_type", "float32")]
        updates = list(map(memory.tensor, reducer.updates))
        self._wholes = {_key(each): update for each, update in zip(self._layout, updates, strict=True)}
        self._updates: dict[Tensor, Tensor] = {}
        for parameters, update in zip(self._layout, updates, strict=True):
            self._updates |= _pieces(parameters, update)
        # the reducer's bucket -> its gradient, where that is not a buffer of DDP's
        self._copies: dict[int, Tensor] = {}
        self._orders = orders
        self._problem = ""  # of this step, on this rank: the next bucket tells the others
        self._token = 0  # of this step
        self.optimizers = FoundOptimizers(names)
        self.optimizers.look()
        self._agreement = StepAgreement(self.optimizers.groups, renew=self.optimizers.state_found_anew)
        # what a gradient was accumulated for since the last step; None where that began before this was made
        self._used: set[Tensor] | None = None
        self.came, self._running = True, False
        trained = [parameter for parameter in every if parameter.requires_grad]
        self._as_wrapped = AsWrapped(trained)
        self._hooks = when_accumulated(trained, self._accumulated)

    def add(self, bucket: DdpBucket) -> None:
        """Take a bucket of DDP's, and start the reducer's next one if that is the same. Collective."""
        if bucket.buffer.is_sparse:
            return
        number = self.reducer.started
        with self.passed_on():
            self._check_order(bucket)
        with self.passed_on():
            ours = number < len(self._layout) and bucket.buffer.dtype == self._dtype
            if ours and _key(bucket.parameters) == _key(self._layout[number]):
                self._copies.pop(number, None)
                self._start(number, bucket.buffer)

    @contextmanager
    def passed_on(self) -> Iterator[None]:
        """Let an error of the `with` block, on this rank, be the problem of the step, which every rank raises in `end`."""
        try:
            yield
        except Exception as error:
            self._problem = self._problem or str(error) or type(error).__name__

    def _start(self, number: int, gradient: Tensor) -> None:
        parameters, used, token = self._layout[number], self._used, None
        present = [p.grad is not None if used is None else p in used for p in parameters]
        absent = missing_spans([parameter.numel() for parameter in parameters], present)
        if number == len(self._layout) - 1:
            self.optimizers.look()
            self._agreement.state = self.optimizers.state()
            token = self._token = self._agreement.tell()
        array = self._memory.array(gradient)
        self.reducer.start(array, self.ready(), absent=absent, problem=self._problem, token=token)

    def end(self, arrived: Sequence[DdpBucket]) -> StepReport:
        """Start the other buckets, wait for all, and give DDP the means. Collective.

        Args:
            arrived: all of DDP's, which were added.

        Raises:
            NonFiniteGradientError, ValueError, RuntimeError: as `Engine.finish` and `Engine.hear`; nothing is applied.
        """
        rest = range(self.reducer.started, len(self._layout))
        if rest:
            came = {parameter: parameter for parameter in self._own}
            for each in arrived:
                came |= each.pieces
            for number in rest:
                self._start(number, self._copied(number, came))
        problem, self._problem, self._used = self._problem, "", set()
        own = [table.grad for table in self.tables.tables]
        for each in arrived:  # in a pass that DDP takes for others, as in `join`, not what the table has
            if each.buffer.is_sparse:
                each.parameters[0].grad = each.buffer
        try:
            report = self.finish(problem, all_or_none=False)
            self.hear(self._agreement, report, self._token, problem)
            means = [self._mean(each) for each in arrived]
        finally:
            self.tables.put_back()
            for table, gradient in zip(self.tables.tables, own, strict=True):
                table.grad = gradient
        for each, mean in zip(arrived, means, strict=True):
            each.end(mean, None)
        return report

    @torch.no_grad()
    def _copied(self, number: int, came: dict[Tensor, Tensor]) -> Tensor:
        """The gradient of a bucket from the pieces that came; zeros where there is a problem, as pieces may be missing."""
        parameters = self._layout[number]
        if number not in self._copies:
            length, device = sum(parameter.numel() for parameter in parameters), parameters[0].device
            self._copies[number] = torch.empty(length, dtype=self._dtype, device=device)
        if not self._problem:
            with self.passed_on():
                return torch.cat([came[parameter] for parameter in parameters], out=self._copies[number])
        return self._copies[number].zero_()

    def _mean(self, bucket: DdpBucket) -> Tensor:
        if bucket.buffer.is_sparse:
            reduced = bucket.parameters[0].grad
            assert reduced is not None
            return reduced
        whole = self._wholes.get(_key(bucket.parameters))
        if whole is None:
            whole = torch.cat([self._updates[parameter] for parameter in bucket.parameters])
        return whole.to(bucket.buffer.dtype)

    def _check_order(self, bucket: DdpBucket) -> None:
        """Raise ValueError where DDP gives gradients in another order than it takes them back.

        It takes them back from a hook in the order of the parameters, and gives them in that of when it made its buckets; so do
        residuals.
        """
        new = [p for p in bucket.parameters if p.dim() > 1 and self._orders.get(p) != p.stride()]
        pieces = bucket.pieces if new else {}
        for parameter in new:
            strides, gradient, piece = parameter.stride(), parameter.grad, pieces[parameter]
            if gradient is None or not is_dense(parameter):
                continue
            there = piece.as_strided(parameter.size(), strides, piece.storage_offset())
            if parameter in self._orders or not torch.allclose(there, gradient, 0, 0, equal_nan=True):
                raise ValueError(
                    f"the parameter {self._names[parameter]!r} is laid out otherwise in memory than when DistributedDataParallel "
                    "was made: call model.to(memory_format=...) before"
                )
            self._orders[parameter] = strides

    def leave(self) -> None:
        """Undo a step of which DDP has not handed over all buckets. Every rank must call."""
        self._problem, self._running = "", False
        self._used = None  # gradients of that pass are kept, or not
        with self.before_torch():
            self.reducer.abandon()

    def _accumulated(self, parameter: Tensor) -> None:
        """Note a gradient, and look at the end of the pass whether DDP has handed it over."""
        if self._used is not None:
            self._used.add(parameter)
        if not self._running:
            self._running, self.came = True, False
            torch.autograd.Variable._execution_engine.queue_callback(self._pass_ended)

    def _pass_ended(self) -> None:
        self._running = False
        if self.came:
            return
        self._as_wrapped.look()
        if problem := self._as_wrapped.problem:
            raise RuntimeError(
                f"DistributedDataParallel reduces no gradient any more: {problem}, in a new DistributedDataParallel with a new "
                "OkTopkState"
            )

    def close(self) -> None:
        """Free what the library holds. Collective."""
        for hook in self._hooks:
            hook.remove()
        super().close()


def _pieces(parameters: Sequence[Tensor], vector: Tensor) -> dict[Tensor, Tensor]:
    """Of each parameter its part of a vector that has them one after the other."""
    sizes = [parameter.numel() for parameter in parameters]
    return dict(zip(parameters, vector.split(sizes), strict=True))


def _key(parameters: Sequence[Tensor]) -> tuple[int, ...]:
    """What tells a bucket of these parameters from others."""
    return tuple(map(id, parameters))
