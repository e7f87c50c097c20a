"""What `DistributedOptimizer` is around any torch optimizer, whether gradients are sent or updates."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from collectives.closing import closes
from collectives.connect import Communicator, communicator, connect
from collectives.errors import refuse
from collectives.limit import Limit
from oktopk.allreduce import GradientAllreduce
from oktopk.results import StepReport
from oktopk.rows import RowReport
from oktopk.settings import Settings, check_names, plain, timeout_of
from oktopk.torch.agreement import (
    check_reduced_once,
    check_wrapping,
    compared,
    register_reducer,
    replaced_warning,
    rescaled_warning,
    unregister_reducer,
)
from oktopk.torch.arguments import check_numbers, default_method, default_sends, default_start, refused
from oktopk.torch.auto import OPEN, check_auto, wanted_of
from oktopk.torch.engine import Engine
from oktopk.torch.interop import TYPE_NAMES, TensorMemory, memory_of
from oktopk.torch.local_step import may_only_set_up
from oktopk.torch.modules import broadcast_tensors
from oktopk.torch.overlap import BackwardBuckets, check_buckets
from oktopk.torch.replica import Replica
from oktopk.torch.saved_optimizer import SavedOptimizer
from oktopk.torch.sharded_replica import ShardedReplica
from oktopk.torch.shards import check_shards
from oktopk.torch.step_agreement import numbers_of
from oktopk.torch.tables import SparseTables, check_tables
from oktopk.torch.trained import TrainedParameters

if TYPE_CHECKING:
    from collectives.host_transport import HostTransport
    from oktopk.plan.choice import Wanted

# Without itself passed, torch gives copies of found_inf, and this rank's scaler could not learn of another rank's Inf.
warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)


class DistributedOptimizer(SavedOptimizer):
    """Sums what the ranks' optimizers need: their gradients, or, around AdamW, what their optimizers changed.

    What it makes is an `oktopk.torch.gradients_optimizer.GradientsOptimizer`, or by default of optimizers with `betas` an
    `oktopk.torch.updates.UpdatesOptimizer`; each says what a step does. Of both:

    Learning-rate schedulers take either this optimizer or the wrapped one, and `torch.amp.GradScaler` this one. Each step
    compares the parameters with what they were: other values and another memory format are gone on with. The ranks compare the
    numbers of the groups, by a checksum in the step's messages.

    Every rank must take the same number of steps. Where batches are unevenly many, take the fewest of any rank
    (`comm.allreduce(len(loader), MPI.MIN)`), or step with a gradient of zero where none is left: `zero_grad()`, then `step()`.
    `torch.distributed.algorithms.Join` is not supported. After `timeout` seconds the others raise and name the missing ranks.
    The buffers of the model, such as batch-norm statistics, are not reduced: see `average_buffers`.

    A table with sparse gradients (`torch.nn.Embedding(sparse=True)`) is reduced row by row, without loss, and the wrapped
    optimizer sees a coalesced sparse gradient. It is no part of the flat vector, of n, or of k.

    Parameters on a GPU share their memory and torch's current stream with the reducer: nothing is copied to the host.

    Args:
        optimizer: the torch optimizer that owns the parameters: all on one device (the CPU, or the current GPU), all float32,
            bfloat16 or float16, each dense in memory.
        comm: as `GradientAllreduce` takes it. Collective: every rank must construct, with the same model and settings. Of
            parameters that `fully_shard` made the ranks that hold this rank's shards, `mesh["replicate"].get_group()`.
        method: a name in `oktopk.METHODS`; None: "oktopk" for gradients, and for updates of 5 % and more that are exchanged in
            each step. For others "union", which loses less there and goes over messages, within a host too.
        gradient_type: of what is selected and reduced, "float32", "bfloat16" or "float16"; "" is that of the parameters. The
            CPU takes float32 only. bfloat16 gradients of float32 parameters halve what selection reads, and their rounding
            is not fed back.
        clip_norm: scale what the wrapped optimizer sees down to this Euclidean norm; 0 for never. It is the norm of the reduced
            gradient, equal on all ranks, not of what one rank computed; with updates that of the replica's own gradient.
        broadcast: where parameters have other values than on rank 0, replace them by rank 0's, and warn there; False: refuse.
            Frozen parameters and buffers are neither compared nor replaced: see `broadcast_parameters`.
        overlap: reduce gradients in buckets while the backward pass goes on, each when its last gradient is there: on a GPU on a
            stream of its own, and in threads where messages carry it; `step` waits for what is left, with `deferred` only the
            stream does. Put all backward passes of a step but the last into `no_sync`, and change no gradient before `step`. Not
            for a GradScaler or `measure`.
        bucket_mb: size of a bucket, in 1e6 bytes of float32; 0: one vector without `overlap`; with it 25, on
            GPUs 240. The same buckets give the same bits with `overlap` and without.
        order: for buckets, the parameters in the order in which the model uses them, such as `model.parameters()`, whatever else
            is among them; None: with several groups that of the smallest module which holds them all, else that of the groups.
        sparse: the parameters with sparse gradients; None: the weights of all modules that make such.
        sends: "gradients": the ranks sum gradients, then each wrapped optimizer steps on the mean. "updates": each wrapped
            optimizer steps on its rank's own gradient, and the ranks sum what it changed; see
            `oktopk.torch.updates.UpdatesOptimizer`. None: updates for optimizers with `betas` (Adam, AdamW,
            Lion), which do not train well on sparse gradients; gradients for all others, for SparseAdam, and where steps are
            dense.
        every: steps between two exchanges of updates, >= 1. "auto", with `settings` and `compute_ms`: 1, or 4 where steps are
            predicted to be a fifth shorter by that, which may cost loss; a `method` of None is "union" then.
        local_share: with updates the share of its residual that a replica's own parameters hold, in [0, 1]; None: its ranks over
            all ranks, as much as its updates count once they are applied; at most 0.05 with Adam's kind,
            `every` of 1 and several replicas, of more than 4 at most 0.1 over the root of their number; up to 4 it
            grows as the learning rate falls, to six times as much, and begins five times as large where the density begins
            with 25 %: see `LocalShare`.
        residual_decay: with updates, how fast a residual forgets, >= 0: after t exchanges what joined it before exchange s counts
            ((s + 29) / (t + 29))^residual_decay of itself. 0: nothing is lost. None: 2 with Adam's kind, `every` of 1 and several
            replicas, else 0.
        replica: with updates, what steps on a gradient of its own. "rank": each rank. "host": the ranks of a host together, on
            the mean of their gradients. "summed": the same, where gradients are equal inside a host already. "auto": "host" where
            there are several hosts with several ranks each, else "rank".
        settings: "auto": measure the links between hosts for at most 2 s, and take what is predicted to be fastest of the wires
            "plain" and "float32", of the exchanges, and of gradients of the levels, where you give none: see
            `oktopk.plan.choice.choose`. `chosen` says what and why. Density, and what you give, stay; nothing is rounded. A state
            that is loaded goes on with its own wire and exchange, and of gradients, before the first step, with its own levels.
            None: the defaults.
        compute_ms: milliseconds of a dense step on one rank, optimizer included, without communication, for every="auto".
        keywords: those of `oktopk.Settings`. Where updates of Adam's kind are exchanged in each step, and you say nothing of the
            first steps, `density_warmup_steps` is 100, with up to 1e9 elements: the density falls from 25 %.

    Raises:
        RuntimeError: a launcher started several processes, and MPI has only this one; the message says how to start them.
        TypeError: a class that is derived from this one, and not from one of those two.
        ValueError: parameters that are not as said, a setting out of range, ranks that disagree (on the optimizer's state too),
            or a GPU or an MPI that cannot be used; on every rank alike.
        MissingRanksError: as `GradientAllreduce`.

    Memory and traffic: as the class of what is sent says.
    Source: Li & Hoefler, PPoPP 2022, algorithm 2.

    Example:
        >>> optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), MPI.COMM_WORLD, density=0.01)
        >>> optimizer.zero_grad()
        >>> loss(model(x), y).backward()
        >>> optimizer.step()
        >>> words = optimizer.report.words
    """

    _step_supports_amp_scaling = True  # so that GradScaler.step calls `step` where it found an Inf, too

    report: StepReport | None = None
    """The last step: what was selected, sent and timed; None before the first one."""

    _called = "DistributedOptimizer"
    # by what they send; `oktopk.torch.kinds` has all
    _kinds: ClassVar[dict[str, type[DistributedOptimizer]]] = {}
    _sends = ""  # what the class sends; "" for this one, whose objects are of another
    _update: Tensor  # of the reducer
    _applied: Tensor  # of gradients the update in the parameters' type; of updates `_update` itself
    _open: Sequence[str] = ()  # settings that settings="auto" chose
    _hosts: Sequence[int] = ()  # of the ranks, where it chose

    def __init_subclass__(cls, sends: str = "", **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if sends:
            cls._sends = sends
            DistributedOptimizer._kinds[sends] = cls

    def __new__(
        cls,
        optimizer: Any = None,
        comm: Communicator | None = None,
        method: str | None = None,
        *,
        sends: str | None = None,
        **keywords: Any,
    ) -> Any:
        if cls is not DistributedOptimizer:
            if not cls._sends:
                kinds = " or ".join(sorted(kind.__name__ for kind in cls._kinds.values()))
                raise TypeError(
                    f"{cls.__name__} is derived from DistributedOptimizer: derive it from {kinds}"
                )
            return super().__new__(cls)
        sends = sends or default_sends(optimizer, method, keywords.get("density"))
        # the class for gradients refuses another `sends`
        return super().__new__(cls._kinds.get(sends, cls._kinds["gradients"]))

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        comm: Communicator | None = None,
        method: str | None = None,
        *,
        gradient_type: str = "",
        clip_norm: float = 0.0,
        broadcast: bool = True,
        overlap: bool = False,
        bucket_mb: float = 0.0,
        order: Iterable[Tensor] | None = None,
        sparse: Sequence[Tensor] | None = None,
        sends: str | None = None,
        every: int | str = 1,
        local_share: float | None = None,
        residual_decay: float | None = None,
        replica: str = "auto",
        settings: str | None = None,
        compute_ms: float | None = None,
        **keywords: Any,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}, not a torch optimizer")
        comm = communicator(comm)
        super().__init__(optimizer)
        order = None if order is None else list(order)
        parameters = TrainedParameters(optimizer, overlap or bool(bucket_mb), order, sparse)
        self._wrapped, self._parameters = parameters, parameters.dense
        trained, tables = parameters.all, parameters.tables
        shards = ShardedReplica.of(trained, timeout_of(keywords))
        if shards is not None:
            self._parameters, tables = shards.tensors, []
        if tables and not self._parameters:  # the reducer then has this one
            self._parameters = [torch.zeros(1, dtype=tables[0].dtype, device=tables[0].device)]
        self._replica = Replica(self._parameters) if shards is None else shards
        self.length = sum(p.numel() for p in self._parameters)
        self.clip_norm = clip_norm
        if method is None:
            method = default_method(self._sends, plain(keywords.get("density", Settings.density)), every)
        keywords |= default_start(optimizer, self._sends, every, self.length, keywords)
        unsaid, sends = sends is None, self._sends if sends is None else sends
        own = {"overlap": overlap, "bucket_mb": bucket_mb, "sends": sends, "every": every}
        own |= {"comm": comm, "method": method, "gradient_type": gradient_type, "clip_norm": clip_norm}
        own |= {"broadcast": broadcast, "local_share": local_share, "residual_decay": residual_decay}
        own |= {"replica": replica, "settings": settings, "compute_ms": compute_ms}
        self._arguments: dict[str, Any] = own | keywords
        limit = Limit("DistributedOptimizer(...)", timeout_of(keywords))
        wanted: Wanted | None = None
        with ExitStack() as opened:  # closed where this raises
            with self._replica.together(limit.what), closing(connect(comm, limit)) as transport:
                with transport.together(ValueError) as anywhere, self._replica.agree(limit.what) as alike:
                    check_names(keywords, DistributedOptimizer, "peer_memory")
                    if isinstance(optimizer, DistributedOptimizer):
                        raise ValueError("the optimizer is a DistributedOptimizer already: wrap it once")
                    self._check_sends(sends)
                    check_auto(settings, every, compute_ms, sends)
                    check_numbers(sends, 1 if every == "auto" else every, local_share, residual_decay)
                    check_shards(trained, sends, replica, parameters.named, keywords.get("levels", "auto"))
                    problem = refused(sends, self._arguments, optimizer, bool(tables))
                    if problem and unsaid and not tables:  # of tables it says so already
                        problem += (
                            f"; by default {type(optimizer).__name__} sends updates: leave it out, or pass "
                            "sends='gradients'"
                        )
                    refuse(problem)
                    check_reduced_once(optimizer, trained)
                    own_parameters = trained if shards is None else self._parameters
                    check_wrapping(optimizer, own_parameters, clip_norm)
                    check_tables(parameters.named, trained, keywords)
                    check_buckets(overlap, bucket_mb, order is not None)
                    if parameters.lacking:
                        raise ValueError(
                            f"order lacks {parameters.lacking} of the parameters that need a gradient"
                        )
                    kind = TYPE_NAMES[self._parameters[0].dtype] if sends == "gradients" else "float32"
                    self._arguments["gradient_type"] = gradient_type = gradient_type or kind
                    memory = memory_of(self._parameters[0].device, beside=overlap)
                    alike |= self._arguments | {"comm": None, "groups": numbers_of(optimizer.param_groups)}
                    # before the reducer compares methods, which by default follow from `every`
                    named_alike = "sends", "clip_norm", "broadcast", "every", "local_share"
                    anywhere |= {name: own[name] for name in (*named_alike, "residual_decay", "replica")}
                    anywhere["settings"] = settings
                    if settings is not None:
                        wanted = wanted_of(self._arguments, self.length, memory.device)
                        anywhere |= {"method": method, "compute_ms": compute_ms} | asdict(wanted.settings)
                        if shards is None:
                            anywhere |= {"length": self.length, "device": memory.device}
                    anywhere |= {"tables with sparse gradients": len(tables)}
                    rule = type(optimizer)
                    anywhere |= {"optimizer": f"{rule.__module__}.{rule.__qualname__}"}
                strangers = compared(transport, optimizer, trained, broadcast, sends, shards)
                if wanted is not None:
                    keywords |= self._choose(transport, wanted)
                options = {"device": memory.device, "gradient_type": gradient_type, "stream": memory.stream}
                options |= keywords | self._options()
                self._made_of = comm, method, memory, options, bucket_mb if overlap or bucket_mb else None
                self._make_reducer(*self._made_of)
                opened.callback(self.reducer.close)
                peer_memory = keywords.get("peer_memory")
                self._tables = SparseTables(comm, tables, memory, self.reducer.settings, peer_memory)
                self._engine = Engine(self.reducer, self._tables, memory)
                if wanted is not None:
                    self._settle()
                opened.callback(self._tables.close)
                if strangers:
                    broadcast_tensors(trained, transport)
                    if transport.rank == 0:
                        warnings.warn(replaced_warning(strangers), stacklevel=2)
            self._memory = memory
            with self._replica.together(limit.what):
                self._prepare(gradient_type, overlap)
            opened.pop_all()
        register_reducer(self, trained)
        if self.reducer.transport.rank == 0 and (warning := rescaled_warning(trained)):
            warnings.warn(warning, stacklevel=2)
        for parameter in trained:
            parameter.grad = None  # as a new optimizer's are: torch.distributed.checkpoint looks

    def _check_sends(self, sends: str) -> None:
        """Raise ValueError where this class does not send that."""
        if sends not in self._kinds:
            raise ValueError(f"sends {sends!r} is not one of {', '.join(map(repr, sorted(self._kinds)))}")
        if sends != self._sends:
            kind = self._kinds[sends].__name__
            raise ValueError(
                f"{type(self).__name__} sends {self._sends!r}, not {sends!r}: for these take {kind}"
            )

    def _choose(self, transport: HostTransport, wanted: Wanted) -> dict[str, Any]:
        """Choose what settings="auto" leaves open; returns keywords of the reducer. Collective."""
        from oktopk.plan.choice import SHARDED, choose

        choice = choose(transport, wanted) if self._replica.plain else SHARDED
        self.chosen, self._hosts = choice.text, [*transport.hosts]
        if self._arguments["every"] == "auto":
            self._arguments["every"] = choice.every
        self._open = [name for name in OPEN if getattr(wanted.settings, name) == "auto"]
        every = self._arguments["every"]  # which may have been open
        return choice.settings | default_start(self.inner, self._sends, every, self.length, self._arguments)

    def _settle(self) -> None:
        """Let the reducer load states of any ways that were open."""
        for reducer in self._engine.bucketed.reducers:
            reducer.follows = [name for name in self._open if name != "levels"]

    # what each kind has of its own

    def _options(self) -> dict[str, Any]:
        """What the reducer is told, whatever the user says."""
        return {}

    def _make_reducer(
        self, comm: Any, method: str, memory: TensorMemory, options: dict[str, Any], bucket_mb: float | None
    ) -> None:
        """Set `reducer` and `_update`. Collective.

        Args:
            options: keywords of the reducer.
            bucket_mb: size of a bucket; None for one vector.
        """
        self.reducer = GradientAllreduce(comm, self.length, method, **options)
        self._update = memory.tensor(self.reducer.writable_update)

    def _prepare(self, gradient_type: str, overlap: bool) -> None:
        """Set up what a step reads and writes, once there is a reducer. Collective."""
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, as torch's optimizers; those of tables become None in any case."""
        raise NotImplementedError

    def _step(self, measure: bool, grad_scaler: GradScaler | None) -> None:
        """As `step`, once the gradients are computed."""
        raise NotImplementedError

    def reduce(self, *, measure: bool = False, grad_scaler: GradScaler | None = None) -> StepReport:
        """The first half of a step, with sends="gradients", see `GradientsOptimizer`.

        Raises:
            RuntimeError: with updates the optimizer steps before anything is reduced.
        """
        raise RuntimeError("reduce() and apply() are for sends='gradients': call step()")

    def apply(self) -> None:
        """The second half of a step, with sends="gradients"; as `reduce`."""
        self.reduce()

    @property
    def overlapped(self) -> BackwardBuckets | None:
        """What starts buckets in the backward pass, with `overlap`; None without it."""
        return None

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes within add up locally. Needed with `overlap`; without it they do so anyway, until `step`."""
        return nullcontext()

    def agreed(self) -> AbstractContextManager[None]:
        """Within, the parameters are equal on all ranks: to evaluate and to save. With sends="gradients" they always are."""
        return nullcontext()

    def abandon(self) -> None:
        """Forget a backward pass that an error ended, where `overlap` has begun to reduce its gradients. Every rank must call."""

    # what all have

    @torch._disable_dynamo
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        measure: bool = False,
        grad_scaler: GradScaler | None = None,
    ) -> Any:
        """Exchange and step, as the class of what is sent says; `report` tells how it went. Collective: every rank must call.

        With `every` > 1 only each `every`-th call exchanges, and `report` is of the last exchange. A step at a learning rate of
        0, without state and with gradients of zero on all ranks, exchanges nothing.

        Args:
            closure: computes the gradients first, if given. It is called once.
            measure: take the paper's measures of this exchange, see `GradientAllreduce.step`; where none is due it does nothing.
            grad_scaler: passed by `GradScaler.step(optimizer)`. With gradients, which are unscaled before they are accumulated,
                an Inf on one rank skips the step on all, whatever `nonfinite` is, and every rank's scaler backs off. It takes one
                control allreduce more, and on a GPU the wait for the flag, as in any `GradScaler.step`. With updates a rank that
                finds one does not step, its own scaler backs off, and the other ranks go on.

        Returns:
            What the closure returned; None without one.

        Raises:
            NonFiniteGradientError: on every rank alike, in the exchange, if settings say so. With gradients nothing was stepped,
                or where the last step was deferred and it is that one's, it was stepped on an update of zero, in buckets on those
                of the other buckets: to go back, load a state of before that step.
            ValueError: on every rank: on some rank parameters have changed so that no step is possible, one needs a gradient that
                did not when the optimizer was wrapped, or a gradient is sparse or of another shape; or the groups' numbers or,
                with updates, the references differ.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step(measure, grad_scaler)
        return loss

    @property
    def table_reports(self) -> list[RowReport]:
        """The last step of each table with sparse gradients, in the order of the parameters."""
        return list(self._tables.reports)

    @property
    def hosts(self) -> list[int] | None:
        """As `GradientAllreduce.hosts`."""
        return self.reducer.hosts

    def _only_sets_up_state(self) -> bool:
        """Whether this step changes nothing but an empty state, as the one that `torch.distributed.checkpoint` takes. Collective.

        No parameter moves at a learning rate of 0, but a step would take entries out of the residuals.
        """
        if not may_only_set_up(self):
            return False
        moving = self._replica.any(self._has_gradients(), f"step {self.reducer.steps}")
        self.reducer.complete()
        transport = self.reducer.transport
        transport.expect_all(f"step {self.reducer.steps}", self.reducer.settings.timeout)
        return not transport.allreduce_control(np.array([moving], np.int64))[0]

    def _has_gradients(self) -> bool:
        """Whether a gradient on this rank is not zero."""
        has_any = any(p.grad is not None and bool(p.grad.any()) for p in self._parameters)
        return has_any or self._tables.has_gradients

    def _answer(self, scaler: GradScaler, unscale: bool = False) -> dict[Any, Tensor]:
        """Whether a GradScaler has found an Inf, by device. It wants an answer where no gradient is there or read, too.

        Args:
            unscale: divide the gradients by the scale, where the user has not.
        """
        if unscale and scaler._per_optimizer_states[id(self)]["stage"] is OptState.READY:
            scaler.unscale_(self)
        inf_flags: dict[Any, Tensor] = scaler._found_inf_per_device(self)
        if not inf_flags:
            device = self._applied.device
            inf_flags[device] = torch.zeros((), dtype=torch.float32, device=device)
        return inf_flags

    def complete(self) -> None:
        """Complete the report of the last step, see `GradientAllreduce.complete`.

        Raises:
            NonFiniteGradientError: as `step`.
        """
        self.reducer.complete()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the flat gradient is laid out at construction.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "parameters cannot be added to a DistributedOptimizer: wrap the optimizer that has them all"
        )

    @closes
    def close(self) -> None:
        """Free what the library holds. Collective. The wrapped optimizer may then be wrapped again."""
        unregister_reducer(self)
        self._engine.close()

    def __repr__(self) -> str:
        library = self.reducer.transport.library
        chosen = f", settings='auto': {self.chosen}" if self.chosen else ""
        return (
            f"DistributedOptimizer({self.inner!r}, method={self.reducer.method!r}, length={self.length}, "
            f"library={library!r}{chosen})"
        )


# of `__init__`: `inspect` and the reference would take that of `__new__`
_OF_INIT = inspect.signature(DistributedOptimizer.__init__)
DistributedOptimizer.__signature__ = _OF_INIT.replace(  # type: ignore[attr-defined]
    parameters=list(_OF_INIT.parameters.values())[1:]
)
