"""A torch optimizer around another one: the same groups, state and defaults, and hooks of its own."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


class WrappedOptimizer(torch.optim.Optimizer):
    """Has the groups, the state and the defaults of the optimizer that it wraps. Its hooks are its own.

    Args:
        inner: owns the parameters.

    Attributes:
        inner: as given.
    """

    _called = ""  # by users, where that is not the name of the class

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        # what the base class sets up beside groups, state and defaults: hooks, and the `step` that calls them
        super().__setstate__({})

    def __getattr__(self, name: str) -> Any:
        """What only the wrapped optimizer has, as `train` and `eval` of schedule-free ones."""
        if name == "inner" or name.startswith("__"):  # before construction, and while it is copied
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's."""
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.inner.param_groups = value

    @property
    def state(self) -> Any:
        """The wrapped optimizer's."""
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self.inner.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self.inner.defaults = value

    def state_dict(self) -> dict[str, Any]:
        """What `_state` returns, with this optimizer's hooks before and after."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self._state()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `_load` does, with this optimizer's hooks before and after."""
        state = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state)
            state = state if changed is None else changed
        self._load(state)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _state(self) -> dict[str, Any]:
        """The wrapped optimizer's state."""
        return self.inner.state_dict()

    def _load(self, state: dict[str, Any]) -> None:
        """Load what `_state` returned."""
        self.inner.load_state_dict(state)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"a {self._called or type(self).__name__} cannot be pickled or copied, as it belongs to this process: "
            "save its state_dict()"
        )
