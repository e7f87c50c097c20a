"""How many files one regular step runs through, for a reader who follows an entry. `python -m tests.files_of_a_step` prints them.

Each way is a job of two ranks, hosts one of four. A file counts where Python calls a function of
it, in any thread. Kernels are not seen: neither compiled functions nor `.cu` and `.cuh` files.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
ROOMS = ("collectives", "oktopk")
LENGTH, STEPS = 20_000, 25  # what follows is a regular step: no threshold, region or ratio is due


class Called:
    """Notes the files whose functions are called, in this thread and in those that start later."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self.names.add(frame.f_code.co_filename)

    def files(self) -> list[str]:
        """Those of the library, from the root of the repository."""
        paths = [Path(name) for name in tuple(self.names) if name.startswith(f"{ROOT}/")]
        return sorted(str(each) for path in paths if (each := path.relative_to(ROOT)).parts[0] in ROOMS)


def reduced(device: str) -> Callable[[], Any]:
    """A step of `GradientAllreduce` over messages, or on GPUs through peer memory."""
    import numpy as np
    from mpi4py import MPI

    from oktopk import GradientAllreduce

    settings: dict[str, Any] = {"density": 0.05, "threshold_interval": 64, "boundary_interval": 64}
    gradient: Any = np.random.default_rng(MPI.COMM_WORLD.rank).standard_normal(LENGTH).astype(np.float32)
    if device == "cpu":
        reducer = GradientAllreduce(MPI.COMM_WORLD, LENGTH, "oktopk", **settings)
    else:
        from tests.devices import put
        from tests.peers import among_peers

        reducer = among_peers(MPI.COMM_WORLD, LENGTH, **settings)
        gradient = put("cuda", gradient)
    return lambda: reducer.step(gradient)


def wrapped(kind: str, **settings: Any) -> Callable[[], Any]:
    """A step around an optimizer of torch's, as users wrap it: around AdamW of updates, around SGD of gradients."""
    import torch
    from mpi4py import MPI

    from oktopk import DistributedOptimizer

    torch.manual_seed(0)
    model = torch.nn.Linear(200, 100)
    inner = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)
    optimizer = DistributedOptimizer(inner, MPI.COMM_WORLD, density=0.05, **settings)

    def step() -> None:
        model(torch.randn(8, 200)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def hook() -> Callable[[], Any]:
    """A backward pass under DDP's hook, and the optimizer's step."""
    import torch
    from mpi4py import MPI
    from torch.nn.parallel import DistributedDataParallel

    from jobs.train.reduce.process_group import start_process_group
    from oktopk.torch import OkTopkState, ddp_hook

    start_process_group(MPI.COMM_WORLD, torch.device("cpu"))
    model = DistributedDataParallel(torch.nn.Linear(200, 100))
    model.register_comm_hook(OkTopkState(density=0.05), ddp_hook)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(torch.randn(8, 200)).square().mean().backward()
        inner.step()
        inner.zero_grad()

    return step


WAYS: dict[str, Callable[[], Callable[[], Any]]] = {
    "messages, CPU": lambda: reduced("cpu"),
    "peer memory": lambda: reduced("cuda"),
    "around SGD, CPU": lambda: wrapped("SGD"),
    "updates, CPU": lambda: wrapped("AdamW"),
    "updates, hosts of two, CPU": lambda: wrapped("AdamW", ranks_per_host=2),
    "DDP's hook, CPU": hook,
}


def main(arguments: list[str]) -> None:
    if arguments:
        import mpi4py.MPI

        called = Called()
        step = WAYS[arguments[0]]()
        for _ in range(STEPS):
            step()
        called.names = set()
        step()
        files = called.files()
        if mpi4py.MPI.COMM_WORLD.rank == 0:
            lines = sum(len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in files)
            print(f"{arguments[0]}: {len(files)} files of {lines} lines", *files, sep="\n  ")
        return
    for way in WAYS:
        environment = dict(os.environ)
        if way == "peer memory":
            from tests.host_cuda import ASKED_FOR

            environment[ASKED_FOR] = "1"
        ranks = "4" if "hosts" in way else "2"
        command = [sys.executable, "-m", "oktopk.launch", "-n", ranks, "-m", "tests.files_of_a_step", way]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
