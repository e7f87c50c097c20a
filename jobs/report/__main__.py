"""Compare runs: one HTML page with pictures, the same figures as CSV files, and its tables on the terminal.

    python -m jobs.report runs/dense.h5 runs/oktopk.h5 -o report --target 0.9

Runs may still be going on, or have been killed; a file that is no run is named and left out. Runs that differ in
their seed alone are one line of a picture and one row of a table. Documents of jobs.bench (JSON) may stand among
the runs: the tables of each are printed. Writes into DIR:

    index.html                          the page: nothing beside it is needed to read it
    summary.csv methods.csv             a row for each run; a row for each method, means over its seeds
    PICTURE.csv                         what each picture of the page draws
    runs/RUN-{steps,evaluations,measures}.csv   all that a run file holds
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from data.command import command_parser, show
from jobs.bench.document import BenchError, read
from jobs.bench.tables import document_tables
from jobs.report.write import PAGE, report
from jobs.run.file import RunFileError


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m jobs.report RUN... -o DIR`. Returns the exit status, 2 for input that cannot be used."""
    parser = command_parser(
        "jobs.report",
        "Compare runs of jobs.train on one HTML page, with the same figures as CSV files.",
        "runs/dense.h5 runs/oktopk.h5 -o report --target 0.9",
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="Run files of jobs.train, or JSON files of jobs.bench")
    text = "Folder of the page and its CSV files; default: %(default)s"
    add("-o", "--output", default="report", metavar="DIR", help=text)
    text = "Held-out accuracy, in (0, 1], that the page gives the time to; default: none"
    add("--target", type=float, metavar="ACCURACY", help=text)
    text = "Run files compared by their speed alone, over the number of ranks; default: none"
    add("--throughput", nargs="+", default=[], metavar="RUN", help=text)
    add("--title", default="", help="Heading of the page; default: Runs compared")
    text = "Sentence for the top of the page; may be repeated"
    add("--note", action="append", default=[], metavar="TEXT", help=text)
    options = parser.parse_args(argv)
    if options.target is not None and not 0.0 < options.target <= 1.0:
        show(f"jobs.report: --target {options.target} is not in (0, 1]", file=sys.stderr)
        return 2
    documents = [path for path in options.runs if Path(path).suffix == ".json"]
    runs = [path for path in options.runs if path not in documents]
    try:
        for document in documents:
            show(document_tables(read(document)))
        if runs or options.throughput:
            show(
                report(
                    runs,
                    options.output,
                    throughput=options.throughput,
                    target=options.target,
                    title=options.title,
                    notes_besides=options.note,
                )
            )
            show(f"\npage: {Path(options.output) / PAGE}")
    except (BenchError, RunFileError) as error:
        show(f"jobs.report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
