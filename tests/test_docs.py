"""The pages of docs/ build without a warning, and the generated reference is complete."""

from __future__ import annotations

import ast
import csv
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean, median

import pytest

from jobs.config.config import Config
from tests.launched import ROOT

DOCS = ROOT / "docs"
RESULTS = DOCS / "results"


@pytest.mark.long("builds all pages; `make test` has the pages' figures, sentences and blocks of code")
@pytest.mark.timeout(300)
def test_pages_build_without_a_warning(tmp_path: Path) -> None:
    # a warning is a link or an anchor that leads nowhere, a page in no table of contents, a docstring that does not parse, a name
    # in a signature that nothing documents, a command whose --help fails
    build = ["-b", "dummy", "-W", "--keep-going", "-n", "-q", "-d", str(tmp_path / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *build, str(DOCS), str(tmp_path / "pages")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_users_are_told_to_load_cannot_run_code() -> None:
    """Before 2.6 torch.load ran code of a file in spite of weights_only (CVE-2025-32434)."""
    setup = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    oldest = [tuple(map(int, found)) for found in re.findall(r"^ +torch>=(\d+)\.(\d+)$", setup, re.MULTILINE)]
    assert len(oldest) == 3 and min(oldest) >= (2, 6)
    pages = [ROOT / "README.md", *DOCS.glob("*.md"), *(ROOT / "examples").iterdir()]
    sources = [path for package in ("oktopk", "jobs") for path in (ROOT / package).rglob("*.py")]
    for path in (path for path in (*pages, *sources) if path.is_file()):
        text = path.read_text(encoding="utf-8")
        assert text.count("torch.load(") == len(re.findall(r"torch\.load\([^()]*weights_only=True", text)), (
            path
        )


def test_the_reference_has_every_key_and_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    generate = importlib.import_module("generate")
    page = generate.configuration()
    for section, field in Config.model_fields.items():
        assert f"## [{section}]" in page
        for key in field.annotation.model_fields:
            assert f"| `{key}` |" in page
    assert "| `width` | number | `1.0` | > 0.0, <= 8.0 | For vgg16 and lstm:" in page
    assert (
        "| `density` | number | `0.01` |  | Share of the entries that is applied per step, in (0, 1];" in page
    )
    assert '| `nonfinite` | "raise" or "skip" | `"raise"` |' in page
    commands = generate.modules_with_options()
    assert {"jobs.train", "jobs.bench", "jobs.report", "jobs.watch", "data.prepare"} <= commands.keys()
    assert "--set section.key=value" in generate.help_text("jobs.train.__main__:main", "jobs.train")


def test_troubleshooting_has_the_sentences_that_the_library_raises() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").partition("## Of jobs.train")[0]
    cells = [row.split(" | ")[0] for row in page.splitlines() if row.startswith("| `")]
    shown = [sentence for cell in cells for sentence in re.findall("`([^`]+)`", cell)]
    files = [*(ROOT / "oktopk").rglob("*.py"), *(ROOT / "collectives").rglob("*.py")]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    library = "\n".join(text for tree in trees.values() for node in ast.walk(tree) for text in texts(node))
    assert len(shown) > 80
    assert [sentence for sentence in shown if any(part not in library for part in sentence.split("…"))] == []
    # and what the torch side itself raises, or warns of, is there
    raised = {
        text
        for path, tree in trees.items()
        if path.parent.name == "torch"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and re.search("((?<!Attribute)Error|warn)$", ast.unparse(node.func))
        and node.args
        for text in texts(node.args[0])
    }
    assert len(raised) > 20
    assert [sentence for sentence in raised if not any(covers(one, sentence) for one in shown)] == []


def texts(node: ast.AST) -> list[str]:
    """The text of a string, … for what is filled in; nothing for another node."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)]
    return []


def covers(shown: str, raised: str) -> bool:
    """Whether a sentence of the page tells one that is raised, or its beginning."""
    return any(len(part) > 12 and part in raised for part in shown.split("…"))


CONTESTANTS = (
    ("ddp", "oktopk"),
    ("ddp", "oktopk"),
    ("mpi-ring", "oktopk"),
    ("mpi", "oktopk"),
    ("oktopk-flat-plain", "oktopk-hosts-int4"),
    ("nccl", "oktopk"),
    ("nccl", "oktopk-flat-float32"),
    *[("dense", "oktopk")] * 2,
    ("dense/lr=4e-3", "updates/lr=5.6e-3/d=0.0125/lv=0.25/v=ratio/rg=1/rs=1000/b2=root/wire=int4"),
)
"""Of each of the ten results: whose figures the two cells show."""


def test_the_ten_results_are_those_of_the_raw_files() -> None:
    table = (RESULTS / "README.md").read_text(encoding="utf-8").partition("## Rerun it")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ") and "](" in row and "20" in row]
    assert len(rows) == 10
    for row, contestants in zip(rows, CONTESTANTS, strict=True):
        _, what, other, ours, _, _, file, _ = (cell.strip() for cell in row.split("|"))
        name = re.match(r"\[`([^`]+)`\]", file)
        assert name, row
        if name[1].endswith(".csv"):
            known = of_seeds(RESULTS / name[1])
        elif name[1].endswith(".jsonl"):
            known = of_simulations(RESULTS / name[1])
        elif "*" in name[1]:
            known = of_runs(sorted(RESULTS.glob(name[1])), what)
        else:
            known = of_steps(RESULTS / name[1], what)
        for cell, contestant in zip((other, ours), contestants, strict=True):
            found = re.findall(r"([\d.,]+) \(([\d.,]+) … ([\d.,]+)\)", cell)
            assert len(found) == bool(contestant), row
            for shown in found:
                assert any(agree(shown, true) for true in known[contestant]), (
                    what,
                    shown,
                    known[contestant],
                )


Figures = dict[str, list[tuple[float, float, float]]]
"""By contestant: median, least and most of what a file has of it."""


def of_runs(paths: list[Path], what: str) -> Figures:
    """In ms, of three runs' medians."""
    assert len(paths) == 3
    runs = [of_steps(path, what) for path in paths]
    medians = {name: sorted(run[name][0][0] for run in runs) for name in runs[0]}
    return {name: [(middle, least, most)] for name, (least, middle, most) in medians.items()}


def of_simulations(path: Path) -> Figures:
    """Held-out losses of 5.0 M parameters, four workers and 3,000 steps, of all seeds of a specification."""
    found: dict[str, list[float]] = {}
    for run in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if (run["n"], run["P"], run["steps"]) == (5_023_872, 4, 3000):
            found.setdefault(re.sub(r"/seed=\d+$", "", run["spec"]), []).append(run["held"][-1])
    return {name: [(median(losses), min(losses), max(losses))] for name, losses in found.items()}


def of_steps(path: Path, what: str) -> Figures:
    """In ms, of steps in a document of the bench, for the n of a row."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    (length,) = re.findall(r"n = ([\d.]+) M", what) or [None]
    found: Figures = {}
    for run in runs:
        if length and round(run["length"] / 1e6, 1) != float(length):
            continue
        for method in run["methods"]:
            series = method["series"]["seconds"] if isinstance(method["series"], dict) else method["series"]
            steps = series[0] if isinstance(series[0], list) else series
            figures = 1e3 * median(steps), 1e3 * min(steps), 1e3 * max(steps)
            found.setdefault(method["name"], []).append(figures)
    return found


def of_seeds(path: Path) -> Figures:
    """Over the seeds, of every figure of a training's CSV file."""
    with open(path, newline="", encoding="utf-8") as file:
        runs = [run for run in csv.DictReader(file) if re.search(r"-\d\)$", run[next(iter(run))])]
    found: Figures = {"dense": [], "oktopk": []}
    for method, all_figures in found.items():
        for figure, scale in (("held_out_accuracy", 100), ("word_error_rate", 1), ("held_out_loss", 1)):
            if all(run[figure] for run in runs):
                values = [scale * float(run[figure]) for run in runs if run["method"] == method]
                all_figures.append((median(values), min(values), max(values)))
    return found


def agree(shown: tuple[str, ...], true: tuple[float, ...]) -> bool:
    """Whether figures are those, rounded as they are shown."""
    pairs = zip((text.replace(",", "") for text in shown), true, strict=True)
    return all(f"{value:.{len(text.partition('.')[2])}f}" == text for text, value in pairs)


def test_the_archive_of_raw_results_is_unpacked_and_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    raw = importlib.import_module("raw")
    names = raw.unpack(tmp_path / "raw")
    assert {"vgg-4gpus/index.html", "vgg-4gpus/local-nnz.csv", "gpu-net-2x2-10gbit.json"} <= {*names}
    assert not [name for name in names if (RESULTS / name).exists()]
    few = tmp_path / "few"
    shutil.copytree(tmp_path / "raw" / "bert-speed-2gpus", few)
    packed = []
    for number in range(2):
        monkeypatch.setattr(raw, "ARCHIVE", tmp_path / f"{number}.tar.xz")
        assert raw.pack(few) == len([*few.iterdir()])
        packed.append(raw.ARCHIVE.read_bytes())
    assert packed[0] == packed[1]
    raw.unpack(tmp_path / "again")
    assert (tmp_path / "again" / "index.html").read_bytes() == (few / "index.html").read_bytes()


def test_links_of_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)#?([^)]*)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(links) > 15
    for file, anchor in links:
        assert (ROOT / file).exists(), file
        headings = re.findall("^#+ (.*)", (ROOT / file).read_text("utf-8") if anchor else "", re.MULTILINE)
        anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert anchor in [*anchors, ""], (file, anchor)


def test_readme_can_be_read_in_a_minute() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 110
    before = text.partition("\n    pip install")[0]
    assert 0 < len(re.findall(r"\d+(?:[.,]\d+)*", before)) <= 15


@pytest.mark.pictures
def test_readmes_picture_is_drawn_from_the_figures_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(RESULTS / "updates")
    importlib.import_module("picture").main(tmp_path / "steps.svg")
    assert (tmp_path / "steps.svg").read_bytes() == (RESULTS / "updates" / "steps.svg").read_bytes()
    steps = json.loads((RESULTS / "updates" / "steps.json").read_text(encoding="utf-8"))
    ms = {row["name"]: row["mean_ms"] for row in steps["rows"] if row["rate"] == "10 Gb/s"}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{ms['ddp-bfloat16'] / ms['updates']:.1f} times shorter" in readme
    rule = "updates/lr=2e-3/v=ratio/rg=1/rs=1000/b2=.998/wire=int4/mask=union/d=.0125/"
    of_four = rule + "lv=.05/b1=(.5|.478)"  # 0.478 is 0.9^7; seed 0 ran with 0.5
    library = (RESULTS / "updates" / "library.jsonl").read_text("utf-8").splitlines()
    runs = [json.loads(line) for line in library]
    of_many = "updates/lr=1.4e-3/d=.0032/first_density=.032/density_warmup_steps=3000/wire=int4/seed="
    ends = [run["held"][-1] for run in runs if run["spec"].startswith(of_many)]
    assert len(ends) == 3
    many = above_dense(17_135_616, 4, of_four, "2e-3", seeds=(3, 3), ends=mean(ends))
    dense = {run["spec"]: run["held"][-1] for run in runs if run.get("commit") == "61be0a8a"}
    now = {
        run["spec"]: run["held"][-1]
        for run in runs
        if run.get("commit") in ("4ab67449", "0ccf77d7") and "changed" not in run
    }
    small = [
        100 * (1 - now[f"updates/lr=2e-3/d=.0125/wire=int4{seed}"] / dense[f"dense/lr=2e-3{seed}/b2=0.987"])
        for seed in ("", "/seed=1", "/seed=2")
    ]
    large = {run["spec"]: run["held"][-1] for run in runs if run.get("commit") == "b8048023"}
    of_rule, of_dense = (
        mean(loss for spec, loss in large.items() if spec.startswith(kind)) for kind in ("updates", "dense")
    )
    assert len(large) == 6
    above = f"{100 * (of_rule / of_dense - 1):.1f} % above"
    assert f"does](docs/results/updates.md#four-ranks-by-the-library), {above}, with four" in readme
    assert f"17.1 M ends {mean(small):.1f} % below; with" in readme
    assert f"it ends [{many:.1f} % above]" in readme and f"the loss ends [{many:.1f} %]" in readme


def test_the_seconds_to_dense_trainings_loss_are_those_of_the_files() -> None:
    updates = RESULTS / "updates"
    lines = {
        name: [json.loads(line) for line in (updates / f"{name}.jsonl").read_text("utf-8").splitlines()]
        for name in ("hosts", "library")
    }
    held = {
        run["spec"].partition("/")[0]: run["held"]
        for run in lines["library"]
        if (run.get("commit"), run["P"]) == ("abda7bd1", 2)
    }
    goal, curve = held["dense"][23], held["updates"]  # 30 evaluations, of which 24 are at 80 %
    after = next(number for number, loss in enumerate(curve) if loss <= goal)
    steps = 100 * (after + (curve[after - 1] - goal) / (curve[after - 1] - curve[after]))
    page, sooner = (updates.parent / "updates.md").read_text("utf-8"), {}
    assert f"Updates have it after {steps:,.0f} steps" in page
    for rate in ("10gbit", "1gbit"):
        runs = [run for run in lines["hosts"] if (run["commit"], run["rate"]) == ("abda7bd1", rate)]
        ms = {
            kind: median(
                run["step_ms"] for run in runs if run["spec"].startswith(kind) and run["steps"] < 100
            )
            for kind in ("updates", "bfloat16", "powersgd")
        }
        (first,) = (run["first_100_s"] for run in runs if run["steps"] == 120)
        seconds = first + (steps - 100) * ms["updates"] / 1e3
        sooner[rate] = [2.4 * ms[kind] / seconds for kind in ("bfloat16", "powersgd")]
    over, hook = zip(*sooner.values(), strict=True)
    assert f"| DDP over updates | **{over[0]:.1f}** | **{over[1]:.1f}** |" in page
    assert f"as dense training | {hook[0]:.1f} | {hook[1]:.1f} |" in page
    assert f"[{over[0]:.1f} times sooner]" in (ROOT / "README.md").read_text("utf-8")


def test_steps_between_hosts_of_two_gpus_are_those_of_the_file() -> None:
    lines = (RESULTS / "updates" / "hosts.jsonl").read_text("utf-8").splitlines()
    runs = [run for run in map(json.loads, lines) if run["device"] == "4 H200, two hosts of two"]
    over = {"rank": [0.0, 0.0], "host": [0.0, 0.0]}
    for column, rate in enumerate(("10gbit", "1gbit")):
        ms = {
            kind: median(
                run["step_ms"]
                for run in runs
                if run["rate"] == rate
                and run["steps"] < 100
                and run["spec"].startswith(kind.partition(" ")[0])
                and ("replica=rank" in run["spec"]) == ("rank" in kind)
            )
            for kind in ("bfloat16", "updates rank", "updates host")
        }
        for replica, ratios in over.items():
            ratios[column] = ms["bfloat16"] / ms[f"updates {replica}"]
    page = (RESULTS / "updates.md").read_text("utf-8")
    assert f'| `replica="rank"` | **{over["rank"][0]:.1f}** | **{over["rank"][1]:.0f}** |' in page
    assert f"as by default | {over['host'][0]:.1f} | {over['host'][1]:.0f} |" in page


def above_dense(
    length: int, ranks: int, rule: str, rate: str, seeds: tuple[int, int], ends: float | None = None
) -> float:
    """How far the mean of seeds ends above dense training with the best betas, in percent; on text that is read once.

    Args:
        ranks: of the rule; dense training does not depend on them.
        rule: a regular expression of its runs.
        seeds: numbers of runs expected, by the rule and densely.
        ends: a loss in place of that mean.
    """
    losses: dict[tuple[str, int], list[float]] = {(rule, ranks): [], (f"dense/lr={rate}/b2=.987", 4): []}
    for run in map(json.loads, (RESULTS / "updates" / "runs.jsonl").read_text("utf-8").splitlines()):
        spec = re.sub(r"/seed=\d+$", "", run["spec"])
        if (run["n"], run.get("text"), run["steps"]) == (length, "linux", 3000):
            for (pattern, wanted), of_seeds in losses.items():
                if run["P"] == wanted and re.fullmatch(pattern, spec):
                    of_seeds.append(run["held"][-1])
    assert tuple(map(len, losses.values())) == seeds
    updates, dense = map(mean, losses.values())
    return 100 * ((ends or updates) / dense - 1)
