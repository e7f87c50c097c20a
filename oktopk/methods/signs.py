"""Signs: the ranks send one bit for each element of a part of the vector, another part in each step."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.cpu.signs import BLOCK, CODE_WORDS, block_bounds
from collectives.sparse import SparseVector
from collectives.transport import FlaggedRanksError, Round, Transport
from oktopk.methods.base import Method
from oktopk.settings import Settings
from oktopk.step import Plan, StepResult
from oktopk.thresholds import NOTHING


def sign_words(elements: int, ranks: int) -> float:
    """Words per rank of a step that sends so many elements, up to what a block is longer than what it holds."""
    return 2 * elements * CODE_WORDS / BLOCK * (ranks - 1) / ranks


def slice_end(turn: int, turns: int, share: float) -> int:
    """Where the slice ends that begins with this turn, of round(1 / share) slices, as equal as they can be."""
    slices = min(turns, max(1, round(1 / share)))
    return next(end for number in range(slices) if (end := turns * (number + 1) // slices) > turn)


def own_blocks(bounds: NDArray[np.int64], rank: int, ranks: int) -> NDArray[np.int64]:
    """int64[blocks of this rank], their elements."""
    return np.diff(bounds)[rank::ranks]


def sign_words_of_step(length: int, k: int, ranks: int) -> tuple[float, float]:
    """Least and most words per rank of a step, for a vector of one part and a density of k / length."""
    turns = max(1, -(-length // (BLOCK * ranks)))
    slices = min(turns, max(1, round(length / k)))
    least, most = turns // slices, -(-turns // slices)
    return sign_words(least * ranks * BLOCK, ranks), sign_words(most * ranks * BLOCK, ranks)


class Signs(Method):
    """Every element of a slice of the vector, as its sign and the mean magnitude of its block of at most 512 elements.

    No block has elements of two parameters, where these are known: under updates, and where `DistributedOptimizer` sums gradients
    as one vector. Blocks are dealt to the ranks in turn. A rank sends the code of each block to its owner, and its residual loses
    what the code decodes to. The owner adds what it has kept of the block, codes the sum in the same way, keeps what that loses,
    and sends the code to all. Of a block that no rank has sent anything of, it keeps what it has. The next step goes on behind
    this slice, and at the end of the vector from its beginning.

    There are round(1 / `density`) slices, by default 2: a step then sends a 60th of the words of a dense one of float32. No
    thresholds, no indices. Under updates the default of `local_share` is 1.

    An element of zero in a block that is not zero counts as positive: it is sent as the mean, and later steps take that back.

    Traffic: `sign_words`, and up to a block for each rank; 2(P-1) messages. Control: an allgather of a flag and an allreduce.
    Memory: beside the residual 8n/P bytes, half of it for what the codes of the rank's own blocks have lost; 8n/512 for where
        blocks begin, on a GPU twice; of the slice 2.1 + 1.1/P bits an element, and 4/P bytes.
    Source: own; Seide et al., 1-bit SGD, Interspeech 2014, has the code and the residual; Tang et al., DoubleSqueeze, ICML
        2019, the second residual, of the owner; Beton et al., Sparse Parameter Averaging, 2025, average a part of the
        parameters in each step.
    """

    name = "signs"
    dense_update = True
    density = 0.5
    dense_above = 1.0
    local_share = 1.0
    keeps = True

    def __init__(self, length: int, transport: Transport, kernels: ModuleType, settings: Settings) -> None:
        super().__init__(length, transport, kernels, settings)
        self._next_turn = 0  # that the next slice begins with
        self._last: Any = None  # what was kept of the last slice before it, and where
        self._memory: dict[str, Any] = {}
        self.take_parts([length])

    def take_parts(self, sizes: Sequence[int]) -> None:
        transport = self.transport
        self._parts = list(sizes)
        bounds = block_bounds(sizes)
        # in each of which each rank has a block
        self._turns = max(1, -(-(len(bounds) - 1) // transport.size))
        # where the blocks that this rank has begin in `_kept`
        self._own = np.append(0, np.cumsum(own_blocks(bounds, transport.rank, transport.size)))
        self._bounds, self._own_bounds = map(transport.kernels.place_bounds, (bounds, self._own))
        self._kept: Any = None
        self._slices = bounds  # on the host

    @classmethod
    def flat_reason(cls) -> str:
        return ""

    @property
    def reads_displacements(self) -> bool:
        return True

    def reduce(
        self,
        gradient: NDArray[np.float32],
        residual: NDArray[np.float32] | None,
        out: NDArray[np.float32] | None,
        plan: Plan,
        overflowed: bool = False,
    ) -> StepResult:
        assert residual is not None and out is not None, "it needs a residual, and writes out"
        transport, kernels = self.transport, self.transport.kernels
        self._last = None
        with plan.timer.stage("select"):
            nothing = transport.workspace.entries("nothing", 1 + self.kernels.BLOCK)
            nonfinite = self.kernels.accumulate_select(gradient, residual, NOTHING, nothing).nonfinite
        try:
            flags = transport.allgather_control(np.array([nonfinite > 0 or overflowed], np.int64))
            if flags.any():
                raise FlaggedRanksError(np.flatnonzero(flags).tolist())
            turn, first = self._next_turn, self._next_turn * transport.size
            turns = slice_end(turn, self._turns, plan.share) - turn
            with plan.timer.stage("select"):
                sent = self._words("sent", turns, transport.size)
                kernels.encode_signs(residual, self._bounds, first, transport.size, sent)
            with plan.timer.stage("exchange"):
                received = self._words("received", turns, transport.size)
                self._exchange(sent, received)
            with plan.timer.stage("reduce"):
                kept, sums = self._keep(), self._scratch("sums", int(self._own[-1]))
                finite = kernels.sum_signs(received, transport.size, self._own_bounds, turn, kept, sums)
                if transport.allreduce_control(np.array([not finite], np.int64))[0]:
                    raise FlaggedRanksError([])
        except FlaggedRanksError:
            self.kernels.undo_accumulate(gradient, residual, not nonfinite)
            raise
        with plan.timer.stage("reduce"):
            coded = self._words("coded", turns, 1)
            kernels.encode_signs(sums, self._own_bounds, turn, 1, coded)
            # of a block that no rank has sent anything of, as where none has a gradient, what is kept waits
            heard = received.reshape(transport.size, turns, CODE_WORDS)[:, :, 0].any(axis=0)
            coded.reshape(turns, CODE_WORDS)[~heard] = 0
        with plan.timer.stage("allgather"):
            applied = received  # as many words, and free now
            self._exchange(coded, applied)
        with plan.timer.stage("apply"):
            kernels.subtract_signs(sums, self._own_bounds, turn, 1, coded)
            kernels.write_signs(out, self._bounds, first, transport.size, applied, plan.scale)

        def settle() -> None:
            begin, end = self._own[[turn, min(turn + turns, len(self._own) - 1)]].tolist()
            before = self._scratch("before", end - begin)
            before[:] = kept[begin:end]
            kept[begin:end] = sums[begin:end]
            self._last = kept[begin:end], before
            kernels.subtract_signs(residual, self._bounds, first, transport.size, sent)
            self._next_turn = (turn + turns) % self._turns

        ends = self._slices[[first, min(first + turns * transport.size, len(self._slices) - 1)]]
        size = int(ends[1] - ends[0])
        none = SparseVector(nothing[:0], self.length)
        return StepResult(None, none, local_nnz=size, global_nnz=size, settle=settle)

    def _exchange(self, outgoing: Any, incoming: Any) -> None:
        """Send each rank its part of `outgoing`, or all of it to each; `incoming` gets a part from each, this one's own too."""
        rank, size = self.transport.rank, self.transport.size
        part = len(incoming) // size
        parts = [slice(each * part, (each + 1) * part) for each in range(size)]
        everything = len(outgoing) == part

        def to(dest: int) -> Any:
            return outgoing if everything else outgoing[parts[dest]]

        rounds = [
            Round(dest, to(dest), source, incoming[parts[source]])
            for each in range(1, size)
            for dest, source in [((rank + each) % size, (rank - each) % size)]
        ]
        arrivals = self.transport.exchange(rounds, self.settings.bucket_rounds)
        incoming[parts[rank]] = to(rank)
        for _ in arrivals:
            pass

    def _words(self, name: str, turns: int, owners: int) -> Any:
        return self._scratch(name, owners * turns * CODE_WORDS)

    def _scratch(self, name: str, count: int) -> Any:
        """float32[count] of memory that stays."""
        if name not in self._memory or len(self._memory[name]) < count:
            self._memory[name] = self.transport.allocate(count)
        return self._memory[name][:count]

    def _keep(self) -> Any:
        """What this rank has kept of its blocks, zero in the first step."""
        if self._kept is None:
            self._kept = self.transport.allocate(int(self._own[-1]))
            self._kept[:] = 0
        return self._kept

    def take_back(self) -> None:
        if self._last is not None:
            kept, before = self._last
            kept[:] = before

    # state

    @staticmethod
    def agreed_state(state: dict[str, Any]) -> Any:
        return state["next"], state["parts"]

    @classmethod
    def state_problem(cls, state: dict[str, Any], length: int, rank: int, ranks: int) -> str:
        parts, kept = state["parts"], state["kept"]
        if any(type(part) is not int or part < 0 for part in parts) or sum(parts) != length:
            return f"signs have parts of {sum(parts)} elements, not {length}"
        if type(state["next"]) is not int or state["next"] < 0:
            return f"signs go on at turn {state['next']!r}"
        if kept is None:
            return ""
        own = int(own_blocks(block_bounds(parts), rank, ranks).sum())
        if str(kept.dtype).removeprefix("torch.") != "float32" or tuple(kept.shape) != (own,):
            return f"what signs have kept is {kept.dtype}{list(kept.shape)}, not float32[{own}]"
        return "" if np.isfinite(np.asarray(kept)).all() else "what signs have kept is not finite"

    @staticmethod
    def unsent(state: dict[str, Any], rank: int, ranks: int, length: int) -> NDArray[np.float32] | None:
        if state["kept"] is None:
            return None
        bounds = block_bounds(state["parts"])
        mine = np.repeat(np.arange(len(bounds) - 1) % ranks == rank, np.diff(bounds))  # as `own_blocks`
        whole = np.zeros(length, np.float32)
        whole[mine] = np.asarray(state["kept"])
        return whole

    def state_dict(self) -> dict[str, Any]:
        kept = None if self._kept is None else self.transport.kernels.to_host(self._kept)
        return {"next": self._next_turn, "parts": self._parts, "kept": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.take_parts(state["parts"])
        self._next_turn, self._last = state["next"] % self._turns, None
        if state["kept"] is not None:
            self.transport.kernels.copy_from_host(self._keep(), np.asarray(state["kept"]))
