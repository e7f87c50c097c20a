"""Ok-Topk as the communication hook of torch's DistributedDataParallel: buckets are reduced while the backward pass goes on."""

import copy
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket

from collectives.closing import closes
from collectives.connect import connect
from collectives.errors import EVERY_RANK_CALLS
from collectives.limit import Limit
from collectives.transport import Transport
from oktopk.buckets import BucketedAllreduce
from oktopk.elastic import of_rank
from oktopk.results import StepReport
from oktopk.rows import RowReport
from oktopk.settings import Settings, check_names, timeout_of
from oktopk.torch.agreement import register_reducer, unregister_reducer
from oktopk.torch.hooked import USE_ALL, BackwardPass, DdpBucket, HookEngine
from oktopk.torch.hooked_model import HookedModel, ddp_of, names_in
from oktopk.torch.interop import memory_of
from oktopk.torch.states import as_tensors, by_rank

_SAME_PASSES = f"Every rank must take the same number of backward passes outside no_sync; {USE_ALL}"


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
        self._model = HookedModel({}, comm, 1)  # not known yet
        self._orders: dict[Tensor, tuple[int, ...]] = {}  # of `HookEngine`
        self._engine: HookEngine | None = None
        self._settled = False  # the steps are over after which DDP changes its buckets
        self._loaded: dict[str, Any] | None = None  # a state, until the next step
        self._goes_on = False  # a state was loaded
        self._report: StepReport | None = None
        self._pass = BackwardPass()  # that runs, or that was left; an empty one between passes

    @property
    def report(self) -> StepReport | None:
        """The last step, after its backward pass; None before the first. Its `buckets` are those that were reduced.

        With `deferred` it may be incomplete until the next step begins, or `complete`.

        Raises:
            RuntimeError: the last backward pass left buckets out. Of one that left all out only DDP tells, in the next forward.
        """
        self._pass.check_ended(self._engine)
        return self._report

    def complete(self) -> None:
        """Complete the report of the last step, where it was deferred, see `oktopk.GradientAllreduce.complete`.

        Raises:
            NonFiniteGradientError: of that step.
            RuntimeError: it left buckets out.
        """
        self._pass.check_ended(self._engine)
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

        Returns:
            A future of the mean over the ranks, laid out as the bucket's buffer. It is valid until the next step.
        """
        arrived = DdpBucket(bucket.parameters(), bucket.buffer())
        device = arrived.buffer.device
        if bucket.index() == 0:
            left, self._pass = self._pass, BackwardPass()
            self._pass.attempt(self._begin_step, left, device)
        self._pass.take(arrived, self._engine)
        if bucket.is_last():
            self._pass.attempt(self._end_step, device)
            self._pass.end()
        return arrived.mean

    def _begin_step(self, left: BackwardPass, device: torch.device) -> None:
        """Undo the last pass, if it was left. Go on from a state, if one was loaded."""
        if self._engine is not None:
            self._engine.came = True
            self._engine.leave(left)
        self._model = self._model_of_ddp()
        if (state := self._loaded) is not None:
            self._goes_on, self._settled = True, state["reducer"] is not None
            if self._settled:
                self._set_up(device).load(state["reducer"], state["tables"])
            else:
                self._free()
            self._loaded = None  # else the next step says the same
        elif self._engine is not None and not self._settled:
            self._settled = self._engine.reducer.steps >= self._model.dense_steps
            if self._settled:
                self._free()

    def _end_step(self, device: torch.device) -> None:
        """Wait for what is reduced, and give it to DDP. Collective."""
        buckets, engine = self._pass.buckets, self._engine
        if engine is None:  # now all of DDP's buckets are known
            engine = self._set_up(device)
            for bucket in buckets:
                engine.add(bucket)
        self._report = engine.end(buckets, partial(ddp_of, self))

    def _leave_step(self) -> None:
        """Undo what a backward pass has begun that did not end, if the last one did not. Every rank must call then."""
        if self._engine is not None:
            self._engine.leave(self._pass)
        self._pass = BackwardPass()

    def _set_up(self, device: torch.device) -> HookEngine:
        """Make what reduces, as a loaded state or the pass that runs is laid out. Collective."""
        names, dense_steps, state = self._model.names, self._model.dense_steps, self._loaded
        met = self._met("the first step of OkTopkState", _SAME_PASSES)
        with met as transport, transport.together(ValueError) as alike:
            # a rank without a state would reduce while the others load theirs
            alike["whether a state was loaded"] = state is not None
            layout = self._pass.layout() if state is None else self._model.layout_of(state)
            alike["tables with sparse gradients"] = [names[table] for table in layout.tables]
            layout.check(self._arguments)
            memory = memory_of(device, beside=True)
        self._free()
        first = max(dense_steps, self._arguments.get("dense_warmup_steps", 0))
        options = self._arguments | {"dense_warmup_steps": first, "advice": _SAME_PASSES}
        options["orders"] = self._orders
        self._engine = engine = HookEngine(self._comm, layout, names, memory, **options)
        register_reducer(self, [*layout.dense, *layout.tables])
        if self._settled:
            engine.renumber(dense_steps)
        elif engine.reducer.transport.rank == 0:
            engine.warn(goes_on=self._goes_on)
        return engine

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on, copied: tensors, numbers and parameters' names, under a key with this rank.

        While the first steps are dense it is that of before them, and a training that continues begins with them once more.

        Every rank saves its own, or all together by `torch.distributed.checkpoint`, which takes this object; see
        `oktopk.elastic.redistribute` for another number of ranks, and `oktopk.elastic.of_rank` for what lies under the key.

        Raises:
            NonFiniteGradientError, RuntimeError: as `GradientAllreduce.state_dict`, and where the last backward pass left buckets
                out.
        """
        self._pass.check_ended(self._engine)
        if self._loaded is not None:
            return by_rank(self._loaded)
        if self._engine is None or not self._settled:
            return by_rank({"buckets": [], "reducer": None, "tables": {}})
        known = self._model.names
        names = [[known[each] for each in bucket] for bucket in self._engine.layout.buckets]
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
            model = self._model
            with suppress(RuntimeError):  # there is neither a module nor a DDP yet
                # not to be kept: the module may be known before the DDP, whose group counts
                model = self._model_of_ddp()
            buckets, tables = names_in(state, model, self.reducer)
            alike |= {"whether a state is empty": state["reducer"] is None, "tables of the state": tables}
            alike["buckets of the state"] = (
                f"of {[*map(len, buckets)]} parameters, {crc32(repr(buckets).encode()):08x}"
            )
        self._leave_step()
        self._loaded = dict(state)

    @contextmanager
    def _met(self, what: str, advice: str = EVERY_RANK_CALLS) -> Iterator[Transport]:
        """A transport of all ranks, which begin this call: that of the reducer, where a step of the others waits. Collective."""
        if self._engine is not None and not self._pass.buckets:
            self._engine.reducer.meet(what)
            yield self._engine.reducer.transport
            return
        limit = Limit(what, timeout_of(self._arguments), advice)
        with closing(connect(self._comm, limit)) as transport:
            yield transport

    def _model_of_ddp(self) -> HookedModel:
        """The model, once it is known; its ranks are then this object's."""
        model = self._model if self._model.names else HookedModel.of(self, self._comm, self._module)
        self._comm = model.communicator
        return model

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
