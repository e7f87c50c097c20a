"""Data and threads of tests that train, and the workloads that share a guarantee."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from data.prepare import prepare_an4
from jobs.config.config import Config
from jobs.config.file import load
from tests.documents import write_documents
from tests.utterances import write_an4

if TYPE_CHECKING:
    from mpi4py import MPI

CONFIGS = Path(__file__).parents[3] / "jobs" / "configs"
SPOKEN = ("NO", "GO", "UP", "ON", "A")
CPU = "training.device=cpu"
SMALL: dict[str, tuple[str, ...]] = {
    "digits": ("model.width=0.0625", "training.batch_size=4", "training.eval_every=100", "data.crop=4"),
    "vit": (
        *("model.layers=2", "model.hidden=64", "model.patch=8", CPU, "training.batch_size=16"),
        *("data.name=digits", "data.resize=48"),
    ),
    "lstm": ("model.width=0.0625", CPU, "data.path=SPEECH"),
    "bert": (
        *("model.vocabulary=0", "model.layers=1", "model.hidden=64", "model.dropout=0.0", CPU),
        *("optimizer.lr=1e-3", "schedule.name=constant", "reduction.density=0.2", "data.path=TEXT"),
        *("reduction.threshold_interval=8", "reduction.boundary_interval=8"),
        *("training.batch_size=16", "training.eval_every=1000"),
    ),
    "gpt": (
        *("model.vocabulary=0", "model.positions=0", "model.layers=1", "model.hidden=64", CPU),
        "data.path=CONTIGUOUS",
    ),
}
"""A file of jobs/configs -> settings with which it trains in seconds."""


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """A run sets how many threads torch has; the next test has as many as before."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that a network learns in seconds."""
    return write_documents(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared speech: 18 utterances to train on, six held out."""
    folder = tmp_path_factory.mktemp("speech")
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(SPOKEN, 1 + number % 2)) for number in range(24)]
    write_an4(folder / "an4", texts[:18], texts[18:])
    prepare_an4(folder, folder / "an4.h5", partial=True)
    return folder / "an4.h5"


Words = Callable[..., list[str]]
Configured = Callable[..., Config]


@pytest.fixture
def words(request: pytest.FixtureRequest) -> Words:
    """Arguments of jobs.train for the small one of a file of SMALL, with further settings."""

    def of(name: str, *overrides: str) -> list[str]:
        given = [*SMALL[name], *overrides]
        for place, fixture, other in (
            ("SPEECH", "prepared", ""),
            ("TEXT", "documents", ""),
            ("CONTIGUOUS", "documents", "contiguous.h5"),
        ):
            if f"data.path={place}" in given:
                path: Path = request.getfixturevalue(fixture)
                found = path.with_name(other or path.name)
                given = [word.replace(f"data.path={place}", f"data.path={found}") for word in given]
        return [str(CONFIGS / f"{name}.toml"), "--set", *given]

    return of


@pytest.fixture
def configured(words: Words) -> Configured:
    """The configuration of those arguments."""

    def of(name: str, *overrides: str) -> Config:
        path, _, *given = words(name, *overrides)
        return load(path, given)

    return of


@pytest.fixture
def gloo(comm: MPI.Intracomm) -> Iterator[MPI.Intracomm]:
    """A process group of torch's among the ranks, whose communicator it is."""
    from jobs.train.reduce.process_group import start_process_group, stop_process_group

    if not torch.distributed.is_gloo_available():
        pytest.skip("torch has no gloo")
    start_process_group(comm, torch.device("cpu"))
    yield comm
    stop_process_group()
