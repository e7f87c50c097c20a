"""`settings="auto"` of a `DistributedOptimizer`: what the user leaves open, and what a state that is loaded has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from oktopk.elastic import of_rank
from oktopk.settings import Settings
from oktopk.torch.arguments import levels_of

if TYPE_CHECKING:
    from oktopk.plan.choice import Wanted

OPEN = "wire", "levels", "exchange"
"""Settings that may be left open."""


def check_auto(settings: Any, every: Any, compute_ms: Any, sends: str) -> None:
    """Raise ValueError where settings is neither None nor "auto", or `every` and `compute_ms` do not go together.

    Args:
        settings, every, compute_ms, sends: of a `DistributedOptimizer`.
    """
    if settings not in (None, "auto"):
        raise ValueError(f"settings {settings!r} is not None or 'auto': pass each setting by its own name")
    if (every == "auto") != (compute_ms is not None):
        raise ValueError(
            f"every={every!r} with compute_ms={compute_ms!r}: every='auto' needs the milliseconds of a dense step without "
            "communication, and nothing else does"
        )
    if every != "auto":
        return
    if settings is None or sends != "updates":
        raise ValueError("every='auto' is for settings='auto' and sends='updates'")
    number = isinstance(compute_ms, float | int) and not isinstance(compute_ms, bool)
    if not (number and 0 < compute_ms < math.inf):
        raise ValueError(f"compute_ms {compute_ms!r} is not a time > 0")


def wanted_of(arguments: Mapping[str, Any], length: int, device: str) -> Wanted:
    """What is to be chosen.

    Args:
        arguments: of a `DistributedOptimizer`, by name, keywords of `Settings` among them.
        length, device: of the vector.

    Raises:
        ValueError: a setting is out of range.
    """
    from oktopk.plan.choice import Wanted

    names = {field.name for field in fields(Settings)}
    updates = arguments["sends"] == "updates"
    settings = {name: value for name, value in arguments.items() if name in names}
    settings |= levels_of(arguments["replica"]) if updates else {}
    compute = arguments["compute_ms"]
    seconds = None if compute is None else compute / 1e3
    return Wanted(length, arguments["method"], Settings(**settings), device, updates, seconds)


def levels_of_state(state: Any, length: int, method: str, hosts: Sequence[int]) -> str | None:
    """Levels of the steps that a state was saved in, "flat" or "hosts"; None where it does not tell, or is not of this training.

    Args:
        state: as `DistributedOptimizer.state_dict` returns it, perhaps damaged.
        length, method: of the reducer.
        hosts: the number of each rank's host.
    """
    with suppress(AttributeError, KeyError, TypeError, ValueError):
        reducer = of_rank(state["reducer"])
        parts = list(reducer["buckets"].values()) if "buckets" in reducer else [reducer]
        alike = {(part["method"], part["ranks"]) for part in parts} == {(method, len(hosts))}
        if not alike or sum(part["length"] for part in parts) != length:
            return None
        saved = parts[0]["hosts"]
        if saved is None:
            return "flat"
        return "hosts" if list(saved) == list(hosts) else None
    return None
