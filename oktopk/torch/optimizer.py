"""Algorithm 2 around any torch optimizer: momentum, weight decay and Adam act on the reduced average."""

from __future__ import annotations

import copy
import inspect
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from collectives.closing import closes
from collectives.connect import communicator, connect
from collectives.limit import Limit
from oktopk.allreduce import GradientAllreduce, NonFiniteGradientError
from oktopk.buckets import BucketedAllreduce
from oktopk.cuda.multi_tensor import GradientTensors
from oktopk.elastic import of_rank, problem_of, saved_rank, without_residual
from oktopk.results import StepReport
from oktopk.rows import RowReport
from oktopk.settings import DENSE_ABOVE, timeout_of, unknown_setting
from oktopk.state import state_problem
from oktopk.torch.agreement import (
    GRADIENT_TYPES,
    disagreement,
    groups_of,
    reduced_twice_warning,
    reducer_of,
    register_reducer,
    replaced_warning,
    rescaled_warning,
    state_digest,
    states_difference,
    unregister_reducer,
    wrapping_problem,
)
from oktopk.torch.gradients import GradientsInPlace, dense_views
from oktopk.torch.interop import TensorMemory, memory_of
from oktopk.torch.modules import broadcast_tensors
from oktopk.torch.overlap import (
    BackwardBuckets,
    BucketLayout,
    buckets_problem,
    in_models_order,
    order_problem,
)
from oktopk.torch.replica import Replica
from oktopk.torch.sharded_replica import ShardedReplica
from oktopk.torch.shards import shards_problem
from oktopk.torch.states import as_arrays, as_tensors, by_rank
from oktopk.torch.step_agreement import StepAgreement, numbers_of
from oktopk.torch.tables import SparseTables, sparse_tables, tables_problem
from oktopk.torch.wrapped import WrappedOptimizer

if TYPE_CHECKING:
    from collectives.connect import Communicator

# Without itself passed, torch gives copies of found_inf, and this rank's scaler could not learn of another rank's Inf.
warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)


class DistributedOptimizer(WrappedOptimizer):
    """Sums what the ranks' optimizers need: their gradients, or, around AdamW, what their optimizers changed.

    With sends="updates", the default around optimizers with `betas`, see `oktopk.torch.updates.UpdatesOptimizer`. What follows is
    of sends="gradients": the gradients of all ranks are reduced, then the wrapped optimizer steps on the average.

    `step` copies the gradients into one flat buffer of `gradient_type`. Where Ok-Topk's kernels read each other's memory, they
    read each `p.grad` where autograd left it, and round on the way: only a step that is dense or measured fills the buffer.
    Residual and update are float32; the wrapped optimizer sees the update, in the parameters' type. A parameter without a
    gradient on this rank counts as zero, and its residual stays here; where no rank has one, its `p.grad` is None for the wrapped
    optimizer, as in torch alone: neither momentum nor decay moves it. Learning-rate schedulers take either this optimizer or the
    wrapped one, and `torch.amp.GradScaler` this one.

    Each step compares the parameters with what they were: other values and another memory format are gone on with. The ranks
    compare the numbers of the groups, by a checksum in the step's messages.

    Every rank must take the same number of steps. Where batches are unevenly many, take the fewest of any rank
    (`comm.allreduce(len(loader), MPI.MIN)`), or step with a gradient of zero where none is left: `zero_grad()`, then `step()`.
    `torch.distributed.algorithms.Join` is not supported. After `timeout` seconds the others raise and name the missing ranks.
    The buffers of the model, such as batch-norm statistics, are not reduced: see `average_buffers`.

    A table with sparse gradients (`torch.nn.Embedding(sparse=True)`) is reduced row by row, without loss, and the wrapped
    optimizer sees a coalesced sparse gradient. It is no part of the flat buffer, of n, or of k.

    Parameters on a GPU share their memory and torch's current stream with the reducer: nothing is copied to the host.

    Args:
        optimizer: the torch optimizer that owns the parameters: all on one device (the CPU, or the current GPU), all float32,
            bfloat16 or float16, each dense in memory.
        comm: as `GradientAllreduce` takes it. Collective: every rank must construct, with the same model and settings. Of
            parameters that `fully_shard` made the ranks that hold this rank's shards, `mesh["replicate"].get_group()`.
        method: a name in `oktopk.METHODS`.
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
        share: how k is divided among buckets, see `oktopk.buckets.BucketedAllreduce`.
        order: for buckets, the parameters in the order in which the model uses them, such as `model.parameters()`, whatever else
            is among them; None: with several groups that of the smallest module which holds them all, else that of the groups.
        sparse: the parameters with sparse gradients; None: the weights of all modules that make such.
        row_density: the part of a table's rows that a rank sends at most, see `oktopk.rows.RowSparseAllreduce`.
        sends: "gradients": the ranks sum gradients, then each wrapped optimizer steps on the mean. "updates": each wrapped
            optimizer steps on its rank's own gradient, and the ranks sum what it changed; see
            `oktopk.torch.updates.UpdatesOptimizer`. None: updates for optimizers with `betas` (Adam, AdamW, Lion), which do not
            train well on sparse gradients; gradients for all others, for SparseAdam, and where steps are dense.
        every: steps between two exchanges of updates, >= 1.
        local_share: with updates the share of its residual that a replica's own parameters hold, in [0, 1]; None: its ranks over
            all ranks, as much as its updates count once they are applied.
        replica: with updates, what steps on a gradient of its own. "rank": each rank. "host": the ranks of a host together, on
            the mean of their gradients. "summed": the same, where gradients are equal inside a host already. "auto": "host" where
            there are several hosts with several ranks each, else "rank".
        settings: keywords of `oktopk.Settings`.

    Raises:
        RuntimeError: a launcher started several processes, and MPI has only this one; the message says how to start them.
        ValueError: parameters that are not as said, a setting out of range, ranks that disagree (on the optimizer's state too), a
            GPU or an MPI that cannot be used, or momentum correction with an optimizer that has momentum of its own; on every
            rank alike.
        MissingRanksError: as `GradientAllreduce`.

    Memory: that of `GradientAllreduce`; n elements of gradients beside autograd's own (where kernels read those in place, once a
        step uses the buffer); n more of updates where parameters are not float32.
    Traffic: that of the method, once a step; at construction two barriers and two allgathers, three where kernels read gradients
        in place.
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

    _kinds: ClassVar[dict[str, type[DistributedOptimizer]]] = {}  # by what they send
    _sends = "gradients"
    _loaded_hook: Any = None  # for states that are loaded into the wrapped optimizer by itself
    _not_saved = ""  # what a state that was loaded lacks, for the next step to warn of

    def __init_subclass__(cls, sends: str = "", **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if sends:
            cls._sends = sends
            DistributedOptimizer._kinds[sends] = cls

    def __new__(
        cls,
        optimizer: Any = None,
        comm: Any = None,
        method: str = "oktopk",
        *,
        sends: str | None = None,
        **keywords: Any,
    ) -> Any:
        if sends is None and cls is DistributedOptimizer:
            sends = default_sends(optimizer, method, keywords.get("density"))
        kind = DistributedOptimizer._kinds.get(sends or cls._sends, cls)
        return super().__new__(kind if issubclass(kind, cls) else cls)

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        comm: Communicator | None = None,
        method: str = "oktopk",
        *,
        gradient_type: str = "",
        clip_norm: float = 0.0,
        broadcast: bool = True,
        overlap: bool = False,
        bucket_mb: float = 0.0,
        share: str = "bucket",
        order: Iterable[Tensor] | None = None,
        sparse: Sequence[Tensor] | None = None,
        row_density: float = 1.0,
        sends: str | None = None,
        every: int = 1,
        local_share: float | None = None,
        replica: str = "auto",
        **settings: Any,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}, not a torch optimizer")
        comm = communicator(comm)
        super().__init__(optimizer)
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        trained = [p for p in owned if p.requires_grad]
        places = {id(p): place for place, p in enumerate(trained)}
        used = None if order is None else list(order)
        unordered = "" if used is None else order_problem(used, trained)
        if (overlap or bucket_mb) and not unordered:
            if used is not None:
                trained = [p for p in {id(p): p for p in used}.values() if id(p) in places]
            elif len(optimizer.param_groups) > 1:
                trained = in_models_order(trained)
        self._order = [places[id(p)] for p in trained]  # places in the groups
        named = sparse_tables(trained) if sparse is None else list(sparse)
        numbers = set(map(id, named))
        tables = [p for p in trained if id(p) in numbers]  # in one order on all ranks, each once
        self._parameters = [p for p in trained if id(p) not in numbers]
        self._trained = trained
        shards = ShardedReplica.of(trained, timeout_of(settings))
        if shards is not None:
            self._parameters, tables = shards.tensors, []
        if tables and not self._parameters:  # the reducer then has this one
            self._parameters = [torch.zeros(1, dtype=tables[0].dtype, device=tables[0].device)]
        self._replica = Replica(self._parameters) if shards is None else shards
        self._owned, self._frozen = owned, [p for p in owned if not p.requires_grad]
        self.length = sum(p.numel() for p in self._parameters)
        self.clip_norm = clip_norm
        memory = TensorMemory()
        problem = unknown_setting(settings, DistributedOptimizer, "peer_memory")
        if isinstance(optimizer, DistributedOptimizer):
            problem = "the optimizer is a DistributedOptimizer already: wrap it once"
        unsaid, sends = sends is None, self._sends if sends is None else sends
        problem = problem or self._sends_problem(sends, every, local_share)
        problem = problem or shards_problem(trained, sends, replica, named, settings.get("levels", "auto"))
        asked = {"method": method, "overlap": overlap, "bucket_mb": bucket_mb, "gradient_type": gradient_type}
        refused = self._refused(settings | asked | {"every": every, "tables": tables, "replica": replica})
        if refused and unsaid:
            refused += f"; by default {type(optimizer).__name__} sends updates: leave it out, or pass sends='gradients'"
        problem = problem or refused
        problem = problem or _second_reducer_problem(optimizer, trained)
        held = trained if shards is None else self._parameters
        problem = problem or wrapping_problem(optimizer, held, clip_norm, settings)
        problem = problem or tables_problem(named, trained, settings)
        problem = problem or buckets_problem(overlap, bucket_mb, share, used is not None) or unordered
        if not problem:
            gradient_type = gradient_type or self._selected_type()
            try:
                memory = memory_of(self._parameters[0].device, beside=overlap)
            except ValueError as error:
                problem = str(error)
        self._arguments: dict[str, Any] = {"comm": comm, "method": method, "gradient_type": gradient_type}
        self._arguments |= {"clip_norm": clip_norm, "broadcast": broadcast, **settings}
        self._arguments |= {"overlap": overlap, "bucket_mb": bucket_mb, "share": share}
        self._arguments |= {
            "row_density": row_density,
            "sends": sends,
            "every": every,
            "local_share": local_share,
            "replica": replica,
        }
        limit = Limit("DistributedOptimizer(...)", timeout_of(settings))
        alike = self._arguments | {"comm": None, "groups": numbers_of(optimizer.param_groups)}
        problem = self._replica.sentence(problem, limit.what, alike)
        with (
            self._replica.together(limit.what, self._undo_construction),
            closing(connect(comm, limit)) as transport,
        ):
            differs, strangers = disagreement(
                transport, optimizer, trained, clip_norm, broadcast, sends, problem, shards
            )
            options = {"device": memory.device, "gradient_type": gradient_type, "stream": memory.stream}
            options |= {"problem": problem or differs}
            if not problem:  # a keyword that is refused may be one of these
                options |= settings | self._options()
            self.reducer: GradientAllreduce | BucketedAllreduce
            self._layout: BucketLayout | None = None
            if (overlap or bucket_mb) and not problem:
                self._layout = BucketLayout(self._parameters, bucket_mb)
                place = self._parameters[0].device
                self._update = torch.zeros(self._layout.length, device=place)
                updates = [memory.array(self._update[each]) for each in self._layout.slices]
                options |= {"updates": updates, "share": share}
                self.reducer = BucketedAllreduce(comm, self._layout.lengths, method, **options)
            else:
                self.reducer = GradientAllreduce(comm, self.length, method, **options)
                self._update = memory.tensor(self.reducer.writable_update)
            self._tables = self._make_tables(
                comm, tables, memory, row_density=row_density, peer_memory=settings.get("peer_memory")
            )
            if strangers:
                broadcast_tensors(trained, transport)
                if transport.rank == 0:
                    warnings.warn(replaced_warning(strangers), stacklevel=2)
        self._memory = memory
        with self._replica.together(limit.what, self.reducer.close):
            self._prepare(gradient_type, overlap)
        register_reducer(self, trained)
        if self.reducer.transport.rank == 0 and (warning := rescaled_warning(trained)):
            warnings.warn(warning, stacklevel=2)
        for parameter in trained:
            parameter.grad = None  # as a new optimizer's are: torch.distributed.checkpoint looks

    def _sends_problem(self, sends: str, every: int, local_share: float | None) -> str:
        """What is wrong with these arguments, in a sentence; "" if nothing is."""
        known = ["gradients", *self._kinds]
        if sends not in known:
            return f"sends {sends!r} is not one of {', '.join(map(repr, known))}"
        if sends != self._sends:
            kind = self._kinds[sends].__name__
            return f"a {type(self).__name__} sends {self._sends!r}, not {sends!r}: derive it from {kind}"
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            return f"every {every!r} is not an integer >= 1"
        number = isinstance(local_share, float | int) and not isinstance(local_share, bool)
        if local_share is not None and not (number and 0 <= local_share <= 1):
            return f"local_share {local_share!r} is not in [0, 1]"
        if every > 1 and sends == "gradients":
            return f"every {every} is for sends='updates': gradients are summed in each step, add up several by no_sync()"
        return ""

    def _refused(self, settings: dict[str, Any]) -> str:
        """Which argument this kind of optimizer does not take, in a sentence; "" if it takes all."""
        if settings["replica"] != "auto":
            return (
                f"replica={settings['replica']!r} is for sends='updates': gradients are summed over all ranks"
            )
        return ""

    def _undo_construction(self) -> None:
        self.reducer.close()

    def _options(self) -> dict[str, Any]:
        """What the reducer is told, whatever the user says."""
        return {}

    def _selected_type(self) -> str:
        """The type of what is selected, where the user names none."""
        return _type_name(self._parameters[0].dtype)

    def _prepare(self, gradient_type: str, overlap: bool) -> None:
        """Set up what a step reads and writes, once there is a reducer. Collective."""
        self._buckets: BackwardBuckets | None = None
        self._gradients = self._make_gradients(GRADIENT_TYPES[gradient_type], overlap)
        self._array: Any = None  # of the vector, once a step takes it
        # what the wrapped optimizer sees must be of the parameters' type
        self._applied = self._update.to(self._parameters[0].dtype)
        self._starts = None if self._layout is None else self._layout.starts
        self._like = [self._gradients.as_wrapped.like(n, "meta") for n in range(len(self._parameters))]
        self._updates: list[Tensor] = []  # views of what is applied, made by the first step
        self._said_none = False
        self._changes = 0  # of the parameters, when they were made
        self._counted = [*self._parameters, *self._table_list]  # whose gradients may be missing
        self._agreement = agreement = StepAgreement(groups_of([self.inner]), len(self._counted))

        def loaded(inner: torch.optim.Optimizer) -> None:
            # it keeps the agreement alone: the optimizer outlives this one. Torch's ZeRO has a part of the state on each rank
            if not hasattr(inner, "consolidate_state_dict"):
                agreement.state = state_digest(inner.state_dict())

        self._loaded_hook = self.inner.register_load_state_dict_post_hook(loaded)
        self._version = -1  # of the update, when it was handed out; -1: it is not

    def _make_tables(
        self, comm: Any, tables: Sequence[Tensor], memory: TensorMemory, **options: Any
    ) -> SparseTables | None:
        """What reduces the tables, None where there are none. Collective. options: of `oktopk.rows.RowSparseAllreduce`."""
        settings = self.reducer.settings
        shared = {name: getattr(settings, name) for name in ("average", "nonfinite", "timeout")}
        try:
            exchanged = {name: self._arguments[name] for name in ("every", "local_share", "replica")}
            self.reducer.transport.agree({"tables with sparse gradients": len(tables)} | exchanged)
            if not tables:
                return None
            return SparseTables(comm, tables, memory, **shared, **options)
        except ValueError:
            self.reducer.close()  # on every rank alike, as the error is
            raise

    def _make_gradients(self, dtype: torch.dtype, overlap: bool) -> GradientsInPlace:
        """What holds the gradients. Collective."""
        reducer, layout, tensors = self.reducer, self._layout, []
        if layout is None:
            assert isinstance(reducer, GradientAllreduce)
            if reducer.can_read_tensors:
                tensors = self._tensor_lists([reducer], [slice(None)])
            shared = reducer.gradient_buffer
            whole = None if shared is None else self._memory.tensor(shared).view(dtype)
            return GradientsInPlace(self._parameters, dtype, tensors, vector=whole)
        assert isinstance(reducer, BucketedAllreduce)
        if reducer.can_read_tensors:
            tensors = self._tensor_lists(reducer.buckets, layout.ranges)
        gradients = GradientsInPlace(
            self._parameters, dtype, tensors, layout.ranges, layout.starts, layout.length
        )
        # not of this instance, which the buckets would keep alive
        postponed = partial(_may_only_set_up, self.inner)
        self._buckets = BackwardBuckets(
            self._parameters, gradients, layout, reducer, self._memory, overlap, postponed
        )
        return gradients

    def _tensor_lists(
        self, reducers: Sequence[GradientAllreduce], ranges: Sequence[slice]
    ) -> list[GradientTensors]:
        """For each reducer a list of its parameters' gradients. Collective."""
        kind = _type_name(self._parameters[0].dtype)
        try:
            return [
                reducer.gradient_tensors([p.numel() for p in self._parameters[each]], kind)
                for reducer, each in zip(reducers, ranges, strict=True)
            ]
        except ValueError:
            self.reducer.close()  # on every rank alike, as the error is
            raise

    @property
    def _table_list(self) -> list[Tensor]:
        """The tables with sparse gradients."""
        return [] if self._tables is None else self._tables.tables

    @property
    def table_reports(self) -> list[RowReport]:
        """The last step of each table with sparse gradients, in the order of the parameters."""
        return [] if self._tables is None else list(self._tables.reports)

    @property
    def hosts(self) -> list[int] | None:
        """As `GradientAllreduce.hosts`."""
        return self.reducer.hosts

    @property
    def gradient(self) -> NDArray[np.float32]:
        """float32[n]: this rank's flat gradient, as the last step took it, on the host.

        To be asked for before the next backward pass or `zero_grad`. On the CPU a view, valid until then; from a GPU, and of
        buckets, a copy.
        """
        vector = self._gradients.vector
        if self._layout is not None:
            vector = torch.cat([vector[each] for each in reversed(self._layout.slices)])
        return vector.float().cpu().numpy()

    @property
    def overlapped(self) -> BackwardBuckets | None:
        """What starts buckets in the backward pass, with `overlap`; for passes that a CUDA graph replays. None without it."""
        return self._buckets if self._arguments["overlap"] else None

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, as torch's optimizers; those of tables become None in any case.

        With `overlap`, after a backward pass that was not stepped, it is `abandon`: every rank must call then.
        """
        if self._buckets is not None and self._buckets.started:
            self.abandon()
        self._gradients.zero(set_to_none)
        if self._tables is not None:
            self._tables.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes within add up locally. Needed with `overlap`; without it they do so anyway, until `step`."""
        return nullcontext() if self._buckets is None else self._buckets.no_sync()

    def agreed(self) -> AbstractContextManager[None]:
        """Within, the parameters are equal on all ranks: to evaluate and to save. With sends="gradients" they always are."""
        return nullcontext()

    def abandon(self) -> None:
        """Forget a backward pass that an error ended, where `overlap` has begun to reduce its gradients. Every rank must call."""
        if self._buckets is not None:
            with self._memory.before_torch():
                self._buckets.abandon()

    @torch._disable_dynamo
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        measure: bool = False,
        grad_scaler: GradScaler | None = None,
    ) -> Any:
        """Reduce the gradients and step; `report` tells how it went. Collective: every rank must call.

        A skipped step leaves parameters and optimizer state untouched, unless it was deferred: the report of such a step
        (`Settings.deferred`) is incomplete until the next one begins, or `complete`, and where it stopped or is skipped the
        optimizer has stepped on an update of zero. In buckets that is so of each bucket by itself: the optimizer has stepped on
        the updates of the others, and a parameter that had no gradient on any rank in the step before stays as it is. A step at a
        learning rate of 0, without state and with gradients of zero on all ranks, reduces nothing.

        Args:
            closure: computes the gradients first, if given. It is called once.
            measure: take the paper's measures of this step, see `GradientAllreduce.step`.
            grad_scaler: passed by `GradScaler.step(optimizer)`: gradients are unscaled before they are accumulated. An Inf on one
                rank skips the step on all, whatever `nonfinite` is, and every rank's scaler backs off. It takes one control
                allreduce more, and on a GPU the wait for the flag, as in any `GradScaler.step`.

        Returns:
            What the closure returned; None without one.

        Raises:
            NonFiniteGradientError: on every rank alike, if settings say so; nothing was stepped, or where the last step was
                deferred and it is that one's, it was stepped on an update of zero, in buckets on those of the other buckets: to
                go back, load a state of before that step.
            ValueError: on every rank: on some rank a parameter needs a gradient that did not when the optimizer was wrapped, has
                another type, shape or device, or a gradient that is sparse or of another shape; or the groups' numbers differ.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._only_sets_up_state():
            if self._buckets is not None:
                self._buckets.forget()
            self.inner.step()
        else:
            self.reduce(measure=measure, grad_scaler=grad_scaler)
            self.apply()
        return loss

    def _only_sets_up_state(self) -> bool:
        """Whether this step changes nothing but an empty state, as the one that `torch.distributed.checkpoint` takes. Collective.

        No parameter moves at a learning rate of 0, but a step would take entries out of the residuals.
        """
        if not _may_only_set_up(self.inner):
            return False
        moving = any(p.grad is not None and bool(p.grad.any()) for p in self._parameters)
        if self._buckets is not None:
            moving = moving or self._buckets.started > 0
        if self._tables is not None:
            moving = moving or self._tables.has_gradients
        moving = self._replica.any(moving, f"step {self.reducer.steps}")
        self.reducer.complete()
        transport = self.reducer.transport
        transport.expect_all(f"step {self.reducer.steps}", self.reducer.settings.timeout)
        return not transport.allreduce_control(np.array([moving], np.int64))[0]

    @torch._disable_dynamo
    def reduce(self, *, measure: bool = False, grad_scaler: GradScaler | None = None) -> StepReport:
        """The first half of a step: from here to `apply`, each `p.grad` is its piece of the update. Collective.

        In between the update may be looked at or changed, as long as all ranks change it alike; a skipped step has none, and a
        deferred one that is skipped or stopped has zeros; in buckets only those have that were.

        Args:
            measure, grad_scaler: as `step`.

        Returns:
            The step's `report`.

        Raises:
            NonFiniteGradientError: as `step`.
            RuntimeError: the last update was not applied.
        """
        if self._version >= 0:
            raise RuntimeError(
                "reduce() again before apply(): each p.grad still is its piece of the last update"
            )
        if grad_scaler is not None and (skipped := self._unscale(grad_scaler)) is not None:
            self.report = skipped
            return skipped
        if hasattr(self, "found_inf"):
            raise RuntimeError(
                f"no GradScaler was passed to step(): torch {torch.__version__} does not pass it, or something has replaced the "
                "optimizer's step(), as Accelerate does for float16: take bfloat16 there, or in place of GradScaler.step() call "
                "reduce(grad_scaler=...) and apply()"
            )
        self.report = report = self._reduced(measure)
        if report.skipped:
            return report
        anywhere = self._heard(report)
        if self.clip_norm:
            clip_([self._update, *([] if self._tables is None else self._tables.values)], self.clip_norm)
        if self._applied is not self._update:
            self._applied.copy_(self._update)
        self._gradients.lay_aside()
        for parameter, update, used in zip(
            self._parameters, self._updates, anywhere[: len(self._parameters)], strict=True
        ):
            parameter.grad = update if used else None
        for number in self._gradients.as_wrapped.relaid:
            parameter = self._parameters[number]
            if parameter.grad is not None:  # as the optimizer's own state is laid out
                parameter.grad = torch.empty_like(parameter).copy_(self._updates[number])
        if self._tables is not None:
            self._tables.leave_out(anywhere[len(self._parameters) :])
        self._version = self._update._version
        return report

    @torch._disable_dynamo
    def apply(self) -> None:
        """The second half of a step: the wrapped optimizer's own, unless the step was skipped."""
        if self._version < 0:
            return
        try:
            self.inner.step()
        finally:
            self._gradients.attach()
            if self._tables is not None:
                self._tables.put_back()
            if self._update._version != self._version:  # some optimizers work in place on p.grad
                self.reducer.forget_support()
            self._version = -1

    def _reduced(self, measure: bool) -> StepReport:
        """Reduce the tables, which can be undone without traffic, then the vector: both or neither.

        Buckets start before any other collective call: ranks may have started unlike numbers of them in the backward pass, and
        one that waits for a bucket of another rank, on the host or on the stream, must not be waited for itself.
        """
        problem = self._changed()
        self._warn_of_lost()
        first = self.report is None and self.reducer.transport.rank == 0
        if first and (warning := reduced_twice_warning(self._trained)):
            warnings.warn(warning, stacklevel=4)
        present = bytes(parameter.grad is not None for parameter in self._counted)
        token = self._agreement.tell(present)
        if self._buckets is not None:
            self._start_rest(measure, "" if self._tables is not None else problem, token)
        if self._tables is None:
            return self._reduced_vector(measure, problem, token)
        try:
            reduced = self._reduce_tables(problem)
        except (NonFiniteGradientError, ValueError):
            if self._buckets is not None:
                self._discard_buckets()
            raise
        if not reduced:
            if self._buckets is not None:
                return self._discard_buckets()
            skipped = self.reducer.skip_together(True)
            assert skipped is not None
            return skipped
        try:
            report = self._reduced_vector(measure, problem, token)
        except BaseException:
            self._tables.take_back()
            raise
        if report.skipped:
            self._tables.take_back()
        report.row_bytes = sum(each.bytes for each in self._tables.reports)
        return report

    def _reduce_tables(self, problem: str) -> bool:
        """As `SparseTables.reduce`, in the thread of the first bucket, whose stream it is on. Collective."""
        assert self._tables is not None
        if not isinstance(self.reducer, BucketedAllreduce):
            with self._memory.stream_scope():
                return self._tables.reduce(problem)
        ready = self._memory.after_current()
        with self._memory.before_torch():
            return self.reducer.submit(partial(self._tables.reduce, problem, ready)).result()

    def _start_rest(self, measure: bool, problem: str, token: int) -> None:
        """Start the buckets that the backward pass has not, the last one with the token. Collective."""
        assert self._buckets is not None and isinstance(self.reducer, BucketedAllreduce)
        if measure:
            refused = "measures are taken of one vector: pass overlap=False and bucket_mb=0"
            if self.overlapped is not None:  # what the backward pass has started can still be stepped
                raise ValueError(refused)
            problem = problem or refused
        rest = self._buckets.rest(problem)
        ready = self._memory.after_current()
        last = len(self.reducer.buckets) - 1
        for gradient, more in rest:
            number = self.reducer.started
            beside = {**more, "absent": self._gradients.missing(number)}
            self.reducer.start(gradient, ready, **beside, token=token if number == last else None)

    def _discard_buckets(self) -> StepReport:
        """End a step whose tables were not reduced. Collective."""
        assert isinstance(self.reducer, BucketedAllreduce)
        with self._memory.before_torch():
            return self.reducer.discard([])

    def _reduced_vector(self, measure: bool, problem: str, token: int) -> StepReport:
        if isinstance(self.reducer, BucketedAllreduce):
            with self._memory.before_torch():
                return self.reducer.finish()
        assert isinstance(self.reducer, GradientAllreduce)
        absent = self._gradients.missing()
        try:
            gradient = self._given(measure, problem)
        except (
            RuntimeError,
            TypeError,
        ) as error:  # on this rank alone, perhaps: a gradient is sparse, or of another shape
            problem = str(error).splitlines()[0]
            gradient = self._given(measure, problem)
        with self._memory.stream_scope():
            return self.reducer.step(gradient, measure=measure, problem=problem, absent=absent, token=token)

    def _heard(self, report: StepReport) -> bytes:
        """As `StepAgreement.hear`, of a step that was reduced, which is undone where ranks differ in the groups' numbers."""
        transport = self.reducer.transport
        try:
            anywhere = self._agreement.hear(self.reducer.tokens, transport, not report.complete)
        except ValueError:
            self.reducer.take_back()
            if self._tables is not None:
                self._tables.take_back()
            raise
        if not (any(anywhere) or self._said_none) and transport.rank == 0:
            warnings.warn(
                f"no parameter of the optimizer has a gradient on any rank in step {report.step}: if the model has others by "
                "now, as after load_state_dict(assign=True) or to(device), change it first, then wrap",
                stacklevel=4,
            )
        self._said_none = self._said_none or not any(anywhere)
        return anywhere

    def _answer(self, scaler: GradScaler) -> dict[Any, Tensor]:
        """Whether a GradScaler has found an Inf, by device. It wants an answer where no gradient is there or read, too."""
        found: dict[Any, Tensor] = scaler._found_inf_per_device(self)
        if not found:
            found[self._applied.device] = torch.zeros((), device=self._applied.device)
        return found

    def _unscale(self, scaler: GradScaler, problem: str = "") -> StepReport | None:
        """Divide the gradients by the scale, where the user has not. Collective.

        Args:
            problem: why this rank's gradients cannot be read: they stay as they are.

        Returns:
            The report of the step, where an Inf on some rank skips it: every rank's scaler then has it too. Else None.
        """
        if self.overlapped is not None:  # refused on every rank, though some may have started no bucket yet
            raise RuntimeError(
                "GradScaler with overlap=True: take bfloat16, which needs none, or overlap=False"
            )
        if not problem and scaler._per_optimizer_states[id(self)]["stage"] is OptState.READY:
            scaler.unscale_(self)
        found = self._answer(scaler)
        skipped = self.reducer.skip_together(any(flag.item() for flag in found.values()))
        if skipped is not None:
            for flag in found.values():
                flag.fill_(1.0)
        return skipped

    def _given(self, measure: bool, problem: str) -> Any:
        """The gradients as the next step of the reducer takes them; zeros where a problem is to be raised."""
        assert isinstance(self.reducer, GradientAllreduce)
        if self.reducer.reads_tensors(measure):
            return self._gradients.tensors(problem=problem)[0]
        vector = self._gradients.collect(problem=problem)
        if self._array is None:
            self._array = self._memory.array(vector)
        return self._array

    def _changed(self) -> str:
        """What has changed since the optimizer was wrapped that a step cannot go on with, in a sentence; "" if nothing has."""
        watched = self._gradients.as_wrapped
        watched.look()
        if watched.changes != self._changes:  # `Module.to` may have given what each p.grad was other memory
            self._changes = watched.changes
            self._updates = dense_views(self._applied, self._like, self._starts)
        return watched.problem or self._unwrapped_parameters()

    def _unwrapped_parameters(self) -> str:
        """What of the wrapped optimizer needs a gradient now and did not at construction, in a sentence; "" if nothing does."""
        now = list(chain.from_iterable(group["params"] for group in self.inner.param_groups))
        if len(now) == len(self._owned) and all(map(operator.is_, now, self._owned)):
            unfrozen = [parameter for parameter in self._frozen if parameter.requires_grad]
        else:
            wrapped = set(self._trained)
            unfrozen = [
                parameter for parameter in now if parameter.requires_grad and parameter not in wrapped
            ]
        if not unfrozen:
            return ""
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in unfrozen[:3])
        return (
            f"{len(unfrozen)} parameter(s) of the optimizer, of shape {shapes}{', ...' if len(unfrozen) > 3 else ''}, need a "
            "gradient that is not reduced: they were frozen or missing when the optimizer was wrapped. Unfreeze and add "
            "parameters first, then wrap"
        )

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

    def state_dict(self) -> dict[str, Any]:
        """State of the wrapped optimizer, and under "reducer" this rank's own, see `oktopk.elastic.of_rank`.

        Tensors and plain values only. Every rank saves its own. What takes the optimizer's part alone, as
        `get_optimizer_state_dict` of `torch.distributed.checkpoint` does, drops the residuals; a state without "reducer" is
        loaded as that of an optimizer that was not wrapped.
        """
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where this rank's `state_dict` was taken, bit for bit. Collective: every rank must call.

        A state without "reducer", as of an optimizer that was not wrapped, starts with empty residuals; rank 0 warns. So does one
        rank's state on every rank, as of a framework that saves rank 0's alone; there the next step warns, unless each rank's own
        is loaded before it.

        Raises:
            ValueError: the state is of another length or method, of other buckets or of parameters in another order, or only some
                ranks' have "reducer", or is no dict; on every rank alike.
        """
        given: Any = state_dict
        if not isinstance(given, dict):  # on this rank alone, perhaps: all are told
            given = {"problem": f"the state is a {type(given).__name__}, not a dict"}
        super().load_state_dict(given)
        self._replica.reshard()

    def _state(self) -> dict[str, Any]:
        own = {"reducer": as_tensors(self.reducer.state_dict())}
        if self._layout is not None:
            own["reducer"]["order"] = list(self._order)
        own |= {} if self._tables is None else {"tables": self._tables.state()}
        rank = self.reducer.transport.rank
        return {**self.inner.state_dict(), **{name: by_rank(held, rank) for name, held in own.items()}}

    def _load(self, state: dict[str, Any]) -> None:
        if state.pop("updates", None) is not None:
            state.pop("reducer", None)  # residuals of updates, which are of another size than gradients
        self._load_parts(state)

    def _load_parts(
        self,
        state: dict[str, Any],
        problem: str = "",
        told: dict[str, Any] | None = None,
        alike: dict[str, Any] | None = None,
        empty: str = "",
    ) -> None:
        """Load what is no kind's own: the wrapped optimizer's part, the reducer's, the tables'. Collective.

        Args:
            state: as `_state` returns it.
            problem: why this rank cannot load it, in a sentence.
            told, alike: name -> what of it is to be equal on all ranks; on those of a replica.
            empty: why residuals start empty, in a sentence, where the state has none.

        Raises:
            ValueError: on every rank alike. What the ranks have not found before the first part is loaded leaves parts loaded.
        """
        what, saved = "load_state_dict", saved_rank(state)
        reducer, tables = of_rank(state.pop("reducer", None)), of_rank(state.pop("tables", None))
        transport = self.reducer.transport
        with self._replica.together(what, lambda: None):
            self.reducer.meet(what)
            not_saved = self._not_saved_of(saved)
            if not_saved:
                reducer = without_residual(reducer, transport.rank, transport.size, self.hosts)
                tables = None
            reducer = None if reducer is None else as_arrays(reducer)
            problem = problem or self._parts_problem(state, reducer, tables)
            if self._replica.sharded:  # the ranks that have another shard must not load theirs either
                assert isinstance(self.reducer, GradientAllreduce)
                if not problem and reducer is not None:
                    problem = state_problem(reducer, self.reducer)
                if not problem:
                    alike = {**(alike or {}), "the groups of the state": numbers_of(state["param_groups"])}
                problem = self._replica.sentence(problem, what, alike)
            given = {**(told or {}), "whether the state has residuals": reducer is not None}
            transport.agree(given | {"whether the state has tables": tables is not None}, problem)
            if problem := self._states_difference(state):
                raise ValueError(problem)
            if reducer is not None and self._replica.sharded:
                assert isinstance(self.reducer, GradientAllreduce)
                self.reducer.agree_on_state(reducer)
        with self._replica.together(what, lambda: None):  # what raised above has changed no shard
            if reducer is None:
                self.reducer.reset()
                if transport.rank == 0:
                    empty = empty or "the state is that of an optimizer that was not wrapped"
                    warnings.warn(f"{empty}: residuals start empty, thresholds anew", stacklevel=5)
            else:
                self.reducer.load_state_dict(reducer)
            if self._tables is not None:
                self._tables.load(tables)
            problem = ""
            try:
                load_state(self.inner, state)
            except Exception as error:  # of the wrapped optimizer, perhaps on this rank alone
                problem = f"the wrapped optimizer does not load its state: {type(error).__name__} {error}"
            transport.agree({}, problem)
        self._not_saved = not_saved

    def _parts_problem(self, state: dict[str, Any], reducer: Any, tables: Any) -> str:
        """Why this rank cannot load a state, in a sentence; "" if it can, but for what the reducer looks for itself."""
        problem = problem_of(state) or groups_problem(self.inner, state) or kept_problem(self.inner, state)
        if tables is not None and not problem:
            problem = self._tables_state_problem(tables)
        if reducer is not None and self._layout is not None and not problem:
            problem = self._order_problem(reducer)
        return problem

    def _not_saved_of(self, saved: tuple[int, int] | None) -> str:
        """What is lost where every rank loads the state of one and the same rank, in a sentence; else "". Collective."""
        transport = self.reducer.transport
        everyone = set(transport.allgather_objects(saved))
        if saved is None or len(everyone) > 1 or (transport.size, saved[1]) == (1, 1):
            return ""
        return (
            f"every rank has loaded the state of rank {saved[0]} of {saved[1]}: the residuals of all ranks are lost, and with "
            "sends='updates' what the optimizers of the others kept. Save and load each rank's own beside it, see "
            "docs/frameworks.md"
        )

    def _warn_of_lost(self) -> None:
        """In the first step after such a state: until then each rank's own may be loaded."""
        if self._not_saved and self.reducer.transport.rank == 0:
            warnings.warn(self._not_saved, stacklevel=5)
        self._not_saved = ""

    def _states_difference(self, state: dict[str, Any]) -> str:
        """How the wrapped optimizer's states that ranks are about to load differ, in a sentence; "" if they may. Collective."""
        return states_difference(self.reducer.transport, state)

    def _order_problem(self, reducer: Any) -> str:
        try:
            if "buckets" not in reducer:
                return ""  # the reducer says so
            saved = list(reducer["order"])
        except (KeyError, TypeError) as error:
            return f"the state is damaged: {type(error).__name__} {error}"
        if saved == self._order:
            return ""
        return "the state has buckets of parameters in another order: pass the order that it was taken with"

    def _tables_state_problem(self, state: Any) -> str:
        if self._tables is None:
            return f"the state has {len(state)} tables with sparse gradients, and the optimizer has none"
        return self._tables.state_problem(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedOptimizer:
        """A copy of the optimizer, its parameters and this rank's reducer; without hooks, as torch's. Collective.

        The communicator must not have been freed.
        """
        self.reducer.meet("deepcopy")
        inner = copy.deepcopy(self.inner, memo)
        order = None if self._layout is None else [memo[id(parameter)] for parameter in self._trained]
        copied = type(self)(
            inner, order=order, sparse=[memo[id(table)] for table in self._table_list], **self._arguments
        )
        copied.reducer.load_state_dict(self.reducer.state_dict())
        if self._tables is not None and copied._tables is not None:
            copied._tables.load(self._tables.state())
        copied.report = self.report
        return copied

    @closes
    def close(self) -> None:
        """Free what the library holds. Collective. The wrapped optimizer may then be wrapped again."""
        unregister_reducer(self, self._trained)
        if self._loaded_hook is not None:
            self._loaded_hook.remove()
        if self._buckets is not None:
            self._buckets.remove()
        if self._tables is not None:
            self._tables.close()
        self.reducer.close()

    def __repr__(self) -> str:
        library = self.reducer.transport.library
        return f"DistributedOptimizer({self.inner!r}, method={self.reducer.method!r}, length={self.length}, library={library!r})"


# of `__init__`: `inspect` and the reference would take that of `__new__`
_OF_INIT = inspect.signature(DistributedOptimizer.__init__)
DistributedOptimizer.__signature__ = _OF_INIT.replace(  # type: ignore[attr-defined]
    parameters=list(_OF_INIT.parameters.values())[1:]
)


def default_sends(optimizer: Any, method: str, density: Any) -> str:
    """What a `DistributedOptimizer` sends where the user does not say: "updates" or "gradients"."""
    scaled = isinstance(optimizer, torch.optim.Optimizer) and "betas" in optimizer.defaults
    dense = method == "dense" or (isinstance(density, float | int) and density > DENSE_ABOVE)
    gradients = isinstance(optimizer, torch.optim.SparseAdam) or dense
    return "updates" if scaled and not gradients else "gradients"


def clip_(vectors: Sequence[Tensor], norm: float) -> None:
    """Scale vectors in place so that their Euclidean norm together is at most `norm`; without waiting for a GPU."""
    norms = [torch.linalg.vector_norm(vector, dtype=torch.float32) for vector in vectors]
    together = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    scale = (norm / (together + 1e-6)).clamp(max=1.0)
    for vector in vectors:
        vector.mul_(scale)


def groups_problem(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> str:
    """Why a state's groups are not those of the optimizer, in a sentence; "" if they are."""
    own = [len(group["params"]) for group in optimizer.param_groups]
    try:
        given = [len(group["params"]) for group in state["param_groups"]]
    except (KeyError, TypeError) as error:
        return f"the state is not that of an optimizer: {type(error).__name__} {error}"
    return "" if given == own else f"the state has groups of {given} parameters, the optimizer of {own}"


def kept_problem(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> str:
    """What of a state with the optimizer's groups has another shape than its parameter, in a sentence; "" if nothing has."""
    try:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state["state"].get(number, {}).items():
                if name in _SHAPED and value is not None and value.shape != parameter.shape:
                    return f"the state has {name} of shape {tuple(value.shape)} of a parameter of shape {tuple(parameter.shape)}"
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"the state is not that of an optimizer: {type(error).__name__} {error}"
    return ""


_SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""What torch's optimizers keep in the shape of a parameter."""


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict`, and what is shaped like a parameter gets its memory layout too.

    A state that was written contiguously would else meet a channels-last parameter: fused optimizers then refuse, or on the CPU
    pair unlike elements.
    """
    optimizer.load_state_dict(state)
    for parameter, held in optimizer.state.items():
        for name, value in held.items():
            shaped = isinstance(value, Tensor) and value.shape == parameter.shape
            if shaped and value.stride() != parameter.stride():
                like = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                held[name] = like.copy_(value)


def _may_only_set_up(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step begins by asking all ranks if it only sets up the optimizer's state; equal on all ranks."""
    return not optimizer.state and all(_is_zero(group.get("lr")) for group in optimizer.param_groups)


def _is_zero(rate: Any) -> bool:
    """Whether a learning rate is zero; not asked of a GPU, which would have to be waited for."""
    return rate is not None and not (isinstance(rate, Tensor) and rate.is_cuda) and float(rate) == 0.0


def _second_reducer_problem(optimizer: torch.optim.Optimizer, trained: list[Tensor]) -> str:
    """What is wrong where another reducer has these parameters; "" if none has. A string, which keeps no reducer alive."""
    if (other := reducer_of(trained)) is None:
        return ""
    name = (
        "a DistributedOptimizer" if isinstance(other, DistributedOptimizer) else f"an {type(other).__name__}"
    )
    same = getattr(other, "inner", None) is optimizer
    what = "is around this optimizer" if same else "reduces gradients of these parameters"
    return f"{name} {what} already: use that one, or close() it first"


def _type_name(dtype: torch.dtype) -> str:
    return next(name for name, known in GRADIENT_TYPES.items() if known == dtype)
