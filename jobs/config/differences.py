"""What differs between two configurations: of a run and of what continues it, or was planned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jobs.config.modes import DDP_MODES, TRAINING_MODES
from oktopk.settings import DEFAULT_BUCKET_MB


def _bucket_mb(config: Mapping[str, Any]) -> float | None:
    """The size of the buckets of a run, in 1e6 bytes of float32; 0: as GPUs have them by default; None: it has none."""
    reduction = config.get("reduction", {})
    method, given = reduction.get("method"), reduction.get("bucket_mb", 0.0)
    if method not in DDP_MODES and not reduction.get("overlap"):
        return None
    if method in TRAINING_MODES or config.get("training", {}).get("device") == "cpu":
        return given or DEFAULT_BUCKET_MB
    return given


def differences(saved: str, own: str, ignored: frozenset[str]) -> list[str]:
    """What differs between two configurations in JSON, as "section.key: saved there, own here".

    A size of buckets differs only where the run has other buckets.

    Args:
        saved, own: objects of objects.
        ignored: "section" or "section.key" that may differ.
    """
    there, here = json.loads(saved), json.loads(own)
    if _bucket_mb(there) == _bucket_mb(here):
        ignored |= {"reduction.bucket_mb"}
    found = []
    for section in sorted({*there, *here} - ignored):
        a, b = there.get(section, {}), here.get(section, {})
        for key in sorted({*a, *b}):
            if f"{section}.{key}" not in ignored and a.get(key) != b.get(key):
                found.append(f"{section}.{key}: {a.get(key)!r} there, {b.get(key)!r} here")
    return found
