"""The rate of links, as the command line and documents write it."""

from __future__ import annotations

import re

from jobs.bench.document import BenchError

UNSHAPED = "none"
"""The value of `--link` for unshaped links."""

_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_RATE = re.compile(r"([0-9]+\.?[0-9]*)(kbit|mbit|gbit)")


def bits_per_second(text: str) -> float | None:
    """The rate in a value of `--link`, None where links are unshaped.

    Raises:
        BenchError: it is neither a rate nor "none".
    """
    if text == UNSHAPED:
        return None
    found = _RATE.fullmatch(text)
    if found is None or not float(found[1]):
        raise BenchError(f"link {text!r} is neither a rate such as 10gbit nor {UNSHAPED!r}")
    return float(found[1]) * _BITS[found[2]]
