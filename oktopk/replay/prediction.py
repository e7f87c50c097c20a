"""What a step is predicted to take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from oktopk.replay.engine import replay
from oktopk.replay.network import Network
from oktopk.replay.program import RECORDED, of_one_host, program_of, program_of_mean
from oktopk.replay.recording import Step
from oktopk.replay.valueless import WORK


def code_of(wire: str) -> str:
    """The name of what coding takes on a wire, where it is known apart from that of others."""
    return f"code {wire}"


@dataclass(frozen=True)
class Kernels:
    """How long kernels take.

    Attributes:
        times: kind of WORK -> (seconds of a call, seconds of an element). "code" is of wires that
            have no time of their own, by `code_of`.
        source: where these are from, for readers.
    """

    times: dict[str, tuple[float, float]]
    source: str

    def without_calls(self) -> Kernels:
        """The same, where a call takes no time, only elements do."""
        times = {kind: (0.0, each) for kind, (_, each) in self.times.items()}
        return Kernels(times, self.source)

    def rates(self, network: Network, wire: str) -> NDArray[np.float64]:
        """float64[kinds, 2], in the order of WORK, of steps on a wire.

        Elements in another rank's memory take what their bytes take on the link inside a host,
        where they were not measured.
        """
        times = {"peer": (0.0, 4 * network.inside.G)} | self.times
        times["code"] = times.get(code_of(wire), times.get("code", (0.0, 0.0)))
        return np.array([times.get(kind, (0.0, 0.0)) for kind in WORK])


@dataclass(frozen=True)
class Prediction:
    """A step's time and what it sends.

    Attributes:
        step: that was replayed.
        seconds: until the last rank has ended.
        select: of these, in the pass that selects, in the mean over the ranks; kernels: in the
            other kernels; overhead: of processors for messages; waited: the rest.
        host_bytes: that the busiest host sends to others, control exchanges included.
        rank_bytes: payload that a rank sends, in the mean.
        extrapolated: more ranks exchange than those at which the replay was compared with real
            steps.
    """

    step: Step
    seconds: float
    select: float
    kernels: float
    overhead: float
    waited: float
    host_bytes: float
    rank_bytes: float
    extrapolated: bool


_program = lru_cache(8)(program_of)
"""Of the latest steps: the same ones are replayed with other kernels, too."""


def predict(step: Step, network: Network, kernels: Kernels, *, least: bool = False) -> Prediction:
    """Replay one step.

    With one rank a host one of them is replayed for all, see `of_one_host`, where a message takes its sender time (o > 0): the
    times are the same. Without that messages of several senders tie, and their order decides.

    Args:
        network: its `ranks_per_host` is the step's.
        least: replay one host for all also with several ranks a host. Hosts then take messages that come at once in one order,
            which is sooner, by 17 % at most where it was compared, and much faster to replay; once it was later, by 0.02 %.

    Raises:
        ValueError: the step cannot be replayed.
    """
    program, many = _program(step), step.ranks_per_host
    alone = of_one_host(program, many) if least or (many == 1 and network.between.o > 0) else program
    done = replay(alone, network, kernels.rates(network, step.wire))
    by_kind = done.computed.mean(axis=0)
    return Prediction(
        step,
        done.seconds,
        float(by_kind[0]),
        float(by_kind[1:].sum()),
        float(done.overhead.mean()),
        float(done.waited.mean()),
        float(done.host_bytes.max()),
        program.sent,
        step.among > RECORDED,
    )


def mean_seconds(step: Step, network: Network, kernels: Kernels) -> float:
    """What the mean of a host's gradients takes, which precedes each optimizer's step on updates; 0 with other steps."""
    if not (step.two_levels and step.updates):
        return 0.0
    return replay(program_of_mean(step), network, kernels.rates(network, step.wire)).seconds


def ring_seconds(network: Network, hosts: int, nbytes: float) -> float:
    """A dense allreduce by rings: NCCL's and MPI's way with long vectors.

    With several ranks a host the faster of one ring over all ranks, and of rings inside the hosts
    before and after rings between them, one for each rank of a host, which share its link.

    Args:
        nbytes: of the vector.

    Source: Patarasuk & Yuan, J. Parallel Distrib. Comput. 69, 2009.
    """
    many = network.ranks_per_host
    ranks = hosts * many
    if ranks < 2:
        return 0.0
    slowest = network.between if hosts > 1 else network.inside
    # two ranks send to each other
    one = slowest.rounds(2 * (ranks - 1), nbytes / ranks, nbytes / ranks if ranks == 2 else 0.0)
    if many == 1 or hosts == 1:
        return one
    link, part = network.between, nbytes / ranks
    back = part if hosts == 2 else 0.0
    # the other ranks' messages are before it
    queued = (many - 1) * max(link.g, link.G * part + link.D * max(0.0, back - link.S))
    several = link.rounds(2 * (hosts - 1), part, back, queued)
    piece = nbytes / many
    return min(one, several + network.inside.rounds(2 * (many - 1), piece, piece if many == 2 else 0.0))
