"""Objects of this process by their kind: torch tells a parameter neither its module nor its optimizer."""

from __future__ import annotations

import gc
from typing import Any


def alive(kind: type) -> list[Any]:
    """The objects of a kind that are alive, in no order that ranks share.

    By `type`, since `isinstance` asks an object for its class, which runs code of objects that are made when they are first used.
    """
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]
