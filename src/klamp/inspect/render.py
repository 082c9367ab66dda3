"""The HTML report of a run, or of several laid over each other: one file that needs no network."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from klamp.inspect import files, page
from klamp.inspect.charts import Panel, Section, sections
from klamp.inspect.markup import joined, script_json, text
from klamp.inspect.runs import read

ASSETS = Path(__file__).with_name("assets")
SCRIPTS = ("uPlot.iife.min.js", "words.js", "legend.js", "report.js")
REPORT = "report.html"


def write(runs: Sequence[Path]) -> Path:
    """The report as ``report.html`` in the first run's directory."""
    written = report(runs)
    files.write_text(runs[0] / REPORT, written)
    return runs[0] / REPORT


def report(runs: Sequence[Path]) -> str:
    """The whole page: HTML, style, script and data."""
    found = read(runs)
    drawn = sections([run.name for run in found], [run.log for run in found])
    script = "\n".join([f"/*!\n{asset('uPlot.LICENSE')}*/", *map(asset, SCRIPTS)])
    return Template(asset("report.html")).substitute(
        title=text(", ".join(run.name for run in found)),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=asset("uPlot.min.css") + "\n" + asset("report.css"),
        data=script_json(data(drawn)),
        header=page.header(found),
        contents=page.contents(drawn),
        body=joined([page.charts(drawn), page.answers(found), page.setup(found)]),
    )


def asset(name: str) -> str:
    """The text of a file that ships with this module."""
    return (ASSETS / name).read_text(encoding="utf-8")


def data(drawn: Sequence[Section]) -> dict[str, Any]:
    """What the script draws; lines of the same steps share them."""
    steps: dict[tuple[int, ...], int] = {}
    panels = [
        {"unit": chart.plan.unit, "zero": chart.plan.zero, "lines": lines(panel, steps)}
        for section in drawn
        for chart in section.charts
        for panel in chart.panels
    ]
    return {"steps": [list(xs) for xs in steps], "panels": panels}


def lines(panel: Panel, steps: dict[tuple[int, ...], int]) -> list[dict[str, Any]]:
    """A panel's lines as plain values; ``steps`` numbers the distinct steps, and is added to."""
    return [
        {
            "run": line.run,
            "label": line.label,
            "metric": line.metric,
            "style": line.style,
            "colour": line.colour,
            "x": steps.setdefault(tuple(x for x, _ in line.points), len(steps)),
            "y": [None if y is None else float(f"{y:.6g}") for _, y in line.points],
        }
        for line in panel.lines
    ]
