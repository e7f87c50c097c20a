"""The registry of methods: the one place where a name becomes a method."""

from oktopk.methods.base import Method, Plan, Reduction, SparseMethod
from oktopk.methods.dense import Dense
from oktopk.methods.oktopk import OkTopk

METHODS: dict[str, type[Method]] = {method.name: method for method in (Dense, OkTopk)}

__all__ = ["METHODS", "Method", "Plan", "Reduction", "SparseMethod"]
