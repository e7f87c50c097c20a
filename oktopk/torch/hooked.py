"""What reduces the gradients of a DistributedDataParallel as it hands them over, in buckets that never move."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from collectives.connect import Communicator
from oktopk.buckets import BucketedAllreduce
from oktopk.results import StepReport
from oktopk.torch.agreement import FoundOptimizers, rescaled_warning
from oktopk.torch.as_wrapped import AsWrapped
from oktopk.torch.engine import Engine
from oktopk.torch.gradients import is_dense, missing_spans
from oktopk.torch.hooked_model import Layout
from oktopk.torch.interop import GRADIENT_TYPES, TYPE_NAMES, TensorMemory
from oktopk.torch.overlap import when_accumulated
from oktopk.torch.step_agreement import StepAgreement
from oktopk.torch.tables import SparseTables

USE_ALL = (
    "where ranks do not use every parameter in every step, pass find_unused_parameters=True to "
    "DistributedDataParallel"
)


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


class BackwardPass:
    """A backward pass of DDP's, from the first bucket that it hands over to the last one.

    DDP cannot go on after a hook that has raised: an error is kept until the last bucket has come, and all futures have it.

    Attributes:
        buckets: those that have come; emptied at its end. A pass that was left still has some.
    """

    def __init__(self) -> None:
        self.buckets: list[DdpBucket] = []
        self._error: Exception | None = None

    def attempt(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call it, unless the step has failed; keep its error."""
        if self._error is None:
            try:
                call(*arguments)
            except Exception as error:
                self._error = error

    def take(self, bucket: DdpBucket, engine: HookEngine | None) -> None:
        """Take the next bucket; where there is an engine, it begins to reduce it. Collective."""
        self.buckets.append(bucket)
        if engine is not None:
            self.attempt(engine.add, bucket)

    def layout(self) -> Layout:
        """As DDP has laid it out."""
        dense = [bucket.parameters for bucket in self.buckets if not bucket.buffer.is_sparse]
        tables = [bucket.parameters[0] for bucket in self.buckets if bucket.buffer.is_sparse]
        return Layout(dense, tables)

    def check_ended(self, engine: HookEngine | None) -> None:
        """Raise RuntimeError where this pass was left, or raised while some buckets were reduced."""
        started = 0 if engine is None else engine.reducer.started
        if started and not self.buckets:
            raise RuntimeError(
                f"the last backward pass raised while {started} bucket(s) were reduced: take the next one, which undoes them, or "
                "load a state"
            )
        if self.buckets:  # other ranks may be waiting for them
            raise RuntimeError(
                f"the last backward pass reduced {started} bucket(s) and left the others out, as a parameter was not used in it, "
                f"or it raised: load a state of before it; {USE_ALL}"
            )

    def end(self) -> None:
        """Give DDP the error, where there is one, in place of each mean; forget the buckets."""
        for bucket in self.buckets if self._error is not None else ():
            bucket.end(bucket.buffer, self._error)
        self.buckets, self._error = [], None


class HookEngine(Engine):
    """Reduces gradients as a DDP hands them over, and tables behind them.

    While DDP's buckets have the parameters of the reducer's, each is reduced as it comes, where it
    lies. From the first that has others on, buckets are copied, and start when all have come.

    Args:
        comm, method, options: as `BucketedAllreduce`. Collective.
        layout: of the reducer, with one element of its own where this has no bucket. DDP has each
            table alone in a bucket.
        names: of all parameters.
        memory: of all.
        orders: strides that DDP has been seen to keep to, of parameters; filled here.

    Attributes:
        layout: as given.
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
        layout: Layout,
        names: dict[Tensor, str],
        memory: TensorMemory,
        *,
        method: str,
        orders: dict[Tensor, tuple[int, ...]],
        **options: Any,
    ) -> None:
        self.layout, self._names, self._memory = layout, names, memory
        self._own: list[Tensor] = []
        if not layout.buckets:
            self._own.append(nn.Parameter(torch.zeros(1, device=layout.tables[0].device)))
        reduced = layout if layout.buckets else Layout([self._own], [])
        self._buckets, every = reduced.buckets, reduced.dense
        types = {parameter.dtype for parameter in every}
        if len(types) == 1 and memory.device != "cpu":
            options = {"gradient_type": TYPE_NAMES[types.pop()]} | options
        with ExitStack() as opened:  # closed where this raises
            place: dict[str, Any] = {"device": memory.device, "stream": memory.stream}
            reducer = BucketedAllreduce(comm, reduced.lengths, method, **place, **options)
            opened.callback(reducer.close)
            peer_memory, named = options.get("peer_memory"), [names[each] for each in layout.tables]
            sparse = SparseTables(comm, layout.tables, memory, reducer.settings, peer_memory, named)
            super().__init__(reducer, sparse, memory)
            opened.pop_all()
        self.parameters = dict.fromkeys([*layout.dense, *layout.tables])
        self._dtype = GRADIENT_TYPES[options.get("gradient_type", "float32")]
        updates = list(map(memory.tensor, reducer.updates))
        self._wholes: dict[tuple[int, ...], Tensor] = {}
        self._updates: dict[Tensor, Tensor] = {}
        for parameters, update in zip(self._buckets, updates, strict=True):
            self._wholes[_key(parameters)] = update
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

    def warn(self, goes_on: bool) -> None:
        """Warn of what loses residuals or parts ranks.

        Args:
            goes_on: a state was loaded before.
        """
        optimizers, selects = self.optimizers.look(), self.reducer.method != "dense"
        if any(optimizer.state for optimizer in optimizers) and selects and not goes_on:
            warnings.warn(
                "the optimizer has a state, as of a training that goes on, and OkTopkState has none: residuals start empty. Save "
                "OkTopkState.state_dict() on every rank, and load it before the first backward pass",
                stacklevel=2,
            )
        if warning := rescaled_warning(self._names):
            warnings.warn(warning, stacklevel=2)

    def add(self, bucket: DdpBucket) -> None:
        """Take a bucket of DDP's, and start the reducer's next one if that is the same. Collective."""
        if bucket.buffer.is_sparse:
            return
        number = self.reducer.started
        with self._passed_on():
            self._check_order(bucket)
        with self._passed_on():
            ours = number < len(self._buckets) and bucket.buffer.dtype == self._dtype
            if ours and _key(bucket.parameters) == _key(self._buckets[number]):
                self._copies.pop(number, None)
                self._start(number, bucket.buffer)

    @contextmanager
    def _passed_on(self) -> Iterator[None]:
        """Let an error of the `with` block, on this rank, be the problem of the step, which every rank raises in `end`."""
        try:
            yield
        except Exception as error:
            self._problem = self._problem or str(error) or type(error).__name__

    def _start(self, number: int, gradient: Tensor) -> None:
        parameters, used, token = self._buckets[number], self._used, None
        present = [p.grad is not None if used is None else p in used for p in parameters]
        absent = missing_spans([parameter.numel() for parameter in parameters], present)
        if number == len(self._buckets) - 1:
            self.optimizers.look()
            self._agreement.state = self.optimizers.state()
            token = self._token = self._agreement.tell()
        array = self._memory.array(gradient)
        self.reducer.start(array, self.ready(), absent=absent, problem=self._problem, token=token)

    def end(self, arrived: Sequence[DdpBucket], check_one: Callable[[], object]) -> StepReport:
        """Start the other buckets, wait for all, and give DDP the means. Collective.

        Args:
            arrived: all of DDP's, which were added.
            check_one: raises ValueError where two DDPs hand over buckets.

        Raises:
            NonFiniteGradientError, ValueError, RuntimeError: as `Engine.finish` and `Engine.hear`; nothing is applied.
        """
        with self._passed_on():
            self._check_came(arrived, check_one)
        rest = range(self.reducer.started, len(self._buckets))
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
        parameters = self._buckets[number]
        if number not in self._copies:
            length, device = sum(parameter.numel() for parameter in parameters), parameters[0].device
            self._copies[number] = torch.empty(length, dtype=self._dtype, device=device)
        if not self._problem:
            with self._passed_on():
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

    def _check_came(self, arrived: Sequence[DdpBucket], check_one: Callable[[], object]) -> None:
        """Raise ValueError where DDP does not hand over the gradients that the reducer has."""
        came = dict.fromkeys(parameter for bucket in arrived for parameter in bucket.parameters)
        if added := [parameter for parameter in came if parameter not in self.parameters]:
            check_one()
            raise ValueError(
                f"DDP reduces a parameter of shape {tuple(added[0].shape)} that it had not in earlier steps: after the model "
                "has changed, make a new DDP and a new OkTopkState"
            )
        if missing := [parameter for parameter in self.parameters if parameter not in came]:
            raise ValueError(
                f"DDP does not reduce the parameter {self._names[missing[0]]!r} any more, which it did before or when the state "
                "was taken: make a new OkTopkState for a model whose parameters have changed"
            )

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

    def leave(self, left: BackwardPass) -> None:
        """Undo a pass, if DDP has not handed over all its buckets. Every rank must call then."""
        if not (left.buckets or self.reducer.started):
            return
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
