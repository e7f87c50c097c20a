"""A document of links, as `oktopk-bench` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MODEL = {"L": 1e-5, "o": 2e-6, "g": 2e-6, "G": 8e-10, "O": 0.0, "S": 65536.0, "D": 0.0}


def document(count: int = 3, ranks_per_host: int = 2, **more: Any) -> dict[str, Any]:
    names = [f"node{number}" for number in range(1, count + 1)]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    made: dict[str, Any] = {
        "kind": "oktopk-links",
        "version": 1,
        "date": "2026-11-29",
        "library": "MPI",
        "device": "cpu",
        "hosts": names,
        "ranks_per_host": ranks_per_host,
        "inside": {"model": MODEL | {"G": 1e-10}, "sizes": []} if ranks_per_host > 1 else None,
        "between": {"model": MODEL, "sizes": []} if count > 1 else None,
        "pairs": [{"hosts": [a, b], "latency": 1.4e-5, "bytes_per_second": 1.25e9} for a, b in pairs],
        "kernels": {"select": [0.0, 1e-9], "sum": [0.0, 2e-8]}
        | {"code": [0.0, 8e-9], "entries": [0.0, 1e-8], "vector": [0.0, 6e-10]},
        "steps": [],
    }
    return made | more


def write(path: Path, made: dict[str, Any]) -> Path:
    path.write_text(json.dumps(made), encoding="utf-8")
    return path
