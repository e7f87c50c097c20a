"""The rows of a plan: settings, and what a training step with them is predicted to take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from collectives.grid import rows_of_grid
from collectives.sparse import ENTRY
from oktopk.methods import METHODS as KINDS
from oktopk.plan.losses import loss_of, nearest_loss
from oktopk.replay.network import Network
from oktopk.replay.prediction import Kernels, Prediction, mean_seconds, predict, ring_seconds
from oktopk.replay.program import RECORDED
from oktopk.replay.recording import Step
from oktopk.settings import Settings, entries_kept

METHODS = ("union", "oktopk")
DENSITIES = (0.0125, 0.0625)
"""Those whose losses were measured."""
WIRES = ("float32", "int4")
EVERY = (1, 4)

MOST_HOSTS = 4096

MOST_FLAT = 1024
"""Ranks beyond which flat steps with several ranks a host are replayed only where asked for: a minute each."""

LEAST_GRID = 16
"""Ranks below which an exchange over a grid was the faster one of no replay, see docs/results/replayed.md."""

WORTH_GRID = 1.1
"""How many times as fast an exchange over a grid must be: what its kernels sum twice is not counted."""

_BACKWARD = 2 / 3
"""Of the time of computation, in which gradients come: dense sums in buckets can hide behind it."""


@dataclass(frozen=True)
class Job:
    """What is to be trained.

    Attributes:
        parameters: elements (n).
        compute: seconds of forward and backward pass of one rank, without communication.
        hosts, ranks_per_host: of the cluster.
    """

    parameters: int
    compute: float
    hosts: int
    ranks_per_host: int

    @property
    def ranks(self) -> int:
        """Of all hosts."""
        return self.hosts * self.ranks_per_host

    def __str__(self) -> str:
        of_step = f"{self.parameters / 1e6:,.1f} M parameters, {1e3 * self.compute:g} ms"
        of_hosts = f"{self.hosts} host(s) of {self.ranks_per_host} rank(s)"
        return f"{of_step} of computation a step, {of_hosts}"


@dataclass(frozen=True)
class Row:
    """Settings with a prediction. Times are of one training step in the mean over `every`.

    Attributes:
        method: "dense", "union" or "oktopk".
        density, wire, every: settings; a dense wire is the type of the elements.
        levels: "hosts" where a host is one replica, else "flat".
        seconds: of a step.
        select, exchange: of these, in selection and in the rest of the exchange; wait: of the
            latter, for other ranks.
        hides: seconds of the exchange behind the backward pass, which `seconds` leave out.
        host_bytes: that a host sends in a step.
        memory: bytes of a rank beside parameters, gradients and the optimizer's state.
        loss: that was measured, see `loss_of`.
        nearest: where it was not, see `nearest_loss`; else "".
        extrapolated: see `Prediction`.
        grid: exchange is "grid".
    """

    method: str
    density: float
    wire: str
    levels: str
    every: int
    seconds: float
    select: float
    exchange: float
    wait: float
    hides: float
    host_bytes: float
    memory: float
    loss: str
    nearest: str = ""
    extrapolated: bool = False
    grid: bool = False


def dense_rows(job: Job, network: Network) -> list[Row]:
    """Dense sums by rings, in float32 and in bfloat16, in buckets behind the backward pass."""
    rows = []
    for wire, width in (("float32", 4), ("bfloat16", 2)):
        nbytes = width * job.parameters
        exchange = ring_seconds(network, job.hosts, nbytes)
        hides = min(exchange, _BACKWARD * job.compute)
        sent = 2 * nbytes * (job.hosts - 1) / job.hosts
        seconds = job.compute + exchange - hides
        memory = 4 * job.parameters + (nbytes if width < 4 else 0)
        parts = seconds, 0.0, exchange, 0.0, hides
        rows.append(Row("dense", 1.0, wire, "-", 1, *parts, sent, memory, "0"))
    return rows


def sparse_rows(
    job: Job,
    network: Network,
    kernels: Kernels,
    methods: Sequence[str] = METHODS,
    densities: Sequence[float] = DENSITIES,
    wires: Sequence[str] = WIRES,
    levels: Sequence[str] = (),
    every: Sequence[int] = EVERY,
    updates: bool = True,
    exchange: str = "auto",
) -> list[Row]:
    """Updates by each of these settings.

    Args:
        levels: "hosts", "flat" or both; empty: both, but flat steps of more than MOST_FLAT ranks.
        updates: else gradients, in each step.
        exchange: "auto": directly, or over a grid where that is faster.

    Raises:
        ValueError: nothing can be exchanged, or a density is too low or too high for it.
    """
    steps = steps_of(job, methods, densities, wires, levels, updates, exchange)
    return [row for step in steps for row in rows_of(job, network, kernels, step, every)]


def steps_of(
    job: Job,
    methods: Sequence[str],
    densities: Sequence[float],
    wires: Sequence[str],
    levels: Sequence[str],
    updates: bool,
    exchange: str,
) -> Iterator[Step]:
    """The steps of `sparse_rows`."""
    hosts, many = job.hosts, job.ranks_per_host
    several = hosts > 1 and many > 1
    if not levels:
        levels = ["hosts"] if several else []
        levels += ["flat"] if job.ranks <= MOST_FLAT or not several else []
    elif not several:
        levels = ["flat"]
    for method, density, wire, level in product(methods, densities, wires, levels):
        chosen: dict[str, Any] = {"wire": wire, "levels": level, "exchange": exchange}
        yield Step(method, job.parameters, hosts, many, Settings(density=density, **chosen), updates=updates)


_SOONER = 0.98
"""Of the time of one host that is replayed for all: a whole replay was sooner by 0.02 % at most."""


def least_seconds(step: Step, network: Network, kernels: Kernels) -> float:
    """What no row of a step is below, replayed fast: the least of its exchanges, see `predict`.

    0 of few ranks: each of these is replayed, which takes as long as the row itself.
    """
    if step.ranks <= RECORDED:
        return 0.0
    ways = [step, *_over_grid(step)]
    least = min(predict(each, network, kernels, least=True).seconds for each in ways)
    return mean_seconds(step, network, kernels) + _SOONER * least


def _over_grid(step: Step) -> list[Step]:
    """The step over a grid, where its exchange is "auto" and a grid may pay."""
    among, exchange = step.among, step.settings.exchange
    may_pay = KINDS[step.method].over_grid and among >= LEAST_GRID and is_soon_replayed(among)
    over_grid = replace(step, settings=replace(step.settings, exchange="grid"))
    return [over_grid] if may_pay and exchange == "auto" else []


def _of_faster_exchange(step: Step, network: Network, kernels: Kernels) -> Prediction:
    """What a step takes directly, or over a grid where that is faster by a tenth and the setting is "auto".

    It must be so without times of calls, too: on GPUs these are of whole stages, of which a
    direct exchange among many ranks has many.
    """
    direct = predict(step, network, kernels)
    for grid in _over_grid(step):
        over_grid = predict(grid, network, kernels)
        faster, bare = WORTH_GRID * over_grid.seconds < direct.seconds, kernels.without_calls()
        if faster and bare != kernels:
            faster = WORTH_GRID * predict(grid, network, bare).seconds < predict(step, network, bare).seconds
        if faster:
            return over_grid
    return direct


def is_soon_replayed(ranks: int) -> bool:
    """Whether a step over a grid of so many ranks is replayed within seconds.

    Where columns differ every rank is recorded, which takes a minute for a thousand.
    """
    return ranks <= RECORDED or ranks % rows_of_grid(ranks) == 0


def rows_of(
    job: Job,
    network: Network,
    kernels: Kernels,
    step: Step,
    every: Sequence[int],
) -> list[Row]:
    """A step's row for each number of steps between exchanges, directly or over a grid."""
    predicted = _of_faster_exchange(step, network, kernels)
    two, density = step.two_levels, step.settings.density
    replicas = job.hosts if two else job.ranks
    mean = mean_seconds(step, network, kernels)  # in every step
    rows = []
    for steps in every:
        settings = step.method, density, steps, replicas
        loss = loss_of(*settings)
        rows.append(
            Row(
                step.method,
                density,
                step.wire,
                "hosts" if two else "flat",
                steps,
                job.compute + mean + predicted.seconds / steps,
                predicted.select / steps,
                mean + (predicted.seconds - predicted.select) / steps,
                predicted.waited / steps,
                0.0,
                predicted.host_bytes / steps,
                memory_of(step),
                loss,
                nearest_loss(*settings) if loss == "-" else "",
                predicted.extrapolated,
                predicted.step.settings.exchange == "grid",
            )
        )
    return rows


def memory_of(step: Step) -> float:
    """Bytes of a rank, as `UpdatesOptimizer` says, and the method's lists: some 5 of k entries."""
    n, many = step.length, step.ranks_per_host
    lists = 5 * ENTRY.itemsize * entries_kept(step.settings.density, n)
    if step.two_levels:
        return 20 * n + (12 * n + lists) / many
    return 12 * n + lists


def best_first(rows: Sequence[Row]) -> list[Row]:
    """By their time; of equal ones those that send less."""
    return sorted(rows, key=lambda row: (row.seconds, row.host_bytes))


def line_of(row: Row) -> str:
    """The line of Python that trains with a row's settings.

    Raises:
        ValueError: the row is dense.
    """
    if row.method == "dense":
        raise ValueError("dense training needs no DistributedOptimizer")
    replica = "host" if row.levels == "hosts" else "rank"
    words = [
        "optimizer",
        'sends="updates"',
        f"method={row.method!r}".replace("'", '"'),
        f"density={row.density:g}",
        f"wire={row.wire!r}".replace("'", '"'),
        f'replica="{replica}"',
    ]
    words += [f"every={row.every}"] if row.every > 1 else []
    words += ['exchange="grid"'] if row.grid else []
    return f"optimizer = DistributedOptimizer({', '.join(words)})"
