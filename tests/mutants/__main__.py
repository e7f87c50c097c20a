"""Whether `make test` finds mistakes: `python -m tests.mutants --results FILE [NAME ...]`.

Each mutant is put into a copy of the checkout, never into the checkout. There the tests that are likely to find it run up to the
first failure, and where they pass all of `make test` without the checks of the sources. A test that fails without the mutant too
is an error. FILE in JSON gets a result after each; mutants that it has are not run again, so a check that was stopped goes on.
Prints a Markdown table; status 1 if one survived.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from oktopk.launch import end_on_sigterm
from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
COMPILED = "build/host-cuda"  # kernels for the host, found by the digest of their sources


class MutantError(Exception):
    """A mutant that says nothing about the tests; the message names it."""


def copy_tree(root: Path, to: Path) -> None:
    """Copy what git tracks or would track, and the kernels that are compiled already."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).is_file():  # not deleted in the working tree
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    if (root / COMPILED).is_dir():
        shutil.copytree(root / COMPILED, to / COMPILED)


def mutated(mutant: Mutant, text: str) -> str:
    """The text with the mistake in it.

    Raises:
        MutantError: the text to replace does not occur exactly once.
    """
    count = text.count(mutant.old)
    if count != 1:
        raise MutantError(f"{mutant.name}: its text occurs {count} times in {mutant.file}, not once")
    return text.replace(mutant.old, mutant.new)


def first_failure(tree: Path, arguments: Sequence[str], cache: Path) -> str:
    """The first test that fails in a tree, as tests.run names it; "" if none does. `cache`: of compiled Numba functions.

    Raises:
        MutantError: the run ended badly without a failure, as one that selects no test does.
    """
    command = [sys.executable, "-m", "tests.run", "--no-lint", "-x", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": str(cache)}
    with tempfile.TemporaryDirectory(prefix="bytecode-") as bytecode:
        # that of the last run would be taken for a mutant of the same size in the same second
        environment["PYTHONPYCACHEPREFIX"] = bytecode
        job = subprocess.Popen(
            command, cwd=tree, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            said = job.communicate()[0]
        finally:
            if job.poll() is None:
                job.terminate()  # it ends its ranks
                job.wait()
    closing = said.rpartition("=== closing ===")[2]
    failed = [line.removeprefix("FAILED ") for line in closing.splitlines() if line.startswith("FAILED ")]
    if job.returncode and not failed:
        raise MutantError(f"tests.run {shlex.join(arguments)}: no test failed, but:\n{said[-2000:]}")
    return failed[0] if failed else ""


def attempt(tree: Path, mutant: Mutant) -> dict[str, str | float]:
    """Put a mutant into a tree, run the tests, and take it out.

    Returns:
        {"found": the test or "", "seconds": until then}.

    Raises:
        MutantError: see `first_failure`; or the test fails without the mutant too.
    """
    file = tree / mutant.file
    text = file.read_text(encoding="utf-8")
    began = time.monotonic()
    file.write_text(mutated(mutant, text), encoding="utf-8")
    cache = tree / "build" / "numba"
    likely, found = shlex.split(mutant.first), ""
    try:
        for arguments in (likely, []):
            found = found or first_failure(tree, arguments, cache)
    finally:
        file.write_text(text, encoding="utf-8")
    seconds = round(time.monotonic() - began, 1)
    if test := re.search(r"(tests/\S+\.py)::(\w+)", found):
        again = [*(likely if test[1] in likely else [test[1]]), "-k", test[2]]
        if first_failure(tree, again, cache):
            raise MutantError(f"{mutant.name}: {found} fails without it too")
    return {"found": found, "seconds": seconds}


def check(root: Path, mutants: Sequence[Mutant], results: Path | None) -> dict[str, dict[str, str | float]]:
    """The result of each mutant by its name, read from `results` where it is there, and else found out and kept there.

    Raises:
        MutantError: a mutant that does not fit the tree, before any is run; or see `first_failure`.
    """
    for mutant in mutants:
        mutated(mutant, (root / mutant.file).read_text(encoding="utf-8"))
    known = json.loads(results.read_text(encoding="utf-8")) if results and results.exists() else {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        copy_tree(root, tree)
        for mutant in mutants:
            if mutant.name in known:
                continue
            known[mutant.name] = attempt(tree, mutant)
            print(f"{mutant.name}: {known[mutant.name]['found'] or 'SURVIVED'}", flush=True)
            if results:
                draft = results.with_name(f".{results.name}.new")
                draft.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
                draft.replace(results)
    return {mutant.name: known[mutant.name] for mutant in mutants}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description="Put mistakes into a copy of the checkout, one after another, and list the test that finds each.",
        epilog="examples:\n  python -m tests.mutants --results mutants.json\n  python -m tests.mutants kth-ties",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="JSON file of the results; mutants that have one there are not run again; default: none",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="Names of mutants to run; default: all")
    options = parser.parse_args(arguments)
    unknown = {*options.names} - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"no mutant {', '.join(sorted(unknown))}")
    end_on_sigterm()
    chosen = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    try:
        found = check(ROOT, chosen, options.results)
    except MutantError as error:
        print(f"tests.mutants: {error}", file=sys.stderr)
        return 2
    print("\n| mutant | file | mistake | found by | seconds |\n|---|---|---|---|---:|")
    for mutant in chosen:
        result = found[mutant.name]
        test = f"`{result['found']}`" if result["found"] else "**survived**"
        print(f"| {mutant.name} | `{mutant.file}` | {mutant.why} | {test} | {result['seconds']:.0f} |")
    survived = sum(not result["found"] for result in found.values())
    print(f"\n{len(found) - survived} of {len(found)} found")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
