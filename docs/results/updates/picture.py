"""Draws steps.json: python docs/results/updates/picture.py, from the top of the checkout."""

import json
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from jobs.render.chart import COLOURS, GREY, STYLE

HERE = Path(__file__).parent
TITLES = {
    "ddp-bfloat16": ("DDP, bfloat16", GREY),
    "powersgd-4": ("PowerSGD, rank 4", "#117733"),
    "updates": ("updates, every step", COLOURS[1]),
    "updates-every-4": ("updates, every 4 steps", "#e8a15c"),
}
BAR = 0.21


def main(output: Path = HERE / "steps.svg") -> None:
    document = json.loads((HERE / "steps.json").read_text(encoding="utf-8"))
    found = {(row["rate"], row["name"]): row["mean_ms"] for row in document["rows"]}
    rates = ["1 Gb/s", "10 Gb/s"]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.8, 3.2), layout="constrained")
        axes = figure.subplots()
        for place, rate in enumerate(rates):
            for number, (name, (title, colour)) in enumerate(TITLES.items()):
                mean, at = found[rate, name], place + BAR * (number - 1.5)
                axes.bar(at, mean, 0.9 * BAR, color=colour, label=None if place else title)
                text = f"{mean:,.0f}"
                axes.annotate(text, (at, mean), (0, 3), textcoords="offset points", ha="center", color=colour)
        alone = found["10 Gb/s", "alone"]
        axes.axhline(
            alone, color=COLOURS[0], linewidth=1.8, linestyle=(0, (4, 1.5)), label="computation alone"
        )
        axes.set_yscale("log")
        axes.set_ylim(10, 6000)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_xticks(range(len(rates)), rates)
        axes.grid(axis="x", visible=False)
        axes.set_ylabel("training step, ms")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.set_title("GPT of 98 M parameters, AdamW, four hosts of one H100", color=GREY, fontsize=10)
        figure.savefig(output, metadata={"Date": None})


if __name__ == "__main__":
    main()
