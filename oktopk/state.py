"""What is wrong with a state, found before anything of it is copied."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from collectives.codec import EXACT_WIRES
from collectives.transport import Transport
from oktopk.elastic import problem_of
from oktopk.methods import METHODS
from oktopk.settings import Settings

_COUNTS = ("steps", "sparse_steps")
_PLACE = ("rank", "ranks", "hosts")


class Loader(Protocol):
    """What a state must fit: a `GradientAllreduce`.

    Attributes:
        length: elements of the gradient (n).
        method, settings: of the reducer.
        carried: elements of its residual.
        hosts: the number of each rank's host, None in flat steps.
        transport: of all ranks.
    """

    length: int
    method: str
    settings: Settings
    transport: Transport

    @property
    def carried(self) -> int: ...

    @property
    def hosts(self) -> list[int] | None: ...


def state_problem(state: Any, loader: Loader) -> str:
    """Why a state cannot be loaded, in a sentence; "" if it can. Talks to no other rank.

    Args:
        state: as `GradientAllreduce.state_dict` returns it.
        loader: the reducer that is to load it.
    """
    try:
        return _problem(state, loader)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        return f"the state is damaged: {type(error).__name__} {error}"


def _problem(state: Any, loader: Loader) -> str:
    if not isinstance(state, dict):
        return f"the state is a {type(state).__name__}, not a dict"
    if problem := problem_of(state):
        return problem
    names = (
        "length",
        "method",
        *_COUNTS,
        "last_k",
        "unaided",
        "methods",
        "residual",
        *_PLACE,
        "wire",
    )
    if missing := [name for name in names if name not in state]:
        return f"the state lacks {', '.join(missing)}"
    if not isinstance(state.get("saved", {}), dict):
        return f"saved of the state is a {type(state['saved']).__name__}, not a dict"
    for name, own in (("length", loader.length), ("method", loader.method)):
        if state[name] != own:
            return f"state has {name} {state[name]!r}, this reducer {own!r}"
    if problem := _wire_problem(state["wire"], loader.settings.wire):
        return problem
    if moved := _place_problem(state, loader):
        return moved
    length = loader.carried
    problems = [_number_problem(name, state[name], 0) for name in _COUNTS]
    problems += [
        _number_problem("last_k", state["last_k"], 0, optional=True),
        _number_problem("unaided", state["unaided"], 0),
    ]
    problems.append(_vector_problem("residual", state["residual"], length))
    if unknown := sorted(set(state["methods"]) - set(METHODS)):
        problems.append(f"the state is of unknown methods: {', '.join(unknown)}")
    else:
        problems += [METHODS[name].state_problem(held, length) for name, held in state["methods"].items()]
    return next((problem for problem in problems if problem), "")


def _wire_problem(theirs: Any, own: str) -> str:
    if theirs == own or (theirs in EXACT_WIRES and own in EXACT_WIRES):
        return ""
    return (
        f"state has wire {theirs!r}, this reducer {own!r}: pass wire={theirs!r} to go on as before, "
        "or set 'wire' in the state to change it"
    )


def _place_problem(state: dict[str, Any], loader: Loader) -> str:
    rank, ranks = loader.transport.rank, loader.transport.size
    taken = state["rank"], state["ranks"]
    another = "oktopk.elastic.redistribute makes one for another number of ranks or hosts"
    if taken != (rank, ranks):
        return (
            f"the state is of rank {taken[0]} of {taken[1]}, and this is rank {rank} of {ranks}: every rank saves and loads its "
            f"own, as residuals differ; {another}"
        )
    hosts = state["hosts"]
    if hosts != loader.hosts:
        return f"the state is of {_levels(hosts)}, and this reducer has {_levels(loader.hosts)}: {another}"
    return ""


def _levels(hosts: list[int] | None) -> str:
    return "flat steps" if hosts is None else f"two levels on hosts {hosts}"


def _number_problem(name: str, value: Any, least: int, optional: bool = False) -> str:
    if (optional and value is None) or (type(value) is int and value >= least):
        return ""
    return f"{name} {value!r} of the state is not an integer >= {least}"


def _vector_problem(name: str, vector: Any, length: int) -> str:
    if vector is None:
        return ""
    if not isinstance(vector, np.ndarray):
        return f"{name} of the state is a {type(vector).__name__}, not an array"
    if vector.dtype != np.float32 or vector.shape != (length,):
        return f"{name} of the state is {vector.dtype}{list(vector.shape)}, not float32[{length}]"
    return "" if np.isfinite(vector).all() else f"{name} of the state is not finite"
