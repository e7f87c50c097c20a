"""The page and what its pictures show: groups over seeds, panels by numbers worked out by hand."""

from __future__ import annotations

import base64
import itertools
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from jobs.render.chart import METHODS, Axis, Chart, Level, Line
from jobs.render.draw import HEIGHT, PAGE, WIDTH, draw, plotted, svg
from jobs.render.table import Column, table
from jobs.report import pictures
from jobs.report.__main__ import main
from jobs.report.groups import differences, group_runs
from jobs.report.summary import WARM_STEPS, read_runs
from jobs.report.tables import method_figures
from jobs.report.write import report
from tests.jobs.report.test_report import rows, write_run
from tests.jobs.report.test_tables import methods

RESULTS = Path(__file__).parents[3] / "docs" / "results"


class Closed(HTMLParser):
    """Reads a page whose open elements must be closed in order, and which fetches nothing."""

    VOID = ("meta", "img", "br", "hr", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag not in ("script", "link", "iframe", "object")
        self.open += [tag] * (tag not in self.VOID)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.pictures
def test_the_page_stands_alone_and_links_to_its_figures(tmp_path: Path) -> None:
    paths = methods(tmp_path)["train"]
    out = tmp_path / "out"
    fast = [write_run(tmp_path / f"fast-{ranks}.h5", ranks=ranks) for ranks in (1, 2)]
    claims = table(
        [Column("Claim", str), Column("Long", lambda text: str(len(text)))],
        ["dense < 90 % & more", "<89 %>"],
        "Claims",
    )
    slow = [write_run(tmp_path / "slow.h5")]
    report(
        paths, out, throughput=fast, slow=slow, target=0.9, title="Trial <1>", first=lambda groups: [claims]
    )
    text = (out / "index.html").read_text(encoding="utf-8")
    Closed(text)
    assert "url(" not in text
    assert "@import" not in text
    images = re.findall(r'<img alt="([^"]+)" src="data:image/svg[+]xml;base64,([^"]+)">', text)
    assert len(images) == text.count("<img") > 5
    for _, source in images:
        ElementTree.fromstring(base64.b64decode(source))
    links = re.findall(r'<a href="([^"]+)">', text)
    assert all((out / link).is_file() for link in links)
    assert {"accuracy-over-time.csv", "words-over-steps.csv", "xi.csv"} <= set(links)
    # every panel's numbers are there, none left over from elsewhere
    assert {path.name for path in out.glob("*.csv")} == {link for link in links if link.endswith(".csv")}
    assert "Trial &lt;1&gt;" in text
    assert "&lt;89 %&gt;" in text and "dense &lt; 90 % &amp; more" in text
    for fact in ("2 x a GPU, 2 cores (a processor)", "0123456789abcdef", "2026-01-01", "python 3.11"):
        assert fact in text
    assert "jobs.train oktopk-1.toml" in text and "jobs.train slow.toml" in text
    assert "A step on 4 ranks over links of 1 Gb/s" in text and (out / "runs" / "slow-steps.csv").exists()


@pytest.mark.pictures
@pytest.mark.filterwarnings("error")
def test_a_target_far_above_is_in_the_picture(tmp_path: Path) -> None:
    (group,) = group_runs(read_runs([write_run(tmp_path / "a.h5", accuracy=0.1)]))
    panel = pictures.chart([group], pictures.held_out("accuracy", 0.9))
    with mpl.rc_context(PAGE):
        axes = Figure().subplots()
        draw(axes, panel)
    assert axes.get_ylim()[0] < 0.5
    assert axes.get_ylim()[1] > 0.9
    (name,) = axes.texts
    assert isinstance(name, Annotation)
    assert (name.get_text(), name.xy[1]) == ("target 90%", 0.9)
    assert "</svg>" in svg(panel)


def test_labels_of_close_levels_do_not_overlap() -> None:
    line = Line("Ok-Topk", np.array([1.0, 2.0]), np.array([100.0, 5e6]))
    k = 1000.0
    levels = tuple(Level(2 * k * (ranks - 1) / ranks, "2k(P−1)/P") for ranks in (8, 16, 17))
    words = Chart("words", "", "", Axis("step", "step"), Axis("words", "words", log=10), (line,), levels)
    with mpl.rc_context(PAGE):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.subplots()
        draw(axes, words)
        figure.draw_without_rendering()
        boxes = [label.get_window_extent() for label in axes.texts]
    assert len(boxes) == 3
    assert all(below.y1 <= above.y0 for below, above in itertools.pairwise(boxes))


def test_a_chart_without_labels_has_no_legend() -> None:
    for label in ("", "Ok-Topk"):
        line = Line(label, np.array([1.0, 2.0]), np.array([1.0, 2.0]))
        chart = Chart("a", "", "", Axis("step", "step"), Axis("loss", "loss"), (line,))
        assert len(plotted(chart, WIDTH)[0].legends) == bool(label)


def test_groups_of_one_method_are_named_by_their_settings(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / "a.h5", settings={"density": 0.01}),
        write_run(tmp_path / "b.h5", settings={"density": 0.02}),
        write_run(tmp_path / "c.h5", settings={"density": 0.02}, ranks=1),
        write_run(tmp_path / "d.h5", method="dense", settings={"density": 0.5}),
    ]
    groups = group_runs(read_runs(paths))
    assert [group.label for group in groups] == [
        "Dense",
        "Ok-Topk (1 rank, density 0.02)",
        "Ok-Topk (4 ranks, density 0.01)",
        "Ok-Topk (4 ranks, density 0.02)",
    ]
    assert len({str(group.dashes) for group in groups[1:]}) == 3
    assert len({group.colour for group in groups}) == 2
    assert differences(groups) == {"ranks": [4, 1, 4, 4], "reduction.density": [0.5, 0.02, 0.01, 0.02]}


def test_the_time_to_a_target_is_that_of_training(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a.h5", xi=(1.0, 1.0))
    (run,) = read_runs([path])
    # half a second a step; measuring took 0.25 s in steps 5 and 15, evaluating 0 s after step 1
    assert run.training_seconds[:6] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.25, 2.75])
    assert run.training_seconds[-1] == pytest.approx(25.0 - 0.5)
    (group,) = group_runs([run])
    assert group.seconds_to(0.5) == pytest.approx([0.5])
    assert group.seconds_to(0.9) == pytest.approx([24.5])
    assert group.steps_to(0.9) == [50.0]
    assert group.seconds_to(0.95) == []
    assert method_figures(group, 0.95)["runs_that_reached_it"] == 0


def test_parts_of_a_step_add_up_to_it(tmp_path: Path) -> None:
    steps = 50
    stages = {
        f"seconds_{name}": np.full(steps, value) for name, value in (("data", 0.001), ("backward", 0.008))
    }
    (run,) = read_runs([write_run(tmp_path / "a.h5", **stages)])
    parts = {name: values[-1] for name, values in run.parts().items()}
    expected = {"compute": 0.012, "selection": 0.002, "communication": 0.0, "combined": 0.0, "data": 0.001}
    assert parts == pytest.approx(expected)
    run.stages["step"] = run.stages.pop("select")
    assert (run.parts()["selection"][-1], run.parts()["combined"][-1]) == (0.0, 0.002)
    assert sum(parts.values()) == pytest.approx(run.step_seconds[-1])
    assert len(run.warm(run.step_seconds)) == steps - 10
    (long,) = read_runs([write_run(tmp_path / "b.h5", steps=500)])
    assert len(long.warm(long.step_seconds)) == 500 - WARM_STEPS


def test_long_runs_have_few_points_of_the_same_mean(tmp_path: Path) -> None:
    (group,) = group_runs(read_runs([write_run(tmp_path / "a.h5", steps=4800, loss=np.arange(4800.0))]))
    (line,) = pictures.chart([group], pictures.LOSS).lines
    assert len(line.x) == pictures.POINTS
    assert line.y.mean() == pytest.approx(4799 / 2)
    assert line.x - 1 == pytest.approx(line.y)
    assert line.x[0] == pytest.approx(np.arange(1, 21).mean())


def test_losses_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    loss = np.array([1.0, np.nan, np.inf, 3.0])
    (group,) = group_runs(read_runs([write_run(tmp_path / "a.h5", steps=4, loss=loss)]))
    (line,) = pictures.chart([group], pictures.LOSS).lines
    assert line.y.tolist() == [1.0, 3.0]


def test_a_method_has_one_colour_everywhere() -> None:
    assert len({colour for _, colour, _ in METHODS.values()}) == len(METHODS)


def test_the_command_takes_throughput_runs_alone(tmp_path: Path) -> None:
    paths = [str(write_run(tmp_path / f"{ranks}.h5", ranks=ranks)) for ranks in (1, 2)]
    assert main([paths[0], "--throughput", *paths, "-o", str(tmp_path / "out")]) == 0
    summary = rows(tmp_path / "out" / "summary.csv")
    assert [row["ranks"] for row in summary] == ["1", "1", "2"]
    assert "Throughput" in (tmp_path / "out" / "index.html").read_text()


def drawn_ticks(chart: Chart, which: str) -> list[str]:
    """Texts of the ticks of axis "x" or "y" that lie within its limits."""
    figure = Figure()
    with mpl.rc_context(PAGE):
        axes = figure.subplots()
        draw(axes, chart)
        figure.draw_without_rendering()
    low, high = getattr(axes, f"get_{which}lim")()
    ticks = getattr(axes, f"{which}axis")
    return [
        label.get_text()
        for minor in (False, True)
        for label, place in zip(
            ticks.get_ticklabels(minor=minor), ticks.get_ticklocs(minor=minor), strict=True
        )
        if low <= place <= high and label.get_text()
    ]


@pytest.mark.parametrize("growth", [0.1, 5.0, 1000.0])
def test_an_axis_of_words_has_numbers_even_within_a_decade(tmp_path: Path, growth: float) -> None:
    words = np.full(50, 1.2e6 * growth / 49)
    words[0] = 1.2e6
    groups = group_runs(read_runs([write_run(tmp_path / "a.h5", words=words)]))
    assert len(drawn_ticks(pictures.chart(groups, pictures.LOSS, pictures.BYTES), "x")) >= 2


@pytest.mark.parametrize("decades", [1.5, 4.0])
def test_a_logarithmic_axis_of_losses_has_plain_numbers(tmp_path: Path, decades: float) -> None:
    loss = np.geomspace(0.02, 0.02 * 10**decades, 50)
    groups = group_runs(read_runs([write_run(tmp_path / "a.h5", loss=loss)]))
    ticks = drawn_ticks(pictures.chart(groups, pictures.LOSS), "y")
    assert len(ticks) >= 2 and all(float(tick) > 0 for tick in ticks)


def test_without_tokens_of_all_steps_are_compared(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / "told.h5", positions=512),
        write_run(tmp_path / "untold.h5", method="topka"),
    ]
    for files, over in ((paths[:1], "tokens"), (paths, "steps")):
        drawn = pictures.sections(group_runs(read_runs(files)), None)["Training loss"]
        assert [panel.name for panel in drawn] == [f"loss-over-{x}" for x in (over, "time", "bytes")]
