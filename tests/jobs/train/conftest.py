"""Data and threads of tests that train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.documents import write_documents

if TYPE_CHECKING:
    from mpi4py import MPI


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


@pytest.fixture
def gloo(comm: MPI.Intracomm) -> Iterator[MPI.Intracomm]:
    """A process group of torch's among the ranks, whose communicator it is."""
    from jobs.train.reduce.process_group import start_process_group, stop_process_group

    if not torch.distributed.is_gloo_available():
        pytest.skip("torch has no gloo")
    start_process_group(comm, torch.device("cpu"), "gloo", "")
    yield comm
    stop_process_group()
