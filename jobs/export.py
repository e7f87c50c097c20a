"""Exports every series of a run file as CSV, for TensorBoard or for Weights & Biases.

    python -m jobs.export runs/vgg.h5 --csv vgg.csv
    python -m jobs.export runs/vgg.h5 --tensorboard logs/vgg      then: tensorboard --logdir logs
    python -m jobs.export runs/vgg.h5 --wandb-offline out         then: wandb sync out/wandb/offline-run-*

Series are named as in the file: steps/loss, evaluations/accuracy, measures/xi, stages/select. Exit status: 0; 2 when the run file
cannot be read, a library is missing or the output cannot be written.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from data.command import command_parser
from jobs.run.file import RunFileError
from jobs.run.probe import check_readable
from jobs.run.reader import RunReader


class Export(NamedTuple):
    """Configuration, names of the series, step -> name -> value (finite ones alone), and when training began (Unix time)."""

    config: dict[str, Any]
    names: list[str]
    rows: dict[int, dict[str, float]]
    began: float


def read_export(path: Path) -> Export:
    """Read a run file, whatever became of its writer. Raises RunFileError: it cannot be read."""
    check_readable(path)  # HDF5 may hang or crash on a damaged file
    with RunReader(path) as reader:
        groups = {"steps": reader.steps(), "evaluations": reader.evaluations()}
        groups |= {"measures": reader.measures(), "stages": reader.stages()}
        config, began = reader.config, datetime.fromisoformat(reader.info.started).timestamp()
    groups["stages"]["step"] = groups["steps"]["step"]
    names, rows = [], dict[int, dict[str, float]]()
    for group, columns in groups.items():
        for column in [name for name in columns if name != "step"]:
            names.append(f"{group}/{column}")
            # not strict: a writer at work may have written one column further than another
            for step, value in zip(columns["step"].tolist(), columns[column].tolist(), strict=False):
                row = rows.setdefault(step, {})
                if math.isfinite(value):
                    row[names[-1]] = value
    return Export(config, names, dict(sorted(rows.items())), began)


def write_csv(export: Export, path: Path) -> None:
    """One row for each step; what a step does not have is empty."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["step", *export.names])
        writer.writeheader()
        writer.writerows({"step": step, **row} for step, row in export.rows.items())


def write_tensorboard(export: Export, folder: Path) -> None:
    """Event files, by torch's SummaryWriter."""
    from torch.utils.tensorboard import SummaryWriter

    elapsed = 0.0
    with SummaryWriter(folder) as writer:
        writer.add_text("config", f"```json\n{json.dumps(export.config, indent=2)}\n```", 0)
        for step, row in export.rows.items():
            elapsed = row.get("steps/elapsed", elapsed)
            for name, value in row.items():
                writer.add_scalar(name, value, step, export.began + elapsed)


def write_wandb(export: Export, folder: Path, name: str) -> None:
    """An offline run, by wandb's own client; nothing is sent."""
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(mode="offline", dir=folder, project="oktopk", name=name, config=export.config)
    for step, row in export.rows.items():
        run.log(row, step=step)
    run.finish()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = command_parser(
        "jobs.export",
        "Write the series of a run for another tool: CSV, TensorBoard or Weights & Biases.",
        "runs/vgg.h5 --csv vgg.csv",
        "runs/vgg.h5 --tensorboard events",
    )
    parser.add_argument("run", type=Path, metavar="RUN.h5", help="Run file, finished or still being written")
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    text = "CSV file to write, with a row for each step and a column for each series"
    add("--csv", type=Path, metavar="FILE", help=text)
    text = "Folder for event files, which tensorboard --logdir DIR shows"
    add("--tensorboard", type=Path, metavar="DIR", help=text)
    text = "Folder for an offline run, which wandb sync uploads"
    add("--wandb-offline", type=Path, metavar="DIR", help=text)
    options = parser.parse_args(argv)
    try:
        export = read_export(options.run)
        if options.csv is not None:
            write_csv(export, options.csv)
        elif options.tensorboard is not None:
            write_tensorboard(export, options.tensorboard)
        else:
            write_wandb(export, options.wandb_offline, options.run.stem)
    except (RunFileError, OSError, ModuleNotFoundError) as error:
        advice = ": pip install -e '.[export]'" if isinstance(error, ModuleNotFoundError) else ""
        print(f"jobs.export: {error}{advice}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
