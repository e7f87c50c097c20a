"""Explains the page's terms: as hovers, and in a list for screens without a pointer."""

from __future__ import annotations

import re
from collections.abc import Iterable

from markupsafe import Markup, escape

TERMS: dict[str, str] = {
    "n": "number of gradient entries, one per parameter of the network",
    "k": "number of entries that a sparse method is asked to keep in a step: density × n",
    "P": "number of ranks",
    "rank": "one of the processes that train together, each on batches of its own",
    "word": "4 bytes: one value, or one index",
    "payload": "values and indices of gradient entries; sizes, splits, histograms and flags are control words, counted apart",
    "dense": "every entry of the gradient is summed over the ranks, in a step or by a method",
    "nnz": "number of entries that a rank selects (local), or of entries in the update (global)",
    "exact": "an exact threshold is the magnitude of the k-th largest entry; between such steps it is reused",
    "threshold": "magnitude that an entry must reach to be sent (local), or to be applied (global)",
    "region": "part of the gradient that one rank sums up",
    "ξ": "the error that the paper assumes bounded: the norm of (top k of the mean accumulated gradient − applied update), "
    "over the norm of the mean gradient",
    "fill-in": "entries that any rank selected, counted once, over k",
    "compute": "forward pass, backward pass and optimizer",
    "selection": "what the reduction does in a rank's own memory: select, sum, apply",
    "exchange": "the rest of the reduction: sending, receiving, and waiting for other ranks",
    "reduction": "from the gradients of a rank to their mean over all ranks: selection and exchange",
    "held-out": "samples that no rank trains on",
    "seed": "number that initial weights and the order of samples are drawn from",
}
"""Term -> its explanation. A plural counts as its term, and "held out" as "held-out"."""


def _pattern() -> re.Pattern[str]:
    forms = [
        rf"(?P<t{number}>{re.escape(term)})"
        if len(term) == 1
        else rf"(?P<t{number}>(?i:{re.escape(term).replace(chr(92) + '-', '[- ]')}s?))"
        for number, term in enumerate(TERMS)
    ]
    # a digit may stand before: 2k(P−1)/P; "top-k" is the field's word for what k says
    return re.compile(rf"(?<![^\W\d_])(?:{'|'.join(forms)})(?![^\W_])")


_PATTERN = _pattern()


def _found(text: str) -> Iterable[tuple[re.Match[str], str]]:
    """Each term's first occurrence."""
    met = set()
    for match in _PATTERN.finditer(text):
        term = list(TERMS)[int(str(match.lastgroup)[1:])]
        if term not in met:
            met.add(term)
            yield match, term


def explained(text: str) -> Markup:
    """The text as HTML, the first occurrence of each term with its explanation as a hover."""
    parts, end = [], 0
    for match, term in _found(text):
        parts += [
            escape(text[end : match.start()]),
            Markup('<abbr title="{}">{}</abbr>').format(TERMS[term], match[0]),
        ]
        end = match.end()
    return Markup("").join([*parts, escape(text[end:])])


def terms_in(texts: Iterable[str]) -> list[tuple[str, str]]:
    """The terms that occur in any of the texts with their explanations, in the order of TERMS."""
    met = {term for text in texts for _, term in _found(text)}
    return [(term, meaning) for term, meaning in TERMS.items() if term in met]
