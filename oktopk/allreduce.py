"""Steps of a method, one after the other: flat gradient in, flat update out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from collectives.closing import announce, closes
from collectives.connect import Communicator
from collectives.sparse import Vector
from collectives.transport import Transport
from oktopk.backend import Stream
from oktopk.construction import Parts
from oktopk.cuda.multi_tensor import GradientTensors
from oktopk.devices import GRADIENT_TYPES
from oktopk.displacement import AdamWDisplacement, Displacement, ParameterDisplacement
from oktopk.host_group import HostGroup
from oktopk.results import StepReport
from oktopk.state import Resumable
from oktopk.step import Spans
from oktopk.steps import NonFiniteGradientError

__all__ = ["GradientAllreduce", "NonFiniteGradientError"]
_Displacement = TypeVar("_Displacement", bound=Displacement)


class GradientAllreduce(Resumable):
    """Reduces one flat gradient per step over all ranks of a communicator.

    Several instances may live side by side, one per bucket, parameter group or communicator: they share nothing.

    Args:
        comm: an `MPI.Intracomm` or a `torch.distributed.ProcessGroup`; duplicated; None: torch's default process group where
            there is one, else all ranks of the MPI job. Collective: every rank must construct, with the same arguments.
        length: elements of the gradient (n).
        method: a name in `oktopk.METHODS`.
        device: "cpu" for NumPy arrays, "cuda" for CuPy arrays on the current GPU.
        gradient_type: "float32"; on a GPU also "bfloat16" or "float16". The update is float32.
        stream: on a GPU, the cupy stream that gradients are produced on; None: the current one.
        peer_memory: on GPUs of one host, let kernels read each other's memory in steps of Ok-Topk. None: where every
            rank has a GPU of its own; True: also where they share one, which is slow; False: MPI alone.
        update: float32[n] on the device, zero, to be taken for `update`; None: memory of its own.
        settings: keywords of `oktopk.Settings`.

    Raises:
        RuntimeError: a launcher started several processes, and MPI has only this one; the message says how to start them.
        ValueError: an argument is out of range, the device cannot be used, or ranks disagree; on every rank alike.
        MissingRanksError: ranks did not come within `Settings.timeout`; on the others, and on a missing rank when it comes.

    Memory: n words of update; n of residual where the method is sparse, as many again with
        nonfinite="skip"; n/2 of scratch from the first dense step on; 3n/2 from the first measured step on; the lists
        of the method, O(k) for Ok-Topk where regions balance. In two levels n elements of gradient, n/G words of residual and
        of sums, n words of scratch in each dense step, and on GPUs a window of a shard's entries.
    Traffic: that of the method, see `oktopk.methods`; a barrier and one allgather of the settings at construction.
    Source: Li & Hoefler, PPoPP 2022, algorithm 2.

    Example:
        >>> reducer = GradientAllreduce(MPI.COMM_WORLD, length=len(gradient), method="oktopk", density=0.01)
        >>> report = reducer.step(gradient)
        >>> parameters -= learning_rate * reducer.update
    """

    def __init__(
        self,
        comm: Communicator | None,
        length: int,
        method: str = "oktopk",
        *,
        device: str = "cpu",
        gradient_type: str = "float32",
        stream: Stream | None = None,
        peer_memory: bool | None = None,
        update: Vector | None = None,
        **settings: Any,
    ) -> None:
        own = comm, length, method, device, gradient_type, stream, peer_memory, update
        super().__init__(Parts(*own, GradientAllreduce, settings))

    @property
    def update(self) -> Vector:
        """float32[n], the last step's result: the mean over the ranks, or the sum. Valid until the next step.

        Read-only on the CPU. To change it in place, on a GPU too, take `writable_update`.
        """
        return self.backend.read_only(self._vectors.update)

    @property
    def writable_update(self) -> Vector:
        """float32[n], the memory of `update`. Call `forget_support` after writing to it, or old entries stay in later updates."""
        return self._vectors.update

    @property
    def transports(self) -> list[Transport]:
        """Where ranks wait for each other."""
        return [self.transport]

    @property
    def levels(self) -> str:
        """What steps do: "flat" or "hosts", see `Settings.levels`."""
        return self._placement.levels

    @property
    def group(self) -> HostGroup | None:
        """The ranks of this host, in two levels; None in flat steps."""
        return self._placement.group

    @property
    def shards(self) -> int:
        """Shards that a host holds its residual in; 1 in flat steps."""
        return self._placement.shards

    @property
    def gradient_buffer(self) -> Vector | None:
        """[n] of the gradient type, to be filled and given to `step`, which then copies nothing. None in flat steps.

        After `close` an array that was taken before still has its memory, which no step reads.
        """
        return self._placement.gradient_buffer

    def gradient_tensors(self, sizes: Sequence[int], element_type: str) -> GradientTensors:
        """A gradient in several arrays on the GPU, which steps read where they lie. Collective.

        Steps round its elements to the gradient type as they read them, to nearest even. `set_pointers` tells where the arrays
        lie, which may change in every step.

        Args:
            sizes: elements of the arrays, in the order of the vector; `length` in all.
            element_type: of the arrays: "float32", "bfloat16" or "float16".

        Raises:
            RuntimeError: no step reads a tensor list here, see `can_read_tensors`; on every rank alike.
            ValueError: another type, or sizes that do not add up to `length`, on some rank, or its GPU has no memory for it; on
                every rank alike.

        Memory: n/512 bytes, and 16 bytes an array.
        """
        if not self.can_read_tensors:
            raise RuntimeError("no step of this reducer reads a tensor list: pass one vector")
        self.meet("gradient_tensors")
        with self.backend.stream_scope(), self.transport.together(ValueError):
            self._check_sizes(sizes, element_type)
            return self.backend.kernels.gradient_tensors(sizes, element_type)

    def displacement(
        self, sizes: Sequence[int], element_type: str, reference: Vector, share: float
    ) -> ParameterDisplacement:
        """What parameters move from round(reference - share · residual), as the gradient of all steps to come. Collective.

        Steps keep no copy of the residual to undo by: a finite displacement stays in it, whatever becomes of the step.

        In two levels it is a `ShardDisplacement`: the caller fills its vector, of this rank's shard, before each step, and
        `show` takes the residual of the whole host.

        Args:
            sizes, element_type: of the parameters, as `gradient_tensors`.
            reference: float32[n] on the device, its memory; read.
            share: of the residual that parameters hold.

        Raises:
            ValueError: as `gradient_tensors`; or steps have no residual, or are deferred.

        Memory: on a GPU n/512 bytes, and 16 bytes a parameter. In steps that are dense or measured, and of methods that select in
            a way of their own, n words. In two levels n/G words.
        """
        return self._new_displacement(self._placement.displacement, sizes, element_type, reference, share)

    def adamw_displacement(self, sizes: Sequence[int], element_type: str) -> AdamWDisplacement:
        """What AdamW moves parameters by, computed in the pass that selects, for flat steps. Collective.

        A step may take it or the `displacement`, each rank as it likes. Steps keep no copy of the residual to undo by.

        Args:
            sizes, element_type: of the parameters, as `gradient_tensors`; gradients and moments are of that type.

        Raises:
            ValueError: as `displacement`; or steps are in two levels.

        Memory: on a GPU n/512 bytes, and 64 bytes a parameter. In steps that are dense or measured, and of methods that select in
            a way of their own, n words.
        """
        return self._new_displacement(self._placement.adamw_displacement, sizes, element_type)

    def _new_displacement(
        self, make: Callable[..., _Displacement], sizes: Sequence[int], element_type: str, *more: Any
    ) -> _Displacement:
        self.meet("displacement")
        with self.backend.stream_scope():
            with self.transport.together(ValueError):
                self._check_sizes(sizes, element_type)
                if self._vectors.residual is None:
                    raise ValueError("a displacement needs a residual: steps of a sparse method")
                if self.settings.deferred:
                    raise ValueError("a displacement is not for deferred steps")
                displacement = make(sizes, element_type, *more)
            self._vectors.keep_no_copies()
        return displacement

    def _check_sizes(self, sizes: Sequence[int], element_type: str) -> None:
        """Raise ValueError where there is no gradient of such parts."""
        known = GRADIENT_TYPES["cuda"]
        if element_type not in known:
            raise ValueError(f"element_type {element_type!r} is not one of {', '.join(known)}")
        if min(sizes, default=0) < 0:
            raise ValueError(f"size {min(sizes)} is negative")
        if sum(sizes) != self.length:
            raise ValueError(f"sizes add up to {sum(sizes)}, not to {self.length}")

    def mean_in_host(self, flag: bool = False, token: int | None = None) -> tuple[int, ...] | None:
        """Make `gradient_buffer` the mean of what all ranks of this host have filled it with, equal bit for bit. For two levels.

        No step, and no message to another host. Collective: every rank of the host must call. A GPU may
        still copy on return: what the reducer's stream does next sees the mean.

        Args:
            flag: of this rank; where any rank of the host raises it, nothing is summed.
            token: a word that all ranks of the host are to see; on every rank or on none.

        Returns:
            The tokens of the host's ranks, () where they gave none; None where any raised its flag.

        Raises:
            RuntimeError: steps are flat, or gradients are not float32; on every rank alike.
            MissingRanksError: ranks of the host did not come within `Settings.timeout`.

        Traffic: a control allgather and a control allreduce of one int64 in the host. Memory traffic: each rank reads a shard
            of all gradients, and the others' shards of the mean, from each other's memory.
        """
        group = self._placement.group_of_means()
        with self.backend.stream_scope():
            self._complete()
            with self._expecting(f"step {self.steps}", self.advice):
                return group.mean(flag, token)

    def step(
        self,
        gradient: Vector | GradientTensors | Displacement,
        *,
        measure: bool = False,
        problem: str = "",
        absent: Spans = (),
        token: int | None = None,
    ) -> StepReport:
        """Reduce one gradient; the result is in `update`. Collective: every rank must call.

        With `Settings.deferred` a step of Ok-Topk through peer memory is still running when this returns. Work that is put on
        the stream next sees `update`. The report is complete when the next step begins, or after `complete`. The host does not
        help such a step, which differs from one that is waited for:

        - A global threshold that missed moves to the best candidate that keeps between k/2 and 5k/4.
        - A selection that should be exact, but packs less than k by its guess, is exact in the next step.
        - A step that needs the host is given up: `update` is zero, and the gradient stays in the residual. That is rare: a
          selection of more than 2k, no such candidate, a region that got far too much, kept entries far from balanced. The
          following steps are waited for until eight in a row did not need the host, as at the beginning. So they are after a
          step in which some rank selects fewer than k/2, and not all nonzeros.
        - A gradient that is not finite is found a step later.

        Args:
            gradient: [n] of the gradient type, C-contiguous, on the device; unchanged. bfloat16 is passed as uint16. Or a tensor
                list, where `reads_tensors` allows it, or a `displacement`.
            measure: take the paper's measures of a sparse step, see `oktopk.metrics`. They cost two dense allreduces, which the
                report's traffic and seconds leave out. Equal on all ranks. The update does not depend on it.
            problem: an error that the caller found on this rank alone; every rank then raises it, and nothing is applied.
            absent: spans (begin, end) of elements of which this rank has no gradient, ascending: what its residual
                holds there stays, until a step does not name them. Of `gradient` zero there. In two levels where no rank of the
                host has one, and only with a token.
            token: a word that `tokens` shows on all ranks, as `collectives.tokens.token_of` makes it, the first checksum of what
                `absent` names. On every rank or on none.

        Raises:
            NonFiniteGradientError: gradient + residual is NaN or Inf on some rank, or the sum over the ranks is, and the settings
                ask to raise; on every rank alike. For a deferred step, when the next one begins.
            TypeError, ValueError: the gradient has another type or length, is not contiguous, or is this reducer's update; on
                this rank alone. Start jobs so that they end when a rank raises (`python -m mpi4py`).
            ValueError: a rank has a problem, or no memory for the first step of a method or the first measured one; on every rank
                alike. (Through peer memory the others raise a RuntimeError that names the rank, a deferred step's in the next.)
            MissingRanksError: ranks did not come within `Settings.timeout`; on the others, and on a missing rank when it comes.
            RuntimeError: there is no peer memory for a new k, on every rank alike; or a kernel failed, on this rank alone.
        """
        return self._take(gradient, problem, absent, token, measure=measure, wait=True)

    def begin(
        self,
        gradient: Vector | GradientTensors,
        *,
        problem: str = "",
        absent: Spans = (),
        token: int | None = None,
    ) -> StepReport:
        """Start a step, which `complete` ends. Collective: every rank must call, and then `complete`, before the next step.

        A step whose kernels do all of it (`reads_tensors`) is put on the stream, and nothing is waited for but the other ranks'
        hosts where it renews its regions. `awaited` tells whether its outcome is still open; the report is then
        incomplete. Other steps run as `step`, and have ended when this returns. The bits are those of `step`.

        Until `complete` has returned, `update` and `residual` do not hold; the report's last stage lasts until then.

        Args:
            gradient, problem, absent, token: as `step`; the gradient is unchanged until `complete` returns.

        Raises:
            NonFiniteGradientError, TypeError, ValueError, MissingRanksError, RuntimeError: as `step`.
        """
        return self._take(gradient, problem, absent, token, measure=False, wait=False)

    def subtract_update(self, vector: Vector) -> None:
        """vector -= update, of a step that has ended: by the applied entries, where the step knows them. No traffic.

        Args:
            vector: float32[n] on the device.

        Memory traffic: some 40 bytes an entry of the update, where the step knows them; else 12n bytes.
        """
        support = self._vectors.support
        with self.backend.stream_scope():
            if support is None:
                vector -= self._vectors.update
            elif support.nnz:
                scale = 1.0 / self.transport.size if self.settings.average else 1.0
                self.backend.kernels.add_entries(vector, support.entries, -scale)

    def forget_support(self) -> None:
        """Tell that `writable_update` was written to: the next step zeroes all of it, not only the applied entries."""
        self._vectors.support = None

    @closes
    def close(self) -> None:
        """Free what the library and the device hold. Collective. The report of a deferred step stays incomplete.

        Every public call raises RuntimeError from then on, but `close`, which does nothing. Ranks that call `step` in place of it
        name this rank, and the call.
        """
        announce(self.transports)
        if self._sampler is not None:
            self._sampler.close()
        with self.backend.stream_scope():
            for executor in self._executors.values():
                executor.close()
            self._placement.close()
        self.transport.close()
