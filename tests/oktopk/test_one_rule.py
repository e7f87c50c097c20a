"""The rule for the global threshold between exact steps is the same in Python and in CUDA; skipped where there is no GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from oktopk.settings import selection_cap
from oktopk.thresholds import CANDIDATES, MISS, NOTHING, candidate_bits, choose_candidate
from tests.devices import on_gpus

pytestmark = [on_gpus, pytest.mark.host_cuda(ranks=0)]

TOLERANCE, TRIGGER = 0.01, 1e9
MIDDLE = len(CANDIDATES) // 2


class Decider:
    """decide.cu with the window of one rank, into which the counts of all ranks are written."""

    def __init__(self, ranks: int, k: int) -> None:
        from collectives.cuda.device import Device
        from collectives.cuda.launch import Kernel, compiled
        from collectives.cuda.layouts import DECISION_WORDS, P2P, Decision, Step, WindowHead
        from oktopk.cuda.kernels import _KERNELS
        from oktopk.cuda.mailbox import Mailbox

        self.ranks, self.k = ranks, k
        self.device = device = Device()
        self.decision_type, self.step_type = Decision, Step
        self.head = self.words(WindowHead)
        self.step, self.decision = self.words(Step), self.words(Decision)
        self.windows = device.allocate(ranks, np.uint64)
        self.windows.set(np.full(ranks, self.head.data.ptr, np.uint64))
        self.head_type = WindowHead
        self.mailbox = Mailbox(device, f"decided {ranks}", DECISION_WORDS + ranks)
        p2p = P2P(self.windows.data.ptr, ranks, 0, self.step.data.ptr, self.decision.data.ptr)
        self.launch = Kernel(compiled(_KERNELS / "decide.cu"), "decide").prepare(
            p2p=p2p,
            candidates=device.table(CANDIDATES),
            k=k,
            cap=selection_cap(k),
            tolerance=TOLERANCE,
            miss=MISS,
            trigger=TRIGGER,
            mailbox=self.mailbox.address,
        )

    def words(self, struct: Any) -> Any:
        """Zeroed device memory for a struct."""
        memory = self.device.allocate(ctypes.sizeof(struct) // 4, np.uint32)
        memory.fill(0)
        return memory

    def decide(self, counts: NDArray[np.uint32], expected: int, deferred: bool) -> Any:
        """The decision over uint32[ranks, 65]: sums between each candidate and the next."""
        from collectives.cuda.layouts import COUNTED, DEFERRED

        epoch = self.device.next_epoch()
        head = self.head_type()
        for rank in range(self.ranks):
            head.signals[COUNTED][rank] = epoch
            for candidate in range(len(CANDIDATES)):
                head.messages[COUNTED][rank][candidate] = int(counts[rank, candidate])
        step = self.step_type(epoch=epoch, global_bits=expected, flags=DEFERRED if deferred else 0)
        for memory, value in ((self.head, head), (self.step, step), (self.decision, self.decision_type())):
            memory.set(np.frombuffer(bytes(value), np.uint32))
        self.launch(1, 128, self.device.stream.ptr)
        self.device.synchronize()
        return self.decision_type.from_buffer_copy(np.asarray(self.decision.get()).tobytes())


def counts_around(rng: np.random.Generator, ranks: int, k: int, kind: int) -> NDArray[np.uint32]:
    """Counts between candidates whose sums lie near k, far from it, or nowhere."""
    if kind == 0:  # nothing reaches any candidate, or the highest alone
        counts = np.zeros((ranks, len(CANDIDATES)), np.uint32)
        counts[:, -1] = rng.integers(0, 3 * k // ranks + 1, ranks)
        return counts
    shares = rng.random((ranks, len(CANDIDATES))) ** rng.integers(1, 30)
    scale = k * rng.choice([0.2, 0.5, 0.9, 0.99, 1.0, 1.01, 1.04, 1.06, 1.2, 1.3, 3.0])
    # so many are to reach one of the candidates, often the middle
    reached = MIDDLE if kind == 1 else int(rng.integers(0, len(CANDIDATES)))
    return (shares * scale / max(shares[:, reached:].sum(), 1e-9)).clip(0, 4 * k).astype(np.uint32)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_host_and_kernel_choose_alike(ranks: int, deferred: bool) -> None:
    from collectives.cuda.layouts import BAD_THRESHOLD, PROCEED

    rng = np.random.default_rng((ranks, deferred))
    outcomes = set()
    for k in (1, 2, 7, 1000):
        decider = Decider(ranks, k)
        for trial in range(60):
            counts = counts_around(rng, ranks, k, trial % 3)
            # low ones, near zero, where the lowest candidate takes every sum; usual ones; and the largest
            expected = int(rng.choice([1, 1 << 20, 0x3F800000, NOTHING - 1]))
            totals = counts.sum(axis=0, dtype=np.int64)[::-1].cumsum()[::-1]
            choice = choose_candidate(totals, expected, k, TOLERANCE, may_go_exact_now=not deferred)
            decision = decider.decide(counts, expected, deferred)
            assert decision.stop == (BAD_THRESHOLD if choice.needs_exact else PROCEED), (k, trial)
            assert decision.nearest == choice.nearest
            if not choice.needs_exact:
                assert decision.bits == candidate_bits(expected, choice.candidate)
                assert decision.total == totals[choice.candidate]
                assert list(decision.counts[:ranks]) == counts[:, choice.candidate :].sum(axis=1).tolist()
            outcomes.add((choice.needs_exact, choice.candidate == MIDDLE, choice.candidate == choice.nearest))
    # every branch was taken
    assert {exact for exact, _, _ in outcomes} == {False, True}
    assert len(outcomes) >= 4 + deferred
