"""What is wrong with a state, found before anything of it is copied."""

from __future__ import annotations

from typing import Any

import numpy as np

from oktopk.methods import METHODS, SparseMethod

_COUNTS = ("steps", "sparse_steps")


def state_problem(state: Any, length: int, method: str, momentum: float) -> str:
    """Why a state cannot be loaded, in a sentence; "" if it can. Talks to no other rank.

    Args:
        state: as `GradientAllreduce.state_dict` returns it.
        length: elements of the gradient (n).
        method: of the reducer that loads it.
        momentum: its momentum correction, 0 for none.
    """
    try:
        return _problem(state, length, method, momentum)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        return f"the state is damaged: {type(error).__name__} {error}"


def _problem(state: Any, length: int, method: str, momentum: float) -> str:
    if not isinstance(state, dict):
        return f"the state is a {type(state).__name__}, not a dict"
    missing = [
        name for name in ("length", "method", *_COUNTS, "last_k", "methods", "residual") if name not in state
    ]
    if missing:
        return f"the state lacks {', '.join(missing)}"
    for name, own in (("length", length), ("method", method)):
        if state[name] != own:
            return f"state has {name} {state[name]!r}, this reducer {own!r}"
    for name in _COUNTS:
        if not isinstance(state[name], int) or state[name] < 0:
            return f"{name} {state[name]!r} of the state is not a count"
    if momentum and state.get("velocity") is None and state["steps"]:
        return "the state has no velocity, and this reducer has momentum correction"
    if not momentum and state.get("velocity") is not None:
        return "the state has a velocity, and this reducer no momentum correction"
    for name in ("residual", "velocity"):
        if problem := _vector_problem(name, state.get(name), length):
            return problem
    unknown = set(state["methods"]) - set(METHODS)
    if unknown:
        return f"the state is of unknown methods: {', '.join(sorted(unknown))}"
    for name, held in state["methods"].items():
        if problem := _method_problem(name, held, length):
            return problem
    return ""


def _vector_problem(name: str, vector: Any, length: int) -> str:
    if vector is None:
        return ""
    if not isinstance(vector, np.ndarray) or vector.dtype != np.float32 or vector.shape != (length,):
        found = (
            f"{vector.dtype}{list(vector.shape)}" if isinstance(vector, np.ndarray) else type(vector).__name__
        )
        return f"{name} of the state is {found}, not float32[{length}]"
    return "" if np.isfinite(vector).all() else f"{name} of the state is not finite"


def _method_problem(name: str, held: dict[str, Any], length: int) -> str:
    METHODS[name].agreed_state(held)  # raises where a key is missing
    if issubclass(METHODS[name], SparseMethod):
        bits, slope = held["selection"]["bits"], held["selection"]["slope"]
        if bits is not None and not 1 <= bits < 2**31:
            return f"the local threshold of the state of {name} is no magnitude: {bits}"
        if not 0 < slope < np.inf:
            return f"slope {slope} of the state of {name} is not a positive number"
    boundaries, splits = held.get("boundaries"), held.get("last_cuts")
    if boundaries is not None and not _ascend(
        [0, *boundaries, length], boundaries[0], length - boundaries[-1]
    ):
        return f"boundaries of the state of {name} do not ascend from 0 to {length}"
    if splits is not None and not _ascend([0, *splits, length]):
        return f"last_cuts of the state of {name} do not ascend within [0, {length}]"
    return ""


def _ascend(places: list[int], *zeros: int) -> bool:
    return bool(np.all(np.diff(places) >= 0)) and not any(zeros)
