"""Data and threads of tests that train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.documents import write_documents


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
