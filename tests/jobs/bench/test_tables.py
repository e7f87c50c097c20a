"""Tables of every kind of document, of published ones: tables.txt beside this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.bench.document import BenchError, read
from jobs.bench.tables import document_tables
from tests.golden import same_as

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def first_run(name: str) -> dict[str, Any]:
    """A published document cut to its first run."""
    content = read(RESULTS / f"{name}.json")
    return content | {"runs": content["runs"][:1]}


def test_tables_of_every_kind_of_document_are_golden(tmp_path: Path) -> None:
    names = ("shared-memory", "gpu-net-none", "hook-1gbit", "rows-1gbit-4")
    documents = {name: read(RESULTS / f"{name}.json") for name in names}
    documents |= {"sweep": first_run("sweep"), "gpu": first_run("gpu-4xh200")}
    found = [f"== {name}\n\n{document_tables(content)}\n" for name, content in documents.items()]
    with pytest.raises(BenchError, match="of the kind 'dense table' have no tables here"):
        document_tables(read(RESULTS / "dense-2xh100.json"))
    same_as(Path(__file__).with_name("tables.txt"), "\n".join(found), tmp_path)
