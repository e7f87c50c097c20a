"""What steps leave for the next ones: the residual, and states, in which nothing is copied before all is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.codec import EXACT_WIRES, WIRES
from collectives.sparse import Vector
from oktopk.damage import StateError, state_errors
from oktopk.elastic import check_redistributed
from oktopk.methods import METHODS
from oktopk.steps import Steps

_COUNTS = ("steps", "sparse_steps")
_PLACE = ("rank", "ranks", "hosts")
_WAYS = ("wire", "exchange")
"""Settings that the bits of steps depend on, and no rank changes by itself."""
_AFRESH: dict[str, Any] = {
    "methods": {},
    "steps": 0,
    "sparse_steps": 0,
    "unaided": 0,
    "last_k": None,
    "residual": None,
}


class Resumable(Steps):
    """Steps that can be undone, saved and continued."""

    follows: Sequence[str] = ()
    """Of "wire" and "exchange" those of which a loaded state may have any, which steps then take."""

    @property
    def residual(self) -> Vector | None:
        """float32[n], what was not applied; None where no step leaves anything behind.

        In two levels float32[shard], of the host's sum; `gathered_residual` puts the shards together.
        """
        with self.backend.stream_scope():
            self._vectors.put_back()
        return self._vectors.residual

    def gathered_residual(self) -> NDArray[np.float32]:
        """float32[n] in CPU memory, whose sum over the ranks is all that was not applied. Collective.

        In flat steps this rank's residual. In two levels that of the whole host on its first rank, and zero on the others.
        A step that `begin` has started is ended first, and may raise as `complete`.
        """
        if self.awaited:
            self.complete()
        self.meet("gathered_residual")
        with self.backend.stream_scope():
            gathered = self._placement.whole_residual(self._vectors)
        if gathered is None or not self._placement.first:
            return np.zeros(self.length, np.float32)
        return gathered

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, copied: plain numbers and arrays.

        Raises:
            NonFiniteGradientError: of the last step, where it was deferred.
            RuntimeError: a step through peer memory was aborted, and what this rank holds may not fit the others'; or entries
                that the last step gathered did not decode.
        """
        self.complete()
        with self.backend.stream_scope():
            vectors = self._vectors.state_dict()
            for executor in self._executors.values():  # after the copies, which wait for the device
                executor.check()
        return {
            "length": self.length,
            "method": self.method,
            "rank": self.transport.rank,
            "ranks": self.transport.size,
            "hosts": self.hosts,
            "wire": self.settings.wire,
            "exchange": self.settings.exchange,
            "steps": self.steps,
            "sparse_steps": self._sparse_steps,
            "last_k": self._last_k,
            "unaided": self._trust,
            "methods": {name: method.state_dict() for name, method in self._methods.items()},
            **vectors,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the `state_dict` of this rank was taken, bit for bit. Collective.

        Raises:
            ValueError: the state is damaged, or of another length, method, rank or number of ranks (see `oktopk.elastic`), or of
                another wire where one of the two rounds, or of another exchange, or the ranks' states are not of one moment; on
                every rank alike, before anything is changed.
        """
        self.agree_on_state(state)
        with self.backend.stream_scope():
            self._load(state)

    def agree_on_state(self, state: dict[str, Any]) -> None:
        """Raise what `load_state_dict` would; nothing is changed. Collective."""
        with self._expecting("load_state_dict"), self._placement.agreed() as (common, agreed, learned):
            check_state(state, self)
            common |= {name: state[name] for name in (*_COUNTS, "last_k", "unaided", *_WAYS)}
            common |= {f"saved {name}": value for name, value in state.get("saved", {}).items()}
            for name, of_method in state["methods"].items():
                agreed[name] = METHODS[name].agreed_state(of_method)
                learned[name] = of_method.get("selection"), of_method.get("threshold")
            # of the ranks that hold a shard: all of them together
            agreed["whether there is a residual"] = state["residual"] is not None
            learned["whether there is a residual"] = state["residual"] is not None

    def reset(self) -> None:
        """Forget residual, thresholds, regions and the number of steps, as if newly constructed. Collective."""
        self.meet("reset")
        with self.backend.stream_scope():
            self._load(_AFRESH)

    def _load(self, state: dict[str, Any]) -> None:
        for executor in self._executors.values():
            executor.close()
        self._methods, self._executors, self._final = {}, {}, None
        self.steps = state["steps"]
        self._sparse_steps = state["sparse_steps"]
        self._last_k = state["last_k"]
        self._trust = state["unaided"]
        self._open = None
        self.take_traffic()
        ways = {name: state[name] for name in self.follows if name in state}
        if ways:
            self.settings = replace(self.settings, **ways)
            if self.settings.exchange == "grid":
                self._placement.open_grid()
            self._p2p_problem = self._p2p_problem or METHODS[self.method].p2p_unavailable_reason(
                self.settings
            )
        self.p2p_unavailable_reason = self._p2p_problem  # windows are asked for again
        with self.transport.together():
            self._vectors.load_state_dict(state)
        for name, method_state in state["methods"].items():
            self._instance(name).load_state_dict(method_state)

    def renumber(self, steps: int, sparse_steps: int) -> None:
        """Go on as after so many steps, equal on all ranks; the next one computes exact thresholds."""
        self.steps, self._sparse_steps, self._last_k = steps, sparse_steps, None

    def take_back(self) -> None:
        """Undo the last step, which was applied nowhere; the update becomes zero. Every rank must call. No traffic.

        With nonfinite="skip" the residual becomes what it was before, bit for bit. Else, or after a displacement,
        the sum that was applied, of the step's gradients too, goes to the residual of rank 0, in two levels to those of the first
        host: nothing is lost, and the next steps apply it. A dense step without a residual is lost.
        """
        self.complete()
        with self.backend.stream_scope():
            vectors = self._vectors
            vectors.put_back()
            if vectors.restores:
                vectors.restore()
            elif vectors.residual is not None:
                if self._placement.in_first:
                    part = self._placement.own_part(vectors.update)
                    vectors.residual += part * (self.transport.size if self.settings.average else 1)
                vectors.pending = True  # on all ranks: states have residuals on all, or on none
            vectors.drop_update()


@state_errors()
def check_state(state: object, loader: Resumable) -> None:
    """Raise StateError where a state cannot be loaded. Talks to no other rank.

    Args:
        state: as `GradientAllreduce.state_dict` returns it.
        loader: the reducer that is to load it.
    """
    if not isinstance(state, dict):
        raise StateError(f"the state is a {type(state).__name__}, not a dict")
    check_redistributed(state)
    names = ("length", "method", *_COUNTS, "last_k", "unaided", "methods", "residual", *_PLACE, *_WAYS)
    if missing := [name for name in names if name not in state]:
        raise StateError(f"the state lacks {', '.join(missing)}")
    if not isinstance(state.get("saved", {}), dict):
        raise StateError(f"saved of the state is a {type(state['saved']).__name__}, not a dict")
    for name, own in (("length", loader.length), ("method", loader.method)):
        if state[name] != own:
            remedy = (
                f": pass method={state[name]!r} to go on"
                if name == "method" and state[name] in METHODS
                else ""
            )
            raise StateError(f"state has {name} {state[name]!r}, this reducer {own!r}{remedy}")
    kind = METHODS[loader.method]
    known = {
        "wire": WIRES if kind.coded else ("plain",),
        "exchange": ("direct", "grid") if kind.over_grid else ("direct",),
    }
    for name in _WAYS:
        way, own = state[name], getattr(loader.settings, name)
        if name in loader.follows:
            if way not in known[name]:
                raise StateError(f"{name} {way!r} of the state is not one of {', '.join(known[name])}")
        elif way != own and not (way in EXACT_WIRES and own in EXACT_WIRES):
            raise StateError(
                f"state has {name} {way!r}, this reducer {own!r}: pass {name}={way!r} to go on as before, "
                f"or set {name!r} in the state to change it"
            )
    rank, ranks = loader.transport.rank, loader.transport.size
    another = "oktopk.elastic.redistribute makes one for another number of ranks or hosts"
    if (state["rank"], state["ranks"]) != (rank, ranks):
        raise StateError(
            f"the state is of rank {state['rank']} of {state['ranks']}, and this is rank {rank} of {ranks}: every rank saves and "
            f"loads its own, as residuals differ; {another}"
        )
    if state["hosts"] != loader.hosts:
        levels = f"the state is of {_levels(state['hosts'])}, and this reducer has {_levels(loader.hosts)}"
        raise StateError(f"{levels}: {another}")
    for name in (*_COUNTS, "last_k", "unaided"):
        value = state[name]
        if not ((type(value) is int and value >= 0) or (name == "last_k" and value is None)):
            raise StateError(f"{name} {value!r} of the state is not an integer >= 0")
    residual = state["residual"]
    if residual is not None:
        if not isinstance(residual, np.ndarray):
            raise StateError(f"residual of the state is a {type(residual).__name__}, not an array")
        if residual.dtype != np.float32 or residual.shape != (loader.carried,):
            shape = f"{residual.dtype}{list(residual.shape)}"
            raise StateError(f"residual of the state is {shape}, not float32[{loader.carried}]")
        if not np.isfinite(residual).all():
            raise StateError("residual of the state is not finite")
    if unknown := sorted(set(state["methods"]) - set(METHODS)):
        raise StateError(f"the state is of unknown methods: {', '.join(unknown)}")
    for name, of_method in state["methods"].items():
        METHODS[name].check_state(of_method, loader.carried)


def _levels(hosts: list[int] | None) -> str:
    return "flat steps" if hosts is None else f"two levels on hosts {hosts}"
