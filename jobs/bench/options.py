"""The bench's options with their defaults, and which of them the GPU table takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.bench.document import HOST_ROWS, NCCL_ROWS
from jobs.bench.mpi import ALGORITHMS
from oktopk import METHODS, Settings

OVER_MPI = "oktopk-mpi"
"""On a GPU: Ok-Topk kept to MPI where it could do without."""
KNOWN = {
    "cpu": (*METHODS, *ALGORITHMS, *HOST_ROWS),
    "cuda": (*METHODS, OVER_MPI, *NCCL_ROWS, *HOST_ROWS),
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
        lengths: n, of each run; empty for the GPU table, which has its own.
        warmup, dense_steps: -1 until they are known, by the density and the steps.
        gradient_type: a name in GRADIENT_TYPES[device]; "" for both types of the GPU table.
        settings: keywords of oktopk.Settings besides density, for all methods.
        ranks: numbers of ranks to start an ablation on; empty: none are started.
        memory: watch allocations in the last steps of the warm-up.
        link: rate of each host's link, as `jobs.bench.document.bits_per_second` takes it; "" where it is not given.
        table: "gpu", or "" for none.
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


OF_THE_GPU_TABLE = ("rows", "budget")
"""Fields of Options that the GPU table alone takes."""
OF_EVERY_BENCH = ("table", "device", "gradient_type", "seed", "json", "network", "quiet", "commit")
DEFAULTS: dict[str, dict[str, Any]] = {
    "ablate": {"methods": ("oktopk",), "gradients": "clustered"},
    # an allgather of every selection crosses dense at 1/density ranks: within a sweep to 64
    "sweep": {"methods": tuple(METHODS), "lengths": (100_000,), "density": 0.02, "memory": False},
    "gpu": {
        "device": "cuda",
        "lengths": (),
        "gradient_type": "",
        "methods": ("oktopk", OVER_MPI, *NCCL_ROWS),
        "budget": 300.0,
    },
}
""""gpu", "ablate" or "sweep" -> defaults that are not those of Options."""
