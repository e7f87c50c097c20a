"""The registry of methods: the one place where a name becomes a method."""

from oktopk.methods.base import Method, SparseMethod
from oktopk.methods.dense import Dense
from oktopk.methods.gaussiank import Gaussiank
from oktopk.methods.gtopk import GTopk
from oktopk.methods.oktopk import OkTopk
from oktopk.methods.topka import TopkA
from oktopk.methods.topkdsa import TopkDSA
from oktopk.methods.union import SharedSupport

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Dense, OkTopk, TopkA, TopkDSA, GTopk, Gaussiank, SharedSupport)
}

__all__ = ["METHODS", "Method", "SparseMethod"]
