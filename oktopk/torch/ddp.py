"""Ok-Topk as the communication hook of torch's DistributedDataParallel: buckets are reduced while the backward pass goes on."""

import copy
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from collectives.closing import closes
from collectives.connect import connect
from collectives.errors import EVERY_RANK_CALLS
from collectives.limit import Limit
from collectives.transport import Transport
from oktopk.buckets import BucketedAllreduce
from oktopk.damage import StateError, state_errors
from oktopk.elastic import check_redistributed, of_rank
from oktopk.results import StepReport
from oktopk.rows import RowReport
from oktopk.settings import Settings, check_names, timeout_of
from oktopk.torch.agreement import (
    check_types,
    reducer_of,
    register_reducer,
    rescaled_warning,
    unregister_reducer,
)
from oktopk.torch.alive import alive
from oktopk.torch.hooked import DdpBucket, HookEngine
from oktopk.torch.interop import memory_of
from oktopk.torch.optimizer import DistributedOptimizer
from oktopk.torch.states import as_arrays, as_tensors, by_rank
from oktopk.torch.tables import check_tables

_USE_ALL = "where ranks do not use every parameter in every step, pass find_unused_parameters=True to DistributedDataParallel"
_SAME_PASSES = f"Every rank must take the same number of backward passes outside no_sync; {_USE_ALL}"


class OkTopkState:
    """What `ddp_hook` keeps from step to step: a residual for every parameter, and a reducer for every bucket.

    DDP calls the hook for each bucket while the backward pass goes on. Each is reduced as it comes, and the hook waits for all
    when the last one has come. Under `no_sync` DDP does not call it, so that gradients of several batches are reduced together.

    The first step is dense, as with dense_warmup_steps=1: after it DDP lays out its buckets anew, in the order in which gradients
    came; with static_graph=True the first two are, as it does so after the second. The buckets and residuals
    of the reducer are made in the next step, once DDP's last bucket has come, and never move. After a
    load no step is dense for that. The buckets of the reducer are then those of the state, and
    gradients are copied where DDP has others.

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
        RuntimeError: at the end of the backward pass, with the text of what `BucketedAllreduce` raises, or of a ValueError where
            optimizers, parameters or states do not fit. Every rank raises a ValueError or NonFiniteGradientError alike. Then
            gradients are this rank's own, residuals are as before, at the latest in the next backward pass, and DDP can take
            that. After any other error no later step is reduced.

    Memory: n words of residual and n of update; n elements more where the reducer's buckets are not DDP's.
    Traffic: that of the method, for each bucket. In the first step, with static_graph=True in two, a dense allreduce: over
        messages 8n(P - 1)/P bytes a rank where P is a power of two, see `collectives.dense_allreduce.dense_words`.
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
        if settings.pop("sends", "gradients") != "gradients" or "every" in settings:
            raise ValueError(
                "the hook reduces gradients: for updates wrap the optimizer in DistributedOptimizer, and register noop_hook"
            )
        check_names(settings, OkTopkState, *beside)
        Settings(**{name: value for name, value in settings.items() if name not in beside})
        self._arguments: dict[str, Any] = {"method": method, **settings}
        self._given_comm = self._comm = comm
        self._module = module
        self._names: dict[Tensor, str] = {}
        self._orders: dict[Tensor, tuple[int, ...]] = {}  # of `HookEngine`
        self._engine: HookEngine | None = None
        self._dense_steps = 1  # after which DDP's buckets do not change any more
        self._settled = False  # these steps are over
        self._loaded: dict[str, Any] | None = None  # a state, until the next step
        self._goes_on = False  # a state was loaded
        self._report: StepReport | None = None
        self._arrived: list[DdpBucket] = []  # of the step that runs, or that was left
        self._failed: Exception | None = None  # why that step is not taken

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
        if self._engine is not None:
            self._engine.reducer.complete()

    @property
    def table_reports(self) -> dict[str, RowReport]:
        """The last step of each table with sparse gradients, by its name, after its backward pass."""
        return {} if self._engine is None else self._engine.tables.reports_by_name

    @property
    def reducer(self) -> BucketedAllreduce | None:
        """What reduces; None before the first step. Another one once DDP has new buckets."""
        return None if self._engine is None else self._engine.reducer

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to reduce a bucket of DDP's; with the last one end the step. Collective.

        DDP cannot go on after a hook that has raised: an error is kept until the last bucket has come, and all futures have it.

        Returns:
            A future of the mean over the ranks, laid out as the bucket's buffer. It is valid until the next step.
        """
        arrived = DdpBucket(bucket.parameters(), bucket.buffer())
        device = arrived.buffer.device
        if bucket.index() == 0:
            self._failed = None  # of a pass that left buckets out
            self._attempt(self._begin_step, device)
        self._arrived.append(arrived)
        if self._engine is not None:
            self._attempt(self._engine.add, arrived)
        if bucket.is_last():
            self._attempt(self._end_step, device)
            for each in self._arrived if self._failed is not None else ():
                each.end(each.buffer, self._failed)
            self._arrived, self._failed = [], None
        return arrived.mean

    def _attempt(self, call: Callable[[Any], None], argument: object) -> None:
        """Call it, unless the step has failed; keep its error."""
        if self._failed is None:
            try:
                call(argument)
            except Exception as error:
                self._failed = error

    def _begin_step(self, device: torch.device) -> None:
        if self._engine is not None:
            self._engine.came = True
        self._leave_step()
        self._names = self._names or self._parameter_names()
        if self._loaded is not None:
            self._set_up_loaded(self._loaded, device)
        elif self._engine is not None and not self._settled:
            self._settled = self._engine.reducer.steps >= self._dense_steps
            if self._settled:
                self._free()

    def _end_step(self, device: torch.device) -> None:
        """Wait for what is reduced, and give it to DDP. Collective."""
        if self._engine is None:  # now all of DDP's buckets are known
            dense = [bucket.parameters for bucket in self._arrived if not bucket.buffer.is_sparse]
            tables = [bucket.parameters[0] for bucket in self._arrived if bucket.buffer.is_sparse]
            engine = self._set_up(device, lambda: (dense, tables))
            for bucket in self._arrived:
                engine.add(bucket)
        else:
            engine = self._engine
            with engine.passed_on():
                self._check_parameters(engine)
        self._report = engine.end(self._arrived)

    def _check_parameters(self, engine: HookEngine) -> None:
        """Raise ValueError where DDP does not hand over the gradients that the reducer has."""
        came = dict.fromkeys(parameter for bucket in self._arrived for parameter in bucket.parameters)
        if added := [parameter for parameter in came if parameter not in engine.parameters]:
            self._found_ddp()  # raises where there are two
            raise ValueError(
                f"DDP reduces a parameter of shape {tuple(added[0].shape)} that it had not in earlier steps: after the model "
                "has changed, make a new DDP and a new OkTopkState"
            )
        if missing := [parameter for parameter in engine.parameters if parameter not in came]:
            raise ValueError(
                f"DDP does not reduce the parameter {self._names[missing[0]]!r} any more, which it did before or when the state "
                "was taken: make a new OkTopkState for a model whose parameters have changed"
            )

    def _check_all_came(self) -> None:
        """Raise RuntimeError where the last backward pass has ended without some buckets, or raised while some were reduced."""
        started = 0 if self._engine is None else self._engine.reducer.started
        if started and not self._arrived:
            raise RuntimeError(
                f"the last backward pass raised while {started} bucket(s) were reduced: take the next one, which undoes them, or "
                "load a state"
            )
        if self._arrived:  # other ranks may be waiting for them
            raise RuntimeError(
                f"the last backward pass reduced {started} bucket(s) and left the others out, as a parameter was not used in it, "
                f"or it raised: load a state of before it; {_USE_ALL}"
            )

    def _leave_step(self) -> None:
        """Undo what a backward pass has begun that did not end, if the last one did not. Every rank must call then."""
        if self._engine is not None and (self._arrived or self._engine.reducer.started):
            self._engine.leave()
        self._arrived = []

    def _set_up(
        self,
        device: torch.device,
        layout: Callable[[], tuple[list[list[Tensor]], list[Tensor]]],
        loading: bool = False,
    ) -> HookEngine:
        """Make what reduces. Collective.

        Args:
            layout: gives the parameters of each of the reducer's buckets, and the tables.
        """
        met = self._met("the first step of OkTopkState", _SAME_PASSES)
        with met as transport, transport.together(ValueError) as alike:
            # a rank without a state would reduce while the others load theirs
            alike["whether a state was loaded"] = loading
            buckets, tables = layout()
            alike["tables with sparse gradients"] = [self._names[table] for table in tables]
            dense = [parameter for parameters in buckets for parameter in parameters]
            check_types(dense)
            check_tables(tables, tables, self._arguments)
            if reducer_of([*dense, *tables], DistributedOptimizer) is not None:
                raise ValueError(
                    "a DistributedOptimizer reduces gradients of this DistributedDataParallel already: take the hook or the "
                    "DistributedOptimizer, and close() the other one"
                )
            memory = memory_of(device, beside=True)
        self._free()
        dense_steps = max(self._dense_steps, self._arguments.get("dense_warmup_steps", 0))
        options = self._arguments | {"dense_warmup_steps": dense_steps, "advice": _SAME_PASSES}
        self._engine = engine = HookEngine(
            self._comm, buckets, tables, self._names, memory, orders=self._orders, **options
        )
        register_reducer(self, [*dense, *tables])
        if self._settled:
            engine.renumber(self._dense_steps)
        elif engine.reducer.transport.rank == 0:
            self._warn(engine)
        return engine

    def _warn(self, engine: HookEngine) -> None:
        """Warn of what loses residuals or parts ranks."""
        optimizers, selects = engine.optimizers.look(), self._arguments["method"] != "dense"
        if any(optimizer.state for optimizer in optimizers) and selects and not self._goes_on:
            warnings.warn(
                "the optimizer has a state, as of a training that goes on, and OkTopkState has none: residuals start empty. Save "
                "OkTopkState.state_dict() on every rank, and load it before the first backward pass",
                stacklevel=2,
            )
        if warning := rescaled_warning(self._names):
            warnings.warn(warning, stacklevel=2)

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
        if self._engine is None or not self._settled:
            return by_rank({"buckets": [], "reducer": None, "tables": {}})
        names = [
            [self._names[parameter] for parameter in bucket] for bucket in self._engine.bucket_parameters
        ]
        reducer, tables = as_tensors(self._engine.reducer.state_dict()), self._engine.tables.state()
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
        if self._engine is not None and not self._arrived:
            self._engine.reducer.meet(what)
            yield self._engine.reducer.transport
            return
        limit = Limit(what, timeout_of(self._arguments), advice)
        with closing(connect(self._comm, limit)) as transport:
            yield transport

    def _check_state(self, state: object) -> tuple[list[list[str]], list[str]]:
        """The names of a state's parameters, by buckets, and of its tables.

        Raises:
            ValueError: it cannot be loaded, as far as is known so far.
        """
        check_redistributed(state)
        if not isinstance(state, dict) or not {"buckets", "reducer", "tables"} <= state.keys():
            raise StateError("the state is not one of OkTopkState.state_dict()")
        # not to be kept: they may be known before the DistributedDataParallel, whose group counts
        names = self._names
        with suppress(RuntimeError):  # there is neither yet
            names = names or self._parameter_names()
        with state_errors():
            buckets, tables = [list(names) for names in state["buckets"]], sorted(dict(state["tables"]))
            if state["reducer"] is None or not names:
                return buckets, tables
            layout, _ = _parameters_of(buckets, names), _parameters_of([tables], names)
            own = [sum(parameter.numel() for parameter in parameters) for parameters in layout]
            saved = as_arrays(state["reducer"])
            lengths = [saved["buckets"][str(number)]["length"] for number in range(len(saved["buckets"]))]
        if buckets and lengths != own:
            raise StateError(f"the state has buckets of {lengths} elements, their parameters have {own}")
        if self._engine is not None and own == self._engine.reducer.lengths:
            self._engine.reducer.check_state(saved)
        return buckets, tables

    def _set_up_loaded(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from a state. Collective."""
        self._goes_on, self._settled = True, state["reducer"] is not None
        if not self._settled:
            self._free()
            self._loaded = None
            return

        def layout() -> tuple[list[list[Tensor]], list[Tensor]]:
            buckets = _parameters_of(state["buckets"], self._names)
            return buckets, _parameters_of([state["tables"]], self._names)[0]

        self._set_up(device, layout, loading=True).load(state["reducer"], state["tables"])
        self._loaded = None  # else the next step says the same

    def _parameter_names(self) -> dict[Tensor, str]:
        """Of each parameter of the module its name; the DDP tells the ranks, too, and how many steps are dense."""
        ddp, module = self._found_ddp(), self._module
        if ddp is not None:
            module = module or ddp.module
            self._dense_steps = 2 if ddp.static_graph else 1
            _check_group(self._comm, ddp.process_group)
            self._comm = ddp.process_group if self._comm is None else self._comm
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
        if len(_with_state(self)) > 1:
            gc.collect()  # one that is not used any more may be in a cycle
        ddps = _with_state(self)
        if len(ddps) > 1:
            raise ValueError(
                f"{len(ddps)} DistributedDataParallel have one OkTopkState: register the hook with one of its own for each"
            )
        return ddps[0] if ddps else None

    def __getstate__(self) -> dict[str, Any]:
        """What can be saved: settings and `state_dict`. The communicator belongs to this process."""
        return {"arguments": self._arguments, "state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any], comm: Any = None, module: nn.Module | None = None) -> None:
        self.__init__(comm, module=module, **state["arguments"])  # type: ignore[misc]
        self.load_state_dict(state["state"])

    def __deepcopy__(self, memo: dict[int, Any]) -> "OkTopkState":
        if self._engine is not None:
            with self._met("deepcopy"):
                pass
        copied = type(self).__new__(type(self))
        state, module = copy.deepcopy((self.__getstate__(), self._module), memo)
        copied.__setstate__(state, self._given_comm, module)
        return copied

    @closes
    def close(self) -> None:
        """Free what the reducer holds, residuals too. Collective. A further backward pass raises RuntimeError."""
        self._leave_step()
        self._free()

    def _free(self) -> None:
        """Close what reduces, if there is anything. Collective."""
        if self._engine is not None:
            unregister_reducer(self)
            self._engine.close()
            self._engine = None


# register_comm_hook compares the annotations with its own types: this file must not import those of __future__, which are texts
def ddp_hook(state: OkTopkState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce a bucket of a DistributedDataParallel by Ok-Topk, for `register_comm_hook`; see `OkTopkState`."""
    try:
        return state.reduce(bucket)
    except RuntimeError as closed:  # DDP cannot go on after a hook that has raised
        arrived = DdpBucket(bucket.parameters(), bucket.buffer())
        arrived.end(arrived.buffer, closed)
        return arrived.mean


def _check_group(comm: Any, group: dist.ProcessGroup) -> None:
    """Raise ValueError where a communicator, if there is one, is seen not to be that of a DDP's process group."""
    ddp_ranks = dist.get_process_group_ranks(group)
    if isinstance(comm, dist.ProcessGroup):
        own = dist.get_process_group_ranks(comm)
        same, has = own == ddp_ranks, f"ranks {own}"
    else:
        size = getattr(comm, "size", len(ddp_ranks))  # what is no communicator is refused later
        same, has = size == len(ddp_ranks), f"{size} ranks"
    if not same:
        raise ValueError(
            f"OkTopkState has {has}, and its DistributedDataParallel reduces over ranks {ddp_ranks}: leave comm out, or pass the "
            "process_group of the DistributedDataParallel"
        )


def _parameters_of(names: Sequence[Sequence[str]], named: dict[Tensor, str]) -> list[list[Tensor]]:
    """The parameters of these names; named: the model's."""
    known = {name: parameter for parameter, name in named.items()}
    unknown = [name for bucket in names for name in bucket if name not in known]
    if unknown:
        raise StateError(f"the state has a parameter {unknown[0]!r}, and the model has none of this name")
    return [[known[name] for name in bucket] for bucket in names]


def _with_state(state: OkTopkState) -> list[DistributedDataParallel]:
    """The DDPs of this process that have a state."""
    ddps = alive(DistributedDataParallel)
    return [ddp for ddp in ddps if any(kept is state for _, kept in getattr(ddp, "_comm_hooks", ()))]
