"""Sphinx: pages in Markdown, the reference from docstrings, the configuration's types and `--help`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # the checkout's packages, and generate.py

from generate import fill_in  # noqa: E402

from oktopk import __version__  # noqa: E402

project = "oktopk"
author = "The oktopk authors"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "oktopk"
html_copy_source = False

# GitHub's anchors, so that a link with #a-heading works there and here
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# docstrings write names in single backticks
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# -n reports every name that nothing documents. Other projects' names are not looked up: builds need no network.
# TYPES are names for two or more of them.
OTHERS = r"(np|numpy|MPI|mpi4py|torch|cupy|nn|concurrent|collections\.abc)\..*|Any|NDArray|Tensor|ModuleType|Future"
TYPES = "Communicator|Array|Vector|Entries|Kernels|Stream|Ready"
# what BackwardBuckets and sums of rows are made of, which no reader makes; and another name of DenseAllreduce
INNER = "DeviceRowWindows|GradientsInPlace|BucketLayout|OneVector|TensorMemory|PeerAllreduce"
nitpick_ignore_regex = [("py:.*", f"{OTHERS}|{TYPES}|{INNER}")]
BEFORE: dict[str, list[str]] = {}
"""Name -> docstring, before napoleon."""


def label_lines(app: object, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Make a paragraph of each labelled entry ("Traffic: ..."), which may run over several indented lines.

    Called before napoleon, which knows only sections whose label has a line of its own.
    """
    BEFORE[name] = list(lines)
    text = re.sub(
        r"^(Lifetime|Memory|Source|Traffic): (.*(?:\n +.+)*)", labelled, "\n".join(lines), flags=re.M
    )
    lines[:] = text.split("\n")


def labelled(entry: re.Match[str]) -> str:
    """One entry as a paragraph."""
    return f"\n**{entry[1]}:** {' '.join(entry[2].split())}\n"


def plain_lines(app: object, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Undo napoleon's work on a value: it takes "float32[n]: the update" for a type and its description."""
    if what in ("attribute", "data", "property"):
        lines[:] = BEFORE[name]


def setup(app: Sphinx) -> None:
    """Fill in what is generated when a page is read, and adapt docstrings."""
    app.connect("source-read", fill_in)
    app.connect("autodoc-process-docstring", label_lines, priority=400)
    app.connect("autodoc-process-docstring", plain_lines, priority=600)
