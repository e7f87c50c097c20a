"""The ranks of this rank's host, and what they do together: sum their gradients in shards, and share what came back."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collectives.allgatherv import allgatherv
from collectives.closing import closes
from collectives.sparse import SparseVector
from collectives.traffic import Traffic
from collectives.transport import Transport
from oktopk.backend import Backend
from oktopk.levels import Layout
from oktopk.shard_group import ShardGroup

if TYPE_CHECKING:
    from collectives.entry_windows import DeviceEntryWindows


class HostGroup:
    """The ranks of one host.

    Args:
        transport: of all ranks. Collective: every rank must construct.
        layout: of the vector over them.
        backend: of the gradients.
        peer_memory: as `GradientAllreduce` takes it.

    Raises:
        ValueError: the ranks of a host cannot read each other's gradients, or there is no memory for them; on every rank alike.

    Attributes:
        host: transport among the ranks of this host.
        between: transport among the ranks that hold this shard on all hosts; None where this rank holds no shard.
        holders: transport among the ranks of this host that hold a shard; None for one alone, and where this rank holds none.
        layout: of the vector.
        shard: of this rank, None for a rank that holds none.
        gradient: [n] of the gradient type, where this rank's may be written for steps to read it without a copy. The array keeps
            its memory after `close`.

    Memory: n words of gradient and n/G of a shard; on GPUs a window of the update's entries of a shard.
    """

    def __init__(
        self, transport: Transport, layout: Layout, backend: Backend, peer_memory: bool | None
    ) -> None:
        number = layout.hosts[transport.rank]
        self.layout, self.shard = layout, layout.shard_of(transport.rank)
        self._backend, self._sum, self._being_read = backend, None, False
        with ExitStack() as opened:  # closed where this raises
            host = transport.split(number)
            assert host is not None
            opened.callback(host.close)
            self.host = host
            self.between = transport.split(self.shard)
            self.holders = transport.split(number if self.shard is not None and layout.shards > 1 else None)
            for part in (self.between, self.holders):
                if part is not None:
                    opened.callback(part.close)
            with transport.together():
                longest = layout.shard_length(0)
                self._shared = backend.shared_gradients(host, layout.length, longest, peer_memory)
                opened.callback(self._shared.close)
                self._part = self._shared.shard_of(host.rank, self.shard_length)
                if self.shard is not None:
                    self._sum = self._shared.sum_of_shard(layout, self.shard, self._part)
            opened.pop_all()
        self.gradient = self._shared.own
        self._windows = backend.entry_windows(self.host)
        self._limit: tuple[str, float, str] | None = None

    def publish(self, gradient: Any, flag: bool, token: int | None = None) -> bool:
        """Let the other ranks of the host read this rank's gradient. Collective.

        Args:
            gradient: [n], as `Backend.validate` returns it; None: what they read stays as it is.
            flag: of this rank.
            token: as `Transport.carrying`, of `host`.

        Returns:
            Whether any rank of the host raised its flag. By then every rank has ended the copies of the step before, too, so that
            entries and shards may be published again.
        """
        if gradient is None:
            self._backend.wait()  # the copies of the step before
        else:
            self._shared.publish(gradient)
        # it is also the barrier after which the gradients may be read, and shards be overwritten
        self._being_read = False
        with self.host.carrying(token):
            return bool(self.host.allgather_control(np.array([flag], np.int64)).any())

    def sum(self, at_once: bool) -> Any:
        """The sum of this rank's shard of the host's published gradients, in rank order; valid until they change.

        Args:
            at_once: as float32[shard]; else as what `accumulate_select` of the kernels takes, which may sum while it reads.
        """
        assert self._sum is not None
        return self._sum.summed() if at_once else self._sum

    def mean(self, flag: bool, token: int | None = None) -> tuple[int, ...] | None:
        """As `GradientAllreduce.mean_in_host`, of `gradient`. Collective."""
        if self.publish(self.gradient, flag, token):
            return None
        own = self.new_shard() if self._sum is None else self.sum(at_once=True)
        own /= np.float32(self.host.size)
        self.share_shards(own, self.gradient)
        return () if token is None else self.host.tokens or ()

    def share_shards(self, own: Any, whole: Any) -> None:
        """Fill float32[n] with the shards of all ranks of the host. Collective.

        A GPU may still copy on return, from the memory of the other ranks: they close the group, or wait for this one, before
        their processes end. CUDA calls anything else undefined; what one H200 did is in docs/results/gpu.md.

        Args:
            own: float32[shard], or what `sum` gave; empty for a rank that holds no shard.
            whole: float32[n], of which other ranks read nothing.

        Traffic: a control allreduce of one int64 in the host; two where `publish` was not called since the last shards were
            shared. Memory traffic: n float32 are read, those of other ranks from their memory.
        """
        if own is not self._part:
            if self._being_read:
                self._meet()
            self._part[:] = own
        self._meet()
        self._being_read = True
        for shard in range(self.layout.shards):  # rank r of a host holds shard r
            part = self._shared.shard_of(shard, self.layout.shard_length(shard))
            self.layout.insert(part, shard, whole)

    def _meet(self) -> None:
        """Wait for this rank's stream, then for all ranks of the host."""
        self._backend.wait()
        self._limit_next()
        self.host.allreduce_control(np.zeros(1, np.int64))

    def share_outcome(self, outcome: list[int], token: int | None = None) -> NDArray[np.int64]:
        """int64[G, m], what every rank of the host says of its shard's step; token as `publish`. Collective.

        After it the gradients of the host may change, as every rank has read them, unless a rank takes its step back: then after
        `end_reading`. A limit that `expect_all` set holds for both, too.
        """
        self._limit_next()
        with self.host.carrying(token):
            return self.host.allgather_control(np.array(outcome, np.int64))

    def end_reading(self) -> None:
        """Wait until every rank has taken back what it added of the host's gradients, which may change then. Collective."""
        self._meet()

    def _limit_next(self) -> None:
        if self._limit is not None:
            self.host.expect_all(*self._limit)

    def publish_entries(self, selected: SparseVector | None) -> None:
        """Let the other ranks of the host read entries after `share_outcome`, where windows have room for them.

        Args:
            selected: of this rank's shard, in the shard's indices, which stay as they are; None for nothing.
        """
        if self._windows is not None and selected is not None and 0 < selected.nnz <= self._windows.capacity:
            self.in_whole_indices(SparseVector(self._windows.write(selected.entries), selected.length))
            self._backend.wait()  # the others read after a collective operation that knows no streams

    def share_entries(self, selected: SparseVector | None, counts: NDArray[np.int64]) -> SparseVector:
        """The update's entries of all shards, with their indices in the whole vector, shard by shard. Collective.

        Args:
            selected: of this rank's shard, in the shard's indices, which may be overwritten; `publish_entries` had them before
                `share_outcome`. None for a rank that holds no shard.
            counts: int64[G], entries of each rank of the host.

        Returns:
            The entries; they lie in the host transport's workspace until the next call.

        Raises:
            MissingRanksError: where larger windows are opened, and a rank does not come within the limit of `expect_all`.

        Traffic: an allgatherv in the host. On GPUs each rank copies the entries of the others from their windows: 8 bytes for
            each own entry and each other rank, one message to each. What opens larger windows now and then is not counted.
        """
        host, layout = self.host, self.layout
        gathered = host.workspace.entries("gathered", int(counts.sum()))
        if self._windows is not None and self._make_room(self._windows, selected, int(counts.max())):
            self._windows.gather(gathered, counts)
        else:
            own = gathered[:0] if selected is None else self.in_whole_indices(selected).entries
            allgatherv(gathered, counts, host, own)
        return SparseVector(gathered, layout.length)

    def _make_room(self, windows: DeviceEntryWindows, selected: SparseVector | None, most: int) -> bool:
        """Get all ranks' entries into windows, opening larger ones where needed; False where there is no memory. Collective."""
        if most > windows.capacity:
            self._limit_next()
            if not windows.reserve(most):
                self.host.expect_none()
                return False
            self.publish_entries(selected)
            self._limit_next()
            self.host.barrier()
        return True

    def share_values(self, own_values: Any, whole: Any) -> None:
        """Fill float32[n] with the shards of all ranks of the host. Collective.

        Args:
            own_values: float32[shard]; empty for a rank that holds no shard.
        """
        layout, host = self.layout, self.host
        counts = [layout.shard_length(s) if s < layout.shards else 0 for s in range(host.size)]
        gathered = host.allocate(layout.length)
        allgatherv(gathered, np.array(counts, np.int64), host, own_values)
        at = 0
        for shard in range(layout.shards):
            layout.insert(gathered[at : at + counts[shard]], shard, whole)
            at += counts[shard]
        self._backend.wait()  # before the scratch is freed

    def new_shard(self) -> Any:
        """float32[shard] of zeros; empty for a rank that holds none."""
        return self._backend.zeros(self.shard_length)

    @property
    def shard_group(self) -> ShardGroup:
        """The ranks of this host that hold a shard, as a selection takes them."""
        return ShardGroup(self.holders)

    @property
    def shard_length(self) -> int:
        """Elements of this rank's shard; 0 for a rank that holds none."""
        return self.layout.shard_length(self.shard)

    def in_whole_indices(self, selected: SparseVector) -> SparseVector:
        """Entries of this rank's shard with their indices in the whole vector, in place."""
        if self.shard is not None and self.layout.shards > 1:
            layout = self.layout
            self._backend.kernels.to_whole_indices(selected.entries, layout.block, layout.shards, self.shard)
        return SparseVector(selected.entries, self.layout.length)

    def expect_all(self, what: str, seconds: float, advice: str) -> None:
        """As `Transport.expect_all`, for the next operation in the host and between hosts; see `share_outcome`."""
        self._limit = what, seconds, advice
        for transport in self._transports:
            transport.expect_all(*self._limit)

    def expect_none(self) -> None:
        """As `Transport.expect_none`."""
        self._limit = None
        for transport in self._transports:
            transport.expect_none()

    def take_traffic(self) -> Traffic:
        """As `Transport.take_traffic`, of all that this rank sent."""
        parts = [transport.take_traffic() for transport in self._transports]
        return sum(parts, Traffic())

    @closes
    def close(self) -> None:
        """Free what the library and the device hold. Collective."""
        if any(transport.gave_up for transport in self._transports):
            return
        self._sum = None
        if self._windows is not None:
            self._windows.close()
        self._shared.close()
        for transport in self._transports:
            transport.close()

    @property
    def _transports(self) -> list[Transport]:
        return [each for each in (self.host, self.between, self.holders) if each is not None]
