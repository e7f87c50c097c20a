"""What hosts and kernels both know of a layout is the same in both: sizes, places of words, numbers of arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CUDA = {
    source.name: source.read_text(encoding="utf-8")
    for package in ("collectives", "oktopk")
    for source in sorted((ROOT / package / "cuda").glob("*.cu*"))
}
PYTHON = {
    str(source.relative_to(ROOT).with_suffix("")): ast.parse(source.read_text(encoding="utf-8"))
    for package in ("collectives", "oktopk")
    for source in sorted((ROOT / package).rglob("*.py"))
}


def kernels_know(file: str) -> dict[str, int]:
    """The constants and enumerators of a file, and of those that it includes."""
    text = CUDA[file]
    known: dict[str, int] = {}
    for header in re.findall(r'#include "(\w+\.cuh)"', text):
        known |= kernels_know(header)
    text = re.sub(r"//.*", "", text)
    for names in re.findall(
        r"(?:constexpr (?:int|unsigned|unsigned long long)|enum \w+ \{) ?([^;}]*)[;}]", text
    ):
        for name, value in re.findall(r"(\w+) = ([^,]+)", names):
            if re.fullmatch(r"[\w+*/<() -]+", value):
                python = re.sub(r"\b(0x[0-9a-f]+|\d+)u?(?:ll)?\b", r"\1", value).replace("/", "//")
                known[name] = int(eval(python, {}, known))
    return known


def hosts_know(file: str) -> dict[str, int]:
    """The integers that are assigned to names at the top of a module."""
    known: dict[str, int] = {}
    for statement in PYTHON[file].body:
        if isinstance(statement, ast.Assign):
            (target,) = statement.targets
            pairs = (
                zip(target.elts, statement.value.elts, strict=True)
                if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple)
                else [(target, statement.value)]
            )
            known |= {
                name.id: value.value
                for name, value in pairs
                if isinstance(name, ast.Name) and isinstance(value, ast.Constant) and type(value.value) is int
            }
    return known


def test_sizes_are_the_same_on_both_sides() -> None:
    peer, region, select = (kernels_know(file) for file in ("peer.cuh", "region.cuh", "accumulate_select.cu"))
    search, compact, apply = (kernels_know(file) for file in ("kth.cu", "compact.cuh", "apply.cu"))
    window, regions = hosts_know("collectives/symmetric_memory"), hosts_know("collectives/cuda/kernels")
    for name in ("NOTES", "SLOTS", "NOTE_WORDS", "MOST_DIGITS"):
        assert window[f"_{name}"] == peer[name], name
    assert window["MOST_PEERS"] == peer["MOST_PEERS"]
    for name in ("NARROWEST", "WIDEST", "NUM_CANDIDATES"):
        assert regions[name] == region[name], name
    assert (regions["COMPACT_TILE"], regions["_COMPACT_THREADS"]) == (
        compact["COMPACT_TILE"],
        compact["COMPACT_THREADS"],
    )
    assert hosts_know("oktopk/cuda/kernels")["_COMPACT_THREADS"] == compact["COMPACT_THREADS"]
    launches = hosts_know("oktopk/cuda/select")
    assert launches["_CHUNK"] == select["CHUNK"] == select["WARPS"] * 32 * select["VECTORS"] * 4
    assert 1 << launches["_LARGEST_GROUP"] == select["MOST_GROUP"]
    assert (
        hosts_know("oktopk/cuda/multi_tensor")["_PLACED"]
        == kernels_know("pieces.cuh")["PLACED"]
        == select["CHUNK"]
    )
    peers = hosts_know("oktopk/cuda/p2p_graph")
    assert peers["_PIECE"] == 32 * apply["AHEAD"]
    assert peers["_COUNTS"] == peer["COUNTS"]
    stops = hosts_know("oktopk/cuda/p2p_step")
    shared = ("BAD_SELECTION", "SKEWED", "NOT_FINITE", "BAD_REGIONS", "EXACTLY", "UNAIDED")
    assert [stops[f"_{name}"] for name in shared] == [peer[name] for name in shared]
    assert hosts_know("oktopk/cuda/kth_select")["_SEARCH_WORDS"] == search["TIES"] + 1


def test_sums_keep_and_report_as_many_words_as_hosts_have_room_for() -> None:
    text = CUDA["sum_sorted_lists.cu"]
    fields = ",".join(
        re.findall(r"unsigned (.*?);", re.search(r"struct State \{(.*?)\};", text, re.DOTALL)[1])
    )
    alone = [field for field in re.split(r",\s*", fields) if field != "rungs[NUM_CANDIDATES]"]
    module = PYTHON["collectives/cuda/kernels"]
    sizes = {
        ast.unparse(node.targets[0]): ast.unparse(node.value)
        for node in module.body
        if isinstance(node, ast.Assign)
    }
    assert sizes["_SUMS_STATE_WORDS"] == f"{len(alone)} + NUM_CANDIDATES"
    assert int(sizes["_SUMMED"]) == 4 * alone.index("entries")
    first = re.search(r"report\[(\d) \+ i\] = shared\.rungs\[i\]", text)[1]
    assert sizes["_SUMS_WORDS"] == f"{first} + NUM_CANDIDATES"


def test_the_words_of_a_step_are_where_kernels_read_them() -> None:
    written: dict[str, int] = {}
    for node in ast.walk(PYTHON["oktopk/cuda/p2p_graph"]):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            places = [ast.unparse(place) for place in node.targets[0].elts]
            found = [re.fullmatch(r"(?:self\._)?words\[(\d+)\]", place) for place in places]
            if all(found) and isinstance(node.value, ast.Tuple):
                words = [ast.unparse(value).upper() for value in node.value.elts]
                written |= {word: int(place[1]) for word, place in zip(words, found, strict=True)}
    step = re.search(r"enum Step \{(.*?)\}", CUDA["peer.cuh"])[1]
    assert written == {name: int(place) for name, place in re.findall(r"(\w+) = (\d+)", step)}
    assert hosts_know("oktopk/cuda/p2p_graph")["_STEP_WORDS"] > max(written.values())


def parameters() -> dict[str, int]:
    """How many arguments every kernel takes, by name."""
    texts = (re.sub(r"//.*", "", text) for text in CUDA.values())
    head = r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(([^)]*)\)'
    return {name: arguments.count(",") + 1 for text in texts for name, arguments in re.findall(head, text)}


def declared() -> Iterator[tuple[str, int]]:
    """(kernel, arguments) as hosts declare them: `Kernel(module, "name", 3)`, or in a table {"name": 3}."""
    for node in chain.from_iterable(map(ast.walk, PYTHON.values())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Kernel":
            pairs = [(node.args[1], node.args[2])]
        elif isinstance(node, ast.Dict):
            pairs = [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key]
        else:
            continue
        for name, count in pairs:
            if (
                isinstance(name, ast.Constant)
                and isinstance(count, ast.Constant)
                and type(count.value) is int
            ):
                yield str(name.value), count.value


def test_every_kernel_is_declared_with_as_many_arguments_as_it_takes() -> None:
    kernels = parameters()
    assert len(kernels) == sum(text.count('extern "C" __global__') for text in CUDA.values())
    found = [(name, count) for name, count in declared() if name in kernels]
    assert {name for name, _ in found} == kernels.keys()
    for name, count in found:
        assert count == kernels[name], name
