"""Ok-Topk as the communication hook of torch's DistributedDataParallel: buckets are reduced while the backward pass goes on."""

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from collectives.closing import announce, closes
from collectives.connect import connect
from collectives.limit import Limit
from collectives.transport import EVERY_RANK_CALLS, Transport, refuse
from oktopk.buckets import TOGETHER, BucketedAllreduce
from oktopk.elastic import of_rank, problem_of
from oktopk.results import StepReport
from oktopk.rows import RowReport, RowSparseAllreduce
from oktopk.settings import Settings, settings_problem
from oktopk.step import Spans
from oktopk.torch.agreement import (
    GRADIENT_TYPES,
    TYPE_NAMES,
    FoundOptimizers,
    reducer_of,
    register_reducer,
    rescaled_warning,
    type_problem,
    unregister_reducer,
)
from oktopk.torch.as_wrapped import AsWrapped
from oktopk.torch.gradients import is_dense, missing_spans
from oktopk.torch.interop import TensorMemory, memory_of
from oktopk.torch.optimizer import DistributedOptimizer
from oktopk.torch.states import as_arrays, as_tensors, by_rank
from oktopk.torch.step_agreement import StepAgreement
from oktopk.torch.tables import gradient_of, rows_of, tables_problem
from oktopk.worker import CommunicationThread

_Layout = list[list[Tensor]]

_USE_ALL = "where ranks do not use every parameter in every step, pass find_unused_parameters=True to DistributedDataParallel"
_SAME_PASSES = f"Every rank must take the same number of backward passes outside no_sync; {_USE_ALL}"


class _Given:
    """A bucket of DDP's, whose gradients are to become the mean over the ranks.

    Args:
        bucket: as the hook gets it.

    Attributes:
        parameters: in the order in which their gradients lie in `buffer`.
        buffer: the gradients; of a table a sparse one.
        pieces: of each parameter its gradient in `buffer`, as it lies in memory; once there is a reducer.
        waits_for: the reducer's buckets that hold some of its parameters and are not reduced yet.
        done: set once the buffer is filled, or there is an `error`.
    """

    def __init__(self, bucket: GradBucket) -> None:
        self.parameters = bucket.parameters()
        self.buffer = bucket.buffer()
        self.pieces: dict[Tensor, Tensor] = {}
        self.waits_for: set[int] = set()
        self.error: BaseException | None = None
        devices: list[Any] | None = [self.buffer.device] if self.buffer.is_cuda else None
        self.done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)

    def result(self, done: torch.futures.Future[Tensor]) -> Tensor:
        """The reduced buffer; raises the error where there is one."""
        if self.error is not None:
            raise self.error
        return done.value()


class OkTopkState:
    """What `ddp_hook` keeps from step to step: a residual for every parameter, and a reducer for every bucket.

    DDP calls the hook for each bucket while the backward pass goes on, and waits for all at its end. Under `no_sync` it does not,
    so that the gradients of several batches are reduced together.

    The first step is dense, as with dense_warmup_steps=1: after it DDP lays out its buckets anew, in the order in which gradients
    came; with static_graph=True the first two are, as it does so after the second. In the next step all are reduced once the last
    one has come, from then on each as it comes. After a load no step is dense for that. The buckets are then those of the state,
    and gradients are copied where DDP has others.

    What is selected is the gradient as DDP gives it, times the scale of a `torch.amp.GradScaler`: take bfloat16, which has none.
    The hook does not reduce buffers such as batch-norm statistics; DDP itself broadcasts them.

    A table with sparse gradients (`torch.nn.Embedding(sparse=True)`) is reduced row by row, without loss, in a thread.
    Every rank must use it in every step: DDP itself asks for that.

    Args:
        comm: the ranks of the DDP; None: those of its process group.
        method: a name in `oktopk.METHODS`.
        module: whose parameters' names are the keys of the state; None: that of the DDP which has this state.
        settings: keywords of `oktopk.Settings`, and `peer_memory` of `GradientAllreduce`, for buckets and tables. With
            nonfinite="skip" a bucket that is not finite becomes zero on all ranks, and the others are reduced.

    Raises:
        ValueError: a setting is not known or out of range.
        RuntimeError: in the backward pass, on every rank alike, with the text of what `BucketedAllreduce` raises.

    Memory: n words of residual and n of update; n elements more where the reducer's buckets are not DDP's.
    Traffic: that of the method, for each bucket.
    Source: Li & Hoefler, PPoPP 2022, algorithm 2.

    Example:
        >>> ddp = DistributedDataParallel(model)
        >>> ddp.register_comm_hook(OkTopkState(density=0.01), ddp_hook)
    """

    def __init__(
        self,
        comm: Any = None,
        method: str = "oktopk",
        *,
        module: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        beside = "gradient_type", "peer_memory"  # which the reducer takes
        refuse(settings_problem(settings, OkTopkState, *beside))
        self._given_comm = comm
        chosen = Settings(**{name: value for name, value in settings.items() if name not in beside})
        self._arguments: dict[str, Any] = {"comm": comm, "method": method, **settings}
        self._of_tables: dict[str, Any] = {"nonfinite": chosen.nonfinite, "average": chosen.average}
        self._of_tables |= {"timeout": chosen.timeout, "peer_memory": settings.get("peer_memory")}
        self._tables: dict[str, RowSparseAllreduce] = {}  # by the parameter's name
        self._table_reports: dict[str, Future[RowReport]] = {}  # of the last step
        self._reducing_tables: dict[str, Future[RowReport]] = {}  # of a step that was not finished
        self._loaded_tables: dict[str, Any] = {}  # states of tables that were not reduced since
        self._thread: CommunicationThread | None = None  # of the tables
        self._module = module
        self._names: dict[Tensor, str] = {}
        self._device: torch.device | None = None  # of buckets, known from the first one on
        self._memory = self._table_memory = TensorMemory()  # each with a stream of its own on GPUs
        self._reducer: BucketedAllreduce | None = None
        self._layout: _Layout = []  # the parameters of the reducer's buckets
        self._numbers: dict[Tensor, int] = {}  # parameter -> its bucket
        self._updates: dict[Tensor, Tensor] = {}  # parameter -> its piece of that bucket's update
        self._copies: dict[int, Tensor] = {}  # bucket -> its gradient, where that is not a buffer of DDP's
        self._orders: dict[Tensor, tuple[int, ...]] = {}  # strides that DDP has been seen to keep to
        self._watch: _Watch | None = None
        self._optimizers: FoundOptimizers | None = None
        self._agreement = StepAgreement(list)
        self._loaded: dict[str, Any] | None = None
        self._dense_steps = 1  # after which DDP's buckets do not change any more
        self._settled = False  # these steps are over
        self._goes_on = False  # from a state of these steps, which is empty
        self._report: StepReport | None = None
        self._given: list[_Given] = []  # of this step
        self._came: dict[Tensor, Tensor] = {}  # parameter -> its gradient in a buffer of DDP's, in this step
        self._lock = threading.Lock()  # of what the communication thread changes, too: `_Given.waits_for`

    @property
    def report(self) -> StepReport | None:
        """The last step, after its backward pass; None before the first. Its `buckets` are those that were reduced.

        With `deferred` it may be incomplete until the next step begins, or `complete`.

        Raises:
            RuntimeError: the last backward pass left buckets out. Of one that left all out only DDP tells, in the next forward.
        """
        self._check_all_came()
        self._finish_step()
        return self._report

    def complete(self) -> None:
        """Complete the report of the last step, where it was deferred, see `oktopk.GradientAllreduce.complete`.

        Raises:
            NonFiniteGradientError: of that step.
            RuntimeError: it left buckets out.
        """
        self._check_all_came()
        self._finish_step()
        if self._reducer is not None:
            self._reducer.complete()

    @property
    def table_reports(self) -> dict[str, RowReport]:
        """The last step of each table with sparse gradients, by its name, after its backward pass."""
        return {name: future.result() for name, future in self._table_reports.items()}

    @property
    def reducer(self) -> BucketedAllreduce | None:
        """What reduces; None before the first step. Another one once DDP's buckets have changed."""
        if not self._left_out:
            self._finish_step()
        return self._reducer

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to reduce a bucket of DDP's. Collective.

        Returns:
            A future of the bucket's buffer, which then holds the mean over the ranks.
        """
        if bucket.index() == 0:
            self._begin_step(bucket.buffer().device)
        given = _Given(bucket)
        if given.buffer.is_sparse:
            self._reduce_table(given)
        else:
            self._given.append(given)
            if self._reducer is not None:
                self._add(given)
        if bucket.is_last() and self._given:
            if self._reducer is None:  # now all buckets are known
                for future in self._reducing_tables.values():  # in another thread than the buckets will be
                    error = future.exception()  # waits
                    if error is not None and not isinstance(error, TOGETHER):
                        raise error
                self._set_up(lambda: [each.parameters for each in self._given])
                for each in self._given:
                    self._add(each)
            self._check_complete()
            assert self._reducer is not None
            self._reducer.end_started()
            if self._watch is not None:
                self._watch.next_step()
        reduced: torch.futures.Future[Tensor] = given.done.then(given.result)
        return reduced

    def _reduce_table(self, given: _Given) -> None:
        """Begin to reduce a sparse gradient, which is alone in its bucket. Collective."""
        (table,) = given.parameters
        name, gradient = self._names[table], given.buffer
        if name not in self._tables:
            problem = tables_problem([table], [table], {})
            kind = "float32" if problem else TYPE_NAMES[table.dtype]
            self._tables[name] = RowSparseAllreduce(
                self._arguments["comm"],
                *table.shape,
                element_type=kind,
                device=self._memory.device,
                stream=self._table_memory.stream,
                problem=problem,
                **self._of_tables,
            )
            transport = self._tables[name].transport
            # a rank without a state would reduce while the others load theirs
            transport.agree(
                {"whether a state was loaded": name in self._loaded_tables}, transport.threads_problem
            )
        reducer = self._tables[name]
        if name in self._loaded_tables:
            reducer.load_state_dict(as_arrays(self._loaded_tables.pop(name)))
        memory = self._table_memory
        filled = memory.after_current()

        def reduce() -> RowReport:
            if filled is not None:
                filled(memory.stream)
            with memory.on_stream():
                report = reducer.step(*rows_of(gradient, table, memory))
                given.buffer = gradient_of(reducer.sum, table, memory)
            return report

        def reduced(future: Future[RowReport]) -> None:
            given.error = future.exception()
            with memory.on_stream():
                given.done.set_result(given.buffer)

        self._table_reports[name] = self._reducing_tables[name] = self._submit_table(reduce)
        self._table_reports[name].add_done_callback(reduced)

    def _submit_table(self, reduce: Callable[[], RowReport]) -> Future[RowReport]:
        """Run it in the buckets' first thread; where those are put on the stream, or are not known, in one of its own."""
        if self._reducer is not None and not self._reducer.can_read_tensors:
            return self._reducer.submit(reduce)
        if self._thread is None:
            self._thread = CommunicationThread("oktopk tables", together=TOGETHER)
        return self._thread.submit(reduce)

    def _begin_step(self, device: torch.device) -> None:
        self._finish_step()
        if self._watch is not None:
            self._watch.came = True
        if self._reducer is not None:
            earlier = self._report is not None and not self._report.complete  # it was deferred
            self._agreement.hear(self._reducer.tokens, self._reducer.transport, earlier)
        self._given, self._came, self._table_reports = [], {}, {}
        self._problem = ""  # of this step, on this rank
        self._names = self._names or self._parameter_names()
        if self._device is None:
            self._device = device
            self._memory, self._table_memory = memory_of(device, beside=True), memory_of(device, beside=True)
        if self._loaded is not None:
            self._set_up_loaded(self._loaded)
        elif self._reducer is not None and not self._settled and self._reducer.steps >= self._dense_steps:
            self._drop_reducer()
            self._settled = True

    def _check_complete(self) -> None:
        """Raise ValueError where a parameter of the reducer's buckets was in none of DDP's: futures would wait for ever."""
        missing = [self._names[parameter] for parameter in self._numbers if parameter not in self._came]
        if missing:
            raise ValueError(
                f"DDP does not reduce the parameter {missing[0]!r} any more, which it did before or when the state was taken: "
                "make a new OkTopkState for a model whose parameters have changed"
            )

    def _add(self, given: _Given) -> None:
        """Put a bucket's gradients where the reducer's buckets have them, and start those that are complete."""
        assert self._reducer is not None
        missing = [parameter for parameter in given.parameters if parameter not in self._numbers]
        if missing:
            self._found_ddp()  # raises where there are two
            raise ValueError(
                f"DDP reduces a parameter of shape {tuple(missing[0].shape)} that it had not in earlier steps: after the model "
                "has changed, make a new DDP and a new OkTopkState"
            )
        given.waits_for = {self._numbers[parameter] for parameter in given.parameters}
        given.pieces = _pieces(given.parameters, given.buffer)
        self._came |= given.pieces
        self._problem = self._problem or self._order_problem(given)
        while (number := self._reducer.started) < len(self._layout):
            if not all(parameter in self._came for parameter in self._layout[number]):
                return
            self._start(number)

    def _order_problem(self, given: _Given) -> str:
        """Whether DDP gives gradients in another order than it takes them back, in a sentence; "" if it does not.

        It takes them back from a hook in the order of the parameters, and gives them in that of when it made its buckets; so do
        residuals.
        """
        for parameter, piece in given.pieces.items():
            strides = parameter.stride()
            if self._orders.get(parameter) == strides or parameter.dim() < 2:
                continue
            gradient = parameter.grad
            if gradient is None or not is_dense(parameter):
                continue
            there = piece.as_strided(parameter.size(), strides, piece.storage_offset())
            if parameter in self._orders or not torch.allclose(there, gradient, 0, 0, equal_nan=True):
                return (
                    f"the parameter {self._names[parameter]!r} is laid out otherwise in memory than when DistributedDataParallel "
                    "was made: call model.to(memory_format=...) before"
                )
            self._orders[parameter] = strides
        return ""

    def _start(self, number: int) -> None:
        assert self._reducer is not None
        waiting = [given for given in self._given if number in given.waits_for]
        beside: dict[str, Any] = {"absent": self._unused(self._layout[number]), "problem": self._problem}
        if number == len(self._layout) - 1:
            assert self._optimizers is not None
            self._optimizers.look()
            self._agreement.state = self._optimizers.state()
            beside["token"] = self._agreement.tell()
        vector = self._memory.array(self._vector(number, waiting[0]))
        future = self._reducer.start(vector, self._memory.after_current(), **beside)
        future.add_done_callback(partial(self._reduced, number, waiting))

    def _vector(self, number: int, given: _Given) -> Tensor:
        """The gradient of a bucket, where it lies if one of DDP's is the same, else copied."""
        parameters = self._layout[number]
        if given.buffer.dtype == self._dtype and _same([given.parameters], [parameters]):
            self._copies.pop(number, None)
            return given.buffer
        if number not in self._copies:
            length = sum(parameter.numel() for parameter in parameters)
            self._copies[number] = torch.empty(length, dtype=self._dtype, device=given.buffer.device)
        pieces = _pieces(parameters, self._copies[number])
        torch._foreach_copy_(list(pieces.values()), [self._came[parameter] for parameter in parameters])
        return self._copies[number]

    def _reduced(self, number: int, waiting: Sequence[_Given], future: Future[StepReport]) -> None:
        """Fill the buffers that waited for a bucket, which is reduced, and for no other one."""
        for given in waiting:
            with self._lock:
                given.waits_for.discard(number)
                given.error = given.error or future.exception()
                last = not given.waits_for
            if last:
                try:
                    self._fill(given)
                except Exception as error:  # DDP raises it; in this thread nobody would
                    given.error = given.error or error
                    given.done.set_result(given.buffer)

    def _fill(self, given: _Given) -> None:
        with self._memory.on_stream():
            if given.error is None:
                for parameter, piece in given.pieces.items():
                    piece.copy_(self._updates[parameter])
            given.done.set_result(given.buffer)

    def _unused(self, parameters: Sequence[Tensor]) -> Spans:
        """Where in a bucket no backward pass of this step has left a gradient on this rank."""
        watch = self._watch
        if watch is not None and watch.whole:
            used = [parameter in watch.used for parameter in parameters]
        else:
            used = [parameter.grad is not None for parameter in parameters]
        return missing_spans([parameter.numel() for parameter in parameters], used)

    def _check_all_came(self) -> None:
        """Raise RuntimeError where the last backward pass has ended without some buckets: other ranks may be waiting for them."""
        if self._left_out:
            started = 0 if self._reducer is None else self._reducer.started
            raise RuntimeError(
                f"the last backward pass reduced {started} bucket(s) and left the others out, as a parameter was not used in it, "
                f"or it raised: load a state of before it; {_USE_ALL}"
            )

    @property
    def _left_out(self) -> bool:
        """Whether the last backward pass, or the one that runs, has not started all buckets."""
        return bool(self._given) and (self._reducer is None or self._reducer.started < len(self._layout))

    def _finish_step(self) -> None:
        """Take the report of a step whose backward pass has ended. Talks to no other rank."""
        tables, self._reducing_tables = self._reducing_tables, {}
        failed = {name for name, future in tables.items() if future.exception() is not None}  # waits
        holds = not failed
        if self._reducer is not None and self._given:
            ended = holds and not self._left_out
            self._given = []
            try:
                if ended:
                    self._report = self._reducer.finish(all_or_none=False)
            except Exception:  # the backward pass has raised it
                holds = False
            if not ended:
                holds = False
                with self._memory.before_torch():
                    self._reducer.abandon()
        if not holds:
            for name in tables.keys() - failed:
                self._tables[name].take_back()

    def _set_up(self, layout: Callable[[], _Layout], loading: bool = False) -> None:
        """Make the reducer of these buckets, where there is none of them. Collective."""
        met = self._met("the first step of OkTopkState", _SAME_PASSES)
        with met as transport, transport.together(ValueError) as alike:
            # a rank without a state would reduce while the others load theirs
            alike["whether a state was loaded"] = loading
            buckets = layout()
            every = [parameter for parameters in buckets for parameter in parameters]
            refuse(type_problem(every))
            if reducer_of(every, DistributedOptimizer) is not None:
                raise ValueError(
                    "a DistributedOptimizer reduces gradients of this DistributedDataParallel already: take the hook or the "
                    "DistributedOptimizer, and close() the other one"
                )
        if self._reducer is not None:
            if _same(buckets, self._layout):
                return
            self._drop_reducer()
        types = {parameter.dtype for parameter in every}
        gradient_type = "float32"
        if len(types) == 1 and self._memory.device != "cpu":
            gradient_type = TYPE_NAMES[types.pop()]
        arguments = {"gradient_type": gradient_type, **self._arguments}
        warmup = self._arguments.get("dense_warmup_steps", 0)
        arguments["dense_warmup_steps"] = max(self._dense_steps, warmup)
        self._reducer = reducer = BucketedAllreduce(
            arguments.pop("comm"),
            [sum(parameter.numel() for parameter in parameters) for parameters in buckets],
            device=self._memory.device,
            stream=self._memory.stream,
            advice=_SAME_PASSES,
            **arguments,
        )
        register_reducer(self, every)
        self._look_around(every, warn=reducer.transport.rank == 0 and not (self._settled or loading))
        for bucket in reducer.buckets if self._settled else ():
            bucket.renumber(self._dense_steps, 0)
        self._dtype = GRADIENT_TYPES[arguments["gradient_type"]]
        self._layout = buckets
        for number, (parameters, update) in enumerate(zip(buckets, reducer.updates, strict=True)):
            self._numbers |= dict.fromkeys(parameters, number)
            self._updates |= _pieces(parameters, self._memory.tensor(update))

    def _drop_reducer(self) -> None:
        """Close the reducer, if there is one. Collective."""
        if self._reducer is not None:
            unregister_reducer(self)
            self._reducer.close()
        self._reducer, self._layout, self._numbers, self._updates, self._copies = None, [], {}, {}, {}

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on, copied: tensors, numbers and parameters' names, under a key with this rank.

        While the first steps are dense it is that of before them, and a training that continues begins with them once more.

        Every rank saves its own, or all together by `torch.distributed.checkpoint`, which takes this object; see
        `oktopk.elastic.redistribute` for another number of ranks, and `oktopk.elastic.of_rank` for what lies under the key.

        Raises:
            NonFiniteGradientError, RuntimeError: as `GradientAllreduce.state_dict`, and where the last backward pass left buckets
                out.
        """
        self._check_all_came()
        self._finish_step()
        if self._loaded is not None:
            return by_rank(self._loaded)
        tables = {name: as_tensors(table.state_dict()) for name, table in self._tables.items()}
        tables |= self._loaded_tables
        if self._reducer is None or not self._settled:
            return by_rank({"buckets": [], "reducer": None, "tables": tables})
        names = [[self._names[parameter] for parameter in parameters] for parameters in self._layout]
        reducer = as_tensors(self._reducer.state_dict())
        return by_rank({"buckets": names, "reducer": reducer, "tables": tables})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where this rank's `state_dict` was taken, from the next backward pass on. Collective.

        Bit for bit, but for a state of the first dense steps, which is empty: see `state_dict`.

        Raises:
            ValueError: it is not a state of this class, or not of these parameters; on every rank alike, and nothing has changed.
                What can be seen in the next backward pass alone is raised there, on every rank alike.
        """
        state = of_rank(state)
        with self._met("OkTopkState.load_state_dict") as transport, transport.together(ValueError) as alike:
            buckets, tables = self._check_state(state)
            alike |= {
                "whether a state is empty": state["reducer"] is None,
                "tables of the state": sorted(tables),
            }
            alike["buckets of the state"] = (
                f"of {[*map(len, buckets)]} parameters, {crc32(repr(buckets).encode()):08x}"
            )
        self._finish_step()
        self._given = []
        self._loaded = dict(state)
        self._loaded_tables = tables
        for table in self._tables.values():
            table.reset()

    @contextmanager
    def _met(self, what: str, advice: str = EVERY_RANK_CALLS) -> Iterator[Transport]:
        """A transport of all ranks, which begin this call: that of the reducer, where a step of the others waits. Collective."""
        if self._reducer is not None and not self._left_out:
            self._finish_step()
            self._reducer.meet(what)
            yield self._reducer.transport
            return
        limit = Limit(what, self._of_tables["timeout"], advice)
        with closing(connect(self._arguments["comm"], limit)) as transport:
            yield transport

    def _check_state(self, state: Any) -> tuple[list[list[str]], dict[str, Any]]:
        """The buckets and tables of a state; ValueError where it cannot be loaded, as far as is known so far."""
        refuse(problem_of(state))
        if not isinstance(state, dict) or not {"buckets", "reducer", "tables"} <= state.keys():
            raise ValueError("the state is not one of OkTopkState.state_dict()")
        try:
            buckets, tables = [list(names) for names in state["buckets"]], dict(state["tables"])
            if state["reducer"] is None:
                return buckets, tables
            with suppress(RuntimeError):  # there is no DistributedDataParallel yet
                self._names = self._names or self._parameter_names()
            if not self._names:
                return buckets, tables
            layout, held = self._found(state["buckets"]), as_arrays(state["reducer"])
            own = [sum(parameter.numel() for parameter in parameters) for parameters in layout]
            theirs = [held["buckets"][str(number)]["length"] for number in range(len(held["buckets"]))]
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"the state is damaged: {type(error).__name__} {error}") from error
        if theirs != own:
            raise ValueError(f"the state has buckets of {theirs} elements, their parameters have {own}")
        if self._reducer is not None and own == self._reducer.lengths:
            refuse(self._reducer.state_problem(held))
        return buckets, tables

    def _set_up_loaded(self, state: dict[str, Any]) -> None:
        """Make the reducer as it was when a state was taken. Collective."""
        self._loaded = None
        self._goes_on = state["reducer"] is None
        if self._goes_on:
            self._free()
            return
        self._set_up(lambda: self._found(state["buckets"]), loading=True)
        assert self._reducer is not None
        self._reducer.load_state_dict(as_arrays(state["reducer"]))
        self._settled = True

    def _found(self, names: Sequence[Sequence[str]]) -> _Layout:
        """The parameters of these names."""
        known = {name: parameter for parameter, name in self._names.items()}
        unknown = [name for bucket in names for name in bucket if name not in known]
        if unknown:
            raise ValueError(f"the state has a parameter {unknown[0]!r}, and the model has none of this name")
        return [[known[name] for name in bucket] for bucket in names]

    def _look_around(self, parameters: Sequence[Tensor], warn: bool) -> None:
        """Find the optimizers of these parameters; warn of what parts ranks or loses residuals."""
        if self._watch is None:
            self._watch = _Watch([parameter for parameter in parameters if parameter.requires_grad])
        whole = list(self._names)  # with the tables
        self._optimizers = self._optimizers or FoundOptimizers(whole)
        found = self._optimizers.look()
        self._agreement = StepAgreement(self._optimizers.groups, renew=self._optimizers.state_found_anew)
        if not warn:
            return
        selects = self._arguments["method"] != "dense"
        if any(optimizer.state for optimizer in found) and selects and not self._goes_on:
            warnings.warn(
                "the optimizer has a state, as of a training that goes on, and OkTopkState has none: residuals start empty. Save "
                "OkTopkState.state_dict() on every rank, and load it before the first backward pass",
                stacklevel=2,
            )
        if warning := rescaled_warning(whole):
            warnings.warn(warning, stacklevel=2)

    def _parameter_names(self) -> dict[Tensor, str]:
        ddp, module = self._found_ddp(), self._module
        if ddp is not None:
            module = module or ddp.module
            self._dense_steps = 2 if ddp.static_graph else 1
            group = ddp.process_group
            if self._arguments["comm"] is None:
                self._arguments["comm"] = group
            else:
                _check_group(self._arguments["comm"], group)
        if module is None:
            raise RuntimeError(
                "no DistributedDataParallel was found that has this OkTopkState: pass OkTopkState(module=model)"
            )
        return {parameter: name for name, parameter in module.named_parameters()}

    def _found_ddp(self) -> DistributedDataParallel | None:
        """The DDP that has this state; None where none is found.

        Raises:
            ValueError: several have it.
        """
        found = _with_state(self)
        if len(found) > 1:
            found = []
            gc.collect()  # one that is not used any more may be in a cycle
            found = _with_state(self)
        if len(found) > 1:
            raise ValueError(
                f"{len(found)} DistributedDataParallel have one OkTopkState: register the hook with one of its own for each"
            )
        return found[0] if found else None

    def __getstate__(self) -> dict[str, Any]:
        """What can be saved: settings and `state_dict`. The communicator belongs to this process."""
        return {
            "arguments": {name: value for name, value in self._arguments.items() if name != "comm"},
            "state": self.state_dict(),
        }

    def __setstate__(self, state: dict[str, Any], comm: Any = None, module: nn.Module | None = None) -> None:
        self.__init__(  # type: ignore[misc]
            comm, module=module, **state["arguments"]
        )
        self.load_state_dict(state["state"])

    def __deepcopy__(self, memo: dict[int, Any]) -> "OkTopkState":
        if self._reducer is not None:
            with self._met("deepcopy"):
                pass
        copied = type(self).__new__(type(self))
        module = None if self._module is None else copy.deepcopy(self._module, memo)
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo), self._given_comm, module)
        return copied

    @closes
    def close(self) -> None:
        """Free what the reducer holds, residuals too. Collective. A further backward pass raises RuntimeError."""
        self._free()

    def _free(self) -> None:
        self._finish_step()
        self._given, self._settled = [], False
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        reducers = [] if self._reducer is None else self._reducer.transports
        announce([*reducers, *(table.transport for table in self._tables.values())])
        for table in self._tables.values():
            table.close()
        self._tables, self._table_reports = {}, {}
        self._drop_reducer()
        if self._watch is not None:
            self._watch.remove()
            self._watch = None


# register_comm_hook compares the annotations with its own types: this file must not import those of __future__, which are texts
def ddp_hook(state: OkTopkState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce a bucket of a DistributedDataParallel by Ok-Topk, for `register_comm_hook`; see `OkTopkState`."""
    return state.reduce(bucket)


class _Watch:
    """Which parameters the backward passes of a step have reached, and whether DDP has given their gradients.

    Args:
        parameters: of a DDP.

    Attributes:
        used: those that a gradient was accumulated for since the last step.
        whole: this step has begun since they are watched.
        came: DDP has begun to give buckets in the backward pass that runs, or ran last.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.used: set[Tensor] = set()
        self.came, self.whole = True, False
        self._as_wrapped = AsWrapped(parameters)
        self._running = False
        own = weakref.ref(self)
        self._hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(partial(_accumulated, own))
            for parameter in parameters
        ]

    def accumulated(self, parameter: Tensor) -> None:
        """Note a gradient, and look at the end of the pass whether it was given."""
        self.used.add(parameter)
        if not self._running:
            self._running, self.came = True, False
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def next_step(self) -> None:
        """All gradients of a step are there."""
        self.used.clear()
        self.whole = True

    def _ended(self) -> None:
        self._running = False
        if self.came:
            return
        self._as_wrapped.look()
        if problem := self._as_wrapped.problem:
            raise RuntimeError(
                f"DistributedDataParallel reduces no gradient any more: {problem}, in a new DistributedDataParallel with a new "
                "OkTopkState"
            )

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()


def _accumulated(watch: weakref.ref[_Watch], parameter: Tensor) -> None:
    if (own := watch()) is not None:
        own.accumulated(parameter)


def _check_group(comm: Any, group: dist.ProcessGroup) -> None:
    """Raise ValueError where a communicator is seen not to be that of a DDP's process group."""
    theirs = dist.get_process_group_ranks(group)
    if isinstance(comm, dist.ProcessGroup):
        own = dist.get_process_group_ranks(comm)
        same, has = own == theirs, f"ranks {own}"
    else:
        size = getattr(comm, "size", len(theirs))  # what is no communicator is refused later
        same, has = size == len(theirs), f"{size} ranks"
    if not same:
        raise ValueError(
            f"OkTopkState has {has}, and its DistributedDataParallel reduces over ranks {theirs}: leave comm out, or pass the "
            "process_group of the DistributedDataParallel"
        )


def _with_state(state: OkTopkState) -> list[DistributedDataParallel]:
    """The DDPs of this process that have a state."""
    ddps = [held for held in gc.get_objects() if issubclass(type(held), DistributedDataParallel)]
    return [ddp for ddp in ddps if any(held is state for _, held in getattr(ddp, "_comm_hooks", ()))]


def _pieces(parameters: Sequence[Tensor], vector: Tensor) -> dict[Tensor, Tensor]:
    """Of each parameter its part of a vector that has them one after the other."""
    sizes = [parameter.numel() for parameter in parameters]
    return dict(zip(parameters, vector.split(sizes), strict=True))


def _same(one: Iterable[Sequence[Tensor]], other: Iterable[Sequence[Tensor]]) -> bool:
    """Whether two layouts are of the same parameters in the same order."""
    return [list(map(id, parameters)) for parameters in one] == [list(map(id, p)) for p in other]
