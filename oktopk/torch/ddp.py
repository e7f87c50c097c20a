"""Ok-Topk as the communication hook of torch's DistributedDataParallel: buckets are reduced while the backward pass goes on."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from collectives.closing import closes
from collectives.connect import connect
from collectives.limit import Limit
from collectives.transport import EVERY_RANK_CALLS, Transport, refuse
from oktopk.buckets import BucketedAllreduce
from oktopk.elastic import of_rank, problem_of
from oktopk.results import StepReport
from oktopk.rows import RowReport
from oktopk.settings import Settings, settings_problem
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
from oktopk.torch.engine import Engine
from oktopk.torch.gradients import is_dense, missing_spans
from oktopk.torch.interop import TensorMemory, memory_of
from oktopk.torch.optimizer import DistributedOptimizer
from oktopk.torch.states import as_arrays, as_tensors, by_rank
from oktopk.torch.step_agreement import StepAgreement
from oktopk.torch.tables import SparseTables, tables_problem

_Layout = list[list[Tensor]]

_USE_ALL = "where ranks do not use every parameter in every step, pass find_unused_parameters=True to DistributedDataParallel"
_SAME_PASSES = f"Every rank must take the same number of backward passes outside no_sync; {_USE_ALL}"


class _Given:
    """A bucket of DDP's.

    Args:
        parameters: in the order in which their gradients lie in `buffer`.
        buffer: the gradients; of a table a sparse one.

    Attributes:
        done: set at the end of the step, to the mean over the ranks; then there may be an `error`.
    """

    def __init__(self, parameters: list[Tensor], buffer: Tensor) -> None:
        self.parameters, self.buffer = parameters, buffer
        self.error: Exception | None = None
        devices: list[Any] | None = [buffer.device] if buffer.is_cuda else None
        self.done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)

    def result(self, done: torch.futures.Future[Tensor]) -> Tensor:
        """The mean; raises the error where there is one."""
        if self.error is not None:
            raise self.error
        return done.value()


class OkTopkState:
    """What `ddp_hook` keeps from step to step: a residual for every parameter, and a reducer for every bucket.

    DDP calls the hook for each bucket while the backward pass goes on. Each is reduced as it comes, and the hook waits for all
    when the last one has come. Under `no_sync` DDP does not call it, so that gradients of several batches are reduced together.

    The first step is dense, as with dense_warmup_steps=1: after it DDP lays out its buckets anew, in the order in which gradients
    came; with static_graph=True the first two are, as it does so after the second. Buckets and residuals are made in the next
    step, once its last bucket has come, and never move. After a load no step is dense for that. The buckets are then those of the
    state, and gradients are copied where DDP has others.

    What is selected is the gradient as DDP gives it, times the scale of a `torch.amp.GradScaler`: take bfloat16, which has none.
    The hook does not reduce buffers such as batch-norm statistics; DDP itself broadcasts them.

    A table with sparse gradients (`torch.nn.Embedding(sparse=True)`) is reduced row by row, without loss, behind the buckets.
    Every rank must use it in every step: DDP itself asks for that.

    Args:
        comm: the ranks of the DDP; None: those of its process group.
        method: a name in `oktopk.METHODS`.
        module: whose parameters' names are the keys of the state; None: that of the DDP which has this state.
        settings: keywords of `oktopk.Settings`, and `peer_memory` of `GradientAllreduce`, for buckets and tables. With
            nonfinite="skip" a bucket that is not finite becomes zero on all ranks, and the others are reduced.

    Raises:
        ValueError: a setting is not known or out of range.
        RuntimeError: in the backward pass, on every rank alike, with the text of what `BucketedAllreduce` raises, or of a
            ValueError where the ranks' optimizers differ.

    Memory: n words of residual and n of update; n elements more where the reducer's buckets are not DDP's.
    Traffic: that of the method, for each bucket; of the first step that of a dense allreduce, 8n(P - 1)/P bytes a rank.
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
        chosen = Settings(**{name: value for name, value in settings.items() if name not in beside})
        self._of_tables: dict[str, Any] = {"nonfinite": chosen.nonfinite, "average": chosen.average}
        self._of_tables |= {"timeout": chosen.timeout, "peer_memory": settings.get("peer_memory")}
        self._arguments: dict[str, Any] = {"method": method, **settings}
        self._given_comm = self._comm = comm
        self._module = module
        self._names: dict[Tensor, str] = {}
        self._filler = torch.zeros(1)  # what the reducer has where all parameters are tables
        self._memory = TensorMemory()  # with a stream of its own on GPUs
        self._engine: Engine | None = None
        self._reducer: BucketedAllreduce | None = None
        self._layout: _Layout = []  # the parameters of the reducer's buckets
        self._expected: dict[Tensor, None] = {}  # these, and the tables
        self._updates: dict[Tensor, Tensor] = {}  # parameter -> its piece of its bucket's update
        self._copies: dict[int, Tensor] = {}  # bucket -> its gradient, where that is not a buffer of DDP's
        self._orders: dict[Tensor, tuple[int, ...]] = {}  # strides that DDP has been seen to keep to
        self._watch: _Watch | None = None
        self._dense_steps = 1  # after which DDP's buckets do not change any more
        self._settled = False  # these steps are over
        self._loaded: dict[str, Any] | None = None  # a state, until the next step
        self._goes_on = False  # a state was loaded
        self._report: StepReport | None = None
        self._given: list[_Given] = []  # of the step that runs, or that was left

    @property
    def report(self) -> StepReport | None:
        """The last step, after its backward pass; None before the first. Its `buckets` are those that were reduced.

        With `deferred` it may be incomplete until the next step begins, or `complete`.

        Raises:
            RuntimeError: the last backward pass left buckets out. Of one that left all out only DDP tells, in the next forward.
        """
        self._check_all_came()
        return self._report

    def complete(self) -> None:
        """Complete the report of the last step, where it was deferred, see `oktopk.GradientAllreduce.complete`.

        Raises:
            NonFiniteGradientError: of that step.
            RuntimeError: it left buckets out.
        """
        self._check_all_came()
        if self._reducer is not None:
            self._reducer.complete()

    @property
    def table_reports(self) -> dict[str, RowReport]:
        """The last step of each table with sparse gradients, by its name, after its backward pass."""
        return {} if self._engine is None else self._engine.tables.reports_by_name

    @property
    def reducer(self) -> BucketedAllreduce | None:
        """What reduces; None before the first step. Another one once DDP's buckets have changed."""
        return self._reducer

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to reduce a bucket of DDP's; with the last one end the step. Collective.

        Returns:
            A future of the mean over the ranks, as the bucket's buffer is laid out: valid until the next step.
        """
        given = _Given(bucket.parameters(), bucket.buffer())
        if bucket.index() == 0:
            self._begin_step(given.buffer.device)
        self._add(given)
        if bucket.is_last():
            if all(each.buffer.is_sparse for each in self._given):
                self._add(_Given([self._filler], torch.zeros(1, device=given.buffer.device)))
            self._end_step()
        reduced: torch.futures.Future[Tensor] = given.done.then(given.result)
        return reduced

    def _begin_step(self, device: torch.device) -> None:
        self._leave_step()
        if self._watch is not None:
            self._watch.came = True
        self._came: dict[Tensor, Tensor] = {}  # parameter -> its gradient in a buffer of DDP's
        self._problem = ""  # of this step, on this rank
        if not self._names:
            self._names = self._parameter_names()
        if self._engine is None:
            self._memory = memory_of(device, beside=True)
        if self._loaded is not None:
            self._set_up_loaded(self._loaded)
        elif self._reducer is not None and not self._settled and self._reducer.steps >= self._dense_steps:
            self._free()
            self._settled = True

    def _add(self, given: _Given) -> None:
        """Take a bucket of DDP's, and start the reducer's buckets that are complete now. Collective."""
        self._given.append(given)
        if self._reducer is None:
            return
        missing = [parameter for parameter in given.parameters if parameter not in self._expected]
        if missing:
            self._found_ddp()  # raises where there are two
            raise ValueError(
                f"DDP reduces a parameter of shape {tuple(missing[0].shape)} that it had not in earlier steps: after the model "
                "has changed, make a new DDP and a new OkTopkState"
            )
        if given.buffer.is_sparse:
            self._came[given.parameters[0]] = given.buffer
            return
        pieces = _pieces(given.parameters, given.buffer)
        self._came |= pieces
        self._problem = self._problem or self._order_problem(pieces)
        while (number := self._reducer.started) < len(self._layout):
            if not all(parameter in self._came for parameter in self._layout[number]):
                return
            self._start(number, self._reducer)

    def _order_problem(self, pieces: dict[Tensor, Tensor]) -> str:
        """Whether DDP gives gradients in another order than it takes them back, in a sentence; "" if it does not.

        It takes them back from a hook in the order of the parameters, and gives them in that of when it made its buckets; so do
        residuals.

        Args:
            pieces: of each parameter its gradient, as it lies in memory.
        """
        for parameter, piece in pieces.items():
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

    def _start(self, number: int, reducer: BucketedAllreduce) -> None:
        parameters = self._layout[number]
        assert self._watch is not None
        used = self._watch.used
        present = [p.grad is not None if used is None else p in used for p in parameters]
        absent = missing_spans([parameter.numel() for parameter in parameters], present)
        token = None
        if number == len(self._layout) - 1:
            self._optimizers.look()
            self._agreement.state = self._optimizers.state()
            token = self._agreement.tell()
        gradient, ready = self._memory.array(self._gradient(number)), self._memory.after_current()
        reducer.start(gradient, ready, absent=absent, problem=self._problem, token=token)

    def _gradient(self, number: int) -> Tensor:
        """The gradient of a bucket, where it lies if one of DDP's is the same, else copied."""
        parameters = self._layout[number]
        for given in self._given:
            if given.buffer.dtype == self._dtype and _key(given.parameters) == _key(parameters):
                self._copies.pop(number, None)
                return given.buffer
        if number not in self._copies:
            length = sum(parameter.numel() for parameter in parameters)
            self._copies[number] = torch.empty(length, dtype=self._dtype, device=self._given[0].buffer.device)
        pieces = _pieces(parameters, self._copies[number])
        torch._foreach_copy_(list(pieces.values()), [self._came[parameter] for parameter in parameters])
        return self._copies[number]

    def _end_step(self) -> None:
        """Wait for what is reduced, and give it to DDP. Collective."""
        given = self._given
        if self._engine is None:  # now all buckets are known
            dense = [each.parameters for each in given if not each.buffer.is_sparse]
            tables = [each.parameters[0] for each in given if each.buffer.is_sparse]
            self._set_up(lambda: (dense, tables))
            self._given = []
            for each in given:
                self._add(each)
        engine, reducer, watch = self._engine, self._reducer, self._watch
        assert engine is not None and reducer is not None and watch is not None
        if missing := [self._names[parameter] for parameter in self._expected if parameter not in self._came]:
            raise ValueError(
                f"DDP does not reduce the parameter {missing[0]!r} any more, which it did before or when the state was taken: "
                "make a new OkTopkState for a model whose parameters have changed"
            )
        watch.next_step()
        failed: Exception | None = None
        try:
            report = engine.finish(all_or_none=False)
            if not report.skipped:
                engine.hear(self._agreement, report)
            self._report = report
        except Exception as error:  # DDP raises it
            failed = error
        self._given = []
        for each in given:
            each.error = failed
            each.done.set_result(each.buffer if failed is not None else self._mean(each))
        engine.tables.put_back()

    def _mean(self, given: _Given) -> Tensor:
        """What DDP is to take for its bucket."""
        if given.buffer.is_sparse:
            reduced = given.parameters[0].grad
            assert reduced is not None
            return reduced
        whole = self._wholes.get(_key(given.parameters))
        if whole is None:
            whole = torch.cat([self._updates[parameter] for parameter in given.parameters])
        return whole.to(given.buffer.dtype)

    def _check_all_came(self) -> None:
        """Raise RuntimeError where the last backward pass has ended without some buckets: other ranks may be waiting for them."""
        if self._given:
            started = 0 if self._reducer is None else self._reducer.started
            raise RuntimeError(
                f"the last backward pass reduced {started} bucket(s) and left the others out, as a parameter was not used in it, "
                f"or it raised: load a state of before it; {_USE_ALL}"
            )

    def _leave_step(self) -> None:
        """Undo what a backward pass has begun that left buckets out, if the last one did. Every rank must call then."""
        if self._given and self._reducer is not None:
            with self._memory.before_torch():
                self._reducer.abandon()
        self._given = []

    def _set_up(self, layout: Callable[[], tuple[_Layout, list[Tensor]]], loading: bool = False) -> None:
        """Make the reducer of these buckets and tables. Collective."""
        met = self._met("the first step of OkTopkState", _SAME_PASSES)
        with met as transport, transport.together(ValueError) as alike:
            # a rank without a state would reduce while the others load theirs
            alike["whether a state was loaded"] = loading
            buckets, tables = layout()
            names = alike["tables with sparse gradients"] = [self._names[table] for table in tables]
            dense = [parameter for parameters in buckets for parameter in parameters]
            refuse(type_problem(dense) or tables_problem(tables, tables, {}))
            if reducer_of([*dense, *tables], DistributedOptimizer) is not None:
                raise ValueError(
                    "a DistributedOptimizer reduces gradients of this DistributedDataParallel already: take the hook or the "
                    "DistributedOptimizer, and close() the other one"
                )
        self._free()
        types = {parameter.dtype for parameter in dense}
        arguments = {"gradient_type": "float32", "dense_warmup_steps": 0, **self._arguments}
        if len(types) == 1 and self._memory.device != "cpu" and "gradient_type" not in self._arguments:
            arguments["gradient_type"] = TYPE_NAMES[types.pop()]
        arguments["dense_warmup_steps"] = max(self._dense_steps, arguments["dense_warmup_steps"])
        sizes = [sum(parameter.numel() for parameter in parameters) for parameters in buckets]
        place = {"device": self._memory.device, "stream": self._memory.stream, "advice": _SAME_PASSES}
        with ExitStack() as opened:  # closed where this raises
            reducer = BucketedAllreduce(self._comm, sizes, **place, **arguments)
            opened.callback(reducer.close)
            made = SparseTables(self._comm, tables, self._memory, names, **self._of_tables)
            opened.pop_all()
        self._reducer, self._engine = reducer, Engine(reducer, made, self._memory)
        register_reducer(self, dense)
        if self._settled:
            self._engine.renumber(self._dense_steps)
        self._dtype = GRADIENT_TYPES[arguments["gradient_type"]]
        self._layout, self._expected = buckets, dict.fromkeys([*dense, *tables])
        updates = list(map(self._memory.tensor, reducer.updates))
        self._wholes = {_key(parameters): update for parameters, update in zip(buckets, updates, strict=True)}
        for parameters, update in zip(buckets, updates, strict=True):
            self._updates |= _pieces(parameters, update)
        self._watch = _Watch([parameter for parameter in dense if parameter.requires_grad])
        self._look_around(warn=reducer.transport.rank == 0 and not self._settled)

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
        if self._loaded is not None:
            return by_rank(self._loaded)
        if self._engine is None or self._reducer is None or not self._settled:
            return by_rank({"buckets": [], "reducer": None, "tables": {}})
        names = [[self._names[parameter] for parameter in parameters] for parameters in self._layout]
        reducer, tables = as_tensors(self._reducer.state_dict()), self._engine.tables.state()
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
            alike |= {"whether a state is empty": state["reducer"] is None, "tables of the state": tables}
            alike["buckets of the state"] = (
                f"of {[*map(len, buckets)]} parameters, {crc32(repr(buckets).encode()):08x}"
            )
        self._leave_step()
        self._loaded = dict(state)

    @contextmanager
    def _met(self, what: str, advice: str = EVERY_RANK_CALLS) -> Iterator[Transport]:
        """A transport of all ranks, which begin this call: that of the reducer, where a step of the others waits. Collective."""
        if self._reducer is not None and not self._given:
            self._reducer.meet(what)
            yield self._reducer.transport
            return
        limit = Limit(what, self._of_tables["timeout"], advice)
        with closing(connect(self._comm, limit)) as transport:
            yield transport

    def _check_state(self, state: Any) -> tuple[list[list[str]], list[str]]:
        """The buckets and tables of a state; ValueError where it cannot be loaded, as far as is known so far."""
        refuse(problem_of(state))
        if not isinstance(state, dict) or not {"buckets", "reducer", "tables"} <= state.keys():
            raise ValueError("the state is not one of OkTopkState.state_dict()")
        try:
            buckets, tables = [list(names) for names in state["buckets"]], sorted(dict(state["tables"]))
            with suppress(RuntimeError):  # there is no DistributedDataParallel yet
                self._names = self._names or self._parameter_names()
            if state["reducer"] is not None and self._names:
                sizes = [sum(each.numel() for each in bucket) for bucket in self._found(buckets)]
                if self._reducer is not None and sizes == self._reducer.lengths:
                    refuse(self._reducer.state_problem(as_arrays(state["reducer"])))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"the state is damaged: {type(error).__name__} {error}") from error
        return buckets, tables

    def _set_up_loaded(self, state: dict[str, Any]) -> None:
        """Make the reducer as it was when a state was taken. Collective."""
        self._loaded, self._goes_on = None, True
        self._settled = state["reducer"] is not None
        if not self._settled:
            self._free()
            return
        self._set_up(lambda: (self._found(state["buckets"]), self._found([state["tables"]])[0]), loading=True)
        assert self._engine is not None
        self._engine.load(state["reducer"], state["tables"])

    def _found(self, names: Sequence[Sequence[str]]) -> _Layout:
        """The parameters of these names."""
        known = {name: parameter for parameter, name in self._names.items()}
        unknown = [name for bucket in names for name in bucket if name not in known]
        if unknown:
            raise ValueError(f"the state has a parameter {unknown[0]!r}, and the model has none of this name")
        return [[known[name] for name in bucket] for bucket in names]

    def _look_around(self, warn: bool) -> None:
        """Find the optimizers of these parameters; warn of what parts ranks or loses residuals."""
        every = list(self._names)
        self._optimizers = FoundOptimizers(every)
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
        if warning := rescaled_warning(every):
            warnings.warn(warning, stacklevel=2)

    def _parameter_names(self) -> dict[Tensor, str]:
        """Of each parameter of the module its name; the DDP tells the ranks, too, and how many steps are dense."""
        ddp, module = self._found_ddp(), self._module
        if ddp is not None:
            module = module or ddp.module
            self._dense_steps = 2 if ddp.static_graph else 1
            if self._comm is None:
                self._comm = ddp.process_group
            else:
                _check_group(self._comm, ddp.process_group)
        if module is None:
            raise RuntimeError(
                "no DistributedDataParallel was found that has this OkTopkState: pass OkTopkState(module=model)"
            )
        return {self._filler: ""} | {parameter: name for name, parameter in module.named_parameters()}

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
        return {"arguments": self._arguments, "state": self.state_dict()}

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
        self._leave_step()
        self._free()

    def _free(self) -> None:
        """Close reducer and tables, if there are any. Collective."""
        if self._engine is not None:
            unregister_reducer(self)
            self._engine.close()
        if self._watch is not None:
            self._watch.remove()
        self._engine = self._reducer = self._watch = None
        self._layout, self._expected, self._updates, self._wholes, self._copies = [], {}, {}, {}, {}


# register_comm_hook compares the annotations with its own types: this file must not import those of __future__, which are texts
def ddp_hook(state: OkTopkState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce a bucket of a DistributedDataParallel by Ok-Topk, for `register_comm_hook`; see `OkTopkState`."""
    return state.reduce(bucket)


class _Watch:
    """Which parameters the backward passes of a step have reached, and whether DDP has given their gradients.

    Args:
        parameters: of a DDP.

    Attributes:
        used: those that a gradient was accumulated for since the last step; None where that began before they were watched.
        came: DDP has begun to give buckets in the backward pass that runs, or ran last.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.used: set[Tensor] | None = None
        self.came = True
        self._as_wrapped = AsWrapped(parameters)
        self._running = False
        own = weakref.ref(self)
        self._hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(partial(_accumulated, own))
            for parameter in parameters
        ]

    def accumulated(self, parameter: Tensor) -> None:
        """Note a gradient, and look at the end of the pass whether it was given."""
        if self.used is not None:
            self.used.add(parameter)
        if not self._running:
            self._running, self.came = True, False
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def next_step(self) -> None:
        """All gradients of a step are there."""
        self.used = set()

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


def _key(parameters: Sequence[Tensor]) -> tuple[int, ...]:
    """What tells a bucket of these parameters from others."""
    return tuple(map(id, parameters))
