"""The bench's options with their defaults, and which of them each table takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.bench.document import HOST_ROWS, NCCL_ROWS
from jobs.bench.mpi import ALGORITHMS
from oktopk import METHODS, Settings

OVER_MPI = "oktopk-mpi"
OWN_ROWS = (OVER_MPI, "oktopk-into-g")
"""On a GPU: Ok-Topk kept to MPI where it could do without, and Ok-Topk whose update is written into the gradient."""
KNOWN = {
    "cpu": (*METHODS, *ALGORITHMS, *HOST_ROWS),
    "cuda": (*METHODS, *OWN_ROWS, *NCCL_ROWS, *HOST_ROWS),
}
"""device -> what `--methods` takes."""
ABLATION_RANKS = (4, 8)
JOB = "OKTOPK_BENCH_JOB"
"""Set in the jobs that a sweep or an ablation starts."""


@dataclass(frozen=True)
class Options:
    """The options with their defaults, equal on all ranks; `--help` explains those that are not listed here.

    Attributes:
        methods: names in KNOWN[device], each once.
        lengths: n, of each run; empty for a table that has its own.
        warmup, dense_steps: -1 until they are known, by the density and the steps.
        gradient_type: a name in GRADIENT_TYPES[device]; "" for all types of a table.
        settings: keywords of oktopk.Settings besides density, for all methods.
        ranks: numbers of ranks to start an ablation on; empty: none are started.
        memory: watch allocations in the last steps of the warm-up.
        link: rate of each host's link, as `jobs.bench.document.bits_per_second` takes it; "" where it is not given.
        table: a name in TABLES; "" for none.
        rows: numbers of the GPU table's rows from 1, empty for all.
        module: that the command of the document names.
    """

    methods: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (14_728_266,)  # of VGG-16
    density: float = 0.01
    steps: int = 64
    warmup: int = -1
    dense_steps: int = -1
    gradients: str = "heavy"
    seed: int = 1
    device: str = "cpu"
    gradient_type: str = "float32"
    settings: dict[str, Any] = field(default_factory=dict)
    ablate: bool = False
    ranks: tuple[int, ...] = ()
    sweep_ranks: tuple[int, ...] = ()
    json: Path | None = None
    memory: bool = True
    network: str = ""
    link: str = ""
    quiet: bool = False
    table: str = ""
    rows: tuple[int, ...] = ()
    budget: float = math.inf
    commit: str = ""
    module: str = "jobs.bench"

    @property
    def length(self) -> int:
        """n, of the first run."""
        return self.lengths[0]

    @property
    def threshold_interval(self) -> int:
        """Steps between exact ones."""
        return int(self.settings.get("threshold_interval", Settings.threshold_interval))


_COURSE = ("lengths", "density", "steps", "warmup", "settings")
TABLES: dict[str, tuple[str, ...]] = {
    "": (
        *("methods", *_COURSE, "dense_steps", "gradients", "gradient_type"),
        *("ablate", "sweep_ranks", "memory", "link"),
    ),
    "dense": ("gradient_type",),
    "gpu": ("rows", "budget", "gradient_type"),
    "hook": _COURSE,
}
"""Table, "" for none -> the fields of Options that it takes besides those of every bench."""
OF_EVERY_BENCH = ("table", "device", "seed", "json", "network", "quiet", "commit")
_GPUS: dict[str, Any] = {"device": "cuda", "lengths": (), "gradient_type": ""}
DEFAULTS: dict[str, dict[str, Any]] = {
    "ablate": {"methods": ("oktopk",), "gradients": "clustered"},
    # an allgather of every selection crosses dense at 1/density ranks: within a sweep to 64
    "sweep": {"methods": tuple(METHODS), "lengths": (100_000,), "density": 0.02, "memory": False},
    "dense": _GPUS,
    "gpu": _GPUS | {"methods": ("oktopk", *OWN_ROWS, *NCCL_ROWS), "budget": 300.0},
}
"""Table, "ablate" or "sweep" -> defaults that are not those of Options."""
