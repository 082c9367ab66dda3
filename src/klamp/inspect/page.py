"""The parts of the report's page, from top to bottom, as HTML."""

import re
from collections.abc import Iterator, Sequence
from itertools import count as numbers

from klamp.inspect import completions
from klamp.inspect.charts import Chart, Panel, Section, in_words
from klamp.inspect.headline import Fact, Tile, tiles, warnings
from klamp.inspect.markup import Html, joined, tag, text
from klamp.inspect.runs import Run
from klamp.inspect.settings import CONFIG, differences
from klamp.inspect.wording import count, duration

FACTS = ("task", "reward", "model", "seed")
"""Settings that say what a run was, where they are plain values or name themselves."""
NAMED_BY = ("", ".name", ".function", ".type", ".path")


def header(runs: Sequence[Run]) -> Html:
    """Who, how long, what came of it, and what to be wary of."""
    several = len(runs) > 1
    title = tag("h1", f"{len(runs)} runs, overlaid" if several else runs[0].name)
    about = tag(
        "ul",
        *(
            tag("li", key(i) if several else "", about_run(run, several))
            for i, run in enumerate(runs)
        ),
        class_="runs",
    )
    shown = joined(tile(one, runs) for one in tiles([run.log for run in runs]))
    alerts = joined(
        tag("p", tag("strong", f"{run.name}: " if several else "Careful: "), words, role="alert")
        for run in runs
        for words in warnings(run.log)
    )
    return joined([title, about, alerts, tag("div", shown, class_="tiles")])


def about_run(run: Run, named: bool) -> Html:
    """Its length and the settings that say what it was."""
    seconds = sum(step.seconds for step in run.log.steps)
    facts = [count(len(run.log.steps), "step"), duration(seconds)]
    facts += [f"{fact} {value}" for fact in FACTS if (value := setting(run, fact))]
    name = tag("strong", run.name) if named else Html("")
    return joined([name, *(tag("span", fact) for fact in facts)])


def setting(run: Run, name: str) -> str | None:
    """A setting's value, or the name of what it is set to."""
    found = (run.settings.flat.get(name + suffix) for suffix in NAMED_BY)
    return next((value for value in found if value and value != "null"), None)


def key(run: int) -> Html:
    """The colour of a run."""
    return tag("i", class_="key", style=f"--c: var(--c{run % 7})", aria_hidden="true")


def tile(one: Tile, runs: Sequence[Run]) -> Html:
    """A question with an answer per run."""
    several = len(runs) > 1
    facts = (
        tag("div", joined([key(i), run.name]) if several else "", answer(fact), class_="fact")
        for i, (run, fact) in enumerate(zip(runs, one.facts, strict=True))
    )
    return tag("section", tag("h2", one.title), *facts, class_="card tile")


def answer(fact: Fact) -> Html:
    """``12.5 % → 84.4 %``, the change, and what was measured."""
    before = joined([tag("span", fact.before), " → "]) if fact.before else Html("")
    change = tag("small", fact.change) if fact.change else Html("")
    return joined(
        [
            tag("p", before, tag("strong", fact.after), " ", change, class_="value"),
            tag("p", fact.detail, class_="how"),
        ]
    )


def contents(drawn: Sequence[Section]) -> Html:
    """Links to the sections."""
    titles = [*(section.title for section in drawn), "Completions", "Settings"]
    return joined(tag("a", title, href=f"#{anchor(title)}") for title in titles)


def anchor(title: str) -> str:
    """A title as the end of an address."""
    return re.sub(r"\W+", "-", title.lower())


def charts(drawn: Sequence[Section]) -> Html:
    """Every section; panels are numbered through, as the script's data are."""
    numbering = numbers()
    return joined(section(one, numbering) for one in drawn)


def section(one: Section, numbering: Iterator[int]) -> Html:
    """A section's charts, two or three in a row, none alone in one."""
    narrow = [chart for chart in one.charts if len(chart.panels) < 2]
    alone = narrow[-1:] if len(narrow) % 2 and len(narrow) != 3 else []
    cards = [
        figure(chart, numbering, wide=chart not in narrow or chart in alone) for chart in one.charts
    ]
    inside = tag("div", *cards, class_="grid three" if len(narrow) == 3 else "grid")
    title = tag("h2", one.title)
    if one.folded:
        panels = sum(len(chart.panels) for chart in one.charts)
        summary = tag("summary", title, " ", tag("small", count(panels, "metric")))
        return tag("section", tag("details", summary, inside), id=anchor(one.title))
    return tag("section", title, inside, id=anchor(one.title))


def figure(chart: Chart, numbering: Iterator[int], wide: bool) -> Html:
    """A card for a chart, or for a chart that is many small ones."""
    several = len(chart.panels) > 1
    places = [place(panel, chart, next(numbering), several) for panel in chart.panels]
    return tag(
        "figure",
        tag("figcaption", tag("h3", chart.plan.title), tag("p", chart.plan.how, class_="how")),
        tag("div", *places, class_="panels") if several else joined(places),
        zeros(chart.always_zero),
        class_="card wide" if wide else "card",
    )


def place(panel: Panel, chart: Chart, number: int, several: bool) -> Html:
    """Where the script draws a panel, with its words for who cannot see it."""
    words = in_words(panel, chart.plan)
    return tag(
        "div",
        tag("h4", broken(panel.title)) if panel.title else "",
        tag("ul", class_="legend"),
        tag("div", class_="plot", role="img", aria_label=words),
        tag("noscript", tag("p", words)),
        class_="panel small" if several else "panel",
        data_panel=str(number),
    )


def broken(name: str) -> Html:
    """A metric's name that may go on in the next line after / and _."""
    return Html(re.sub("([/_])", r"\1<wbr>", text(name)))


def zeros(metrics: Sequence[str]) -> Html:
    """The metrics that nobody needs to see as a line at 0."""
    if not metrics:
        return Html("")
    named = joined((tag("code", metric) for metric in metrics), ", ")
    return tag("p", "0 at every step, so not drawn: ", named, ".", class_="how zeros")


def answers(runs: Sequence[Run]) -> Html:
    """The completions of every run, before and after."""
    several = len(runs) > 1
    cards = (
        tag(
            "article",
            tag("h3", joined([key(i), run.name])) if several else "",
            completions.table(run.log.evaluations),
            class_="card",
        )
        for i, run in enumerate(runs)
    )
    return tag("section", tag("h2", "Completions"), *cards, id=anchor("Completions"))


def setup(runs: Sequence[Run]) -> Html:
    """Where the runs differ; then each one's objective and whole configuration."""
    several = len(runs) > 1
    differ = difference_table(runs) if several else Html("")
    cards = (
        tag(
            "article",
            tag("h3", joined([key(i), run.name])) if several else "",
            texts(run),
            class_="card",
        )
        for i, run in enumerate(runs)
    )
    return tag("section", tag("h2", "Settings"), differ, *cards, id=anchor("Settings"))


def difference_table(runs: Sequence[Run]) -> Html:
    """The settings that are not the same in all runs."""
    title = tag("h3", "Where the runs differ")
    rows = differences([run.settings for run in runs])
    if not rows:
        same = tag("p", f"Nowhere that {CONFIG} shows.", class_="none")
        return tag("article", title, same, class_="card")
    heads = (tag("th", key(i), run.name, scope="col") for i, run in enumerate(runs))
    body = (
        tag("tr", tag("th", setting, scope="row"), *(tag("td", value) for value in values))
        for setting, values in rows
    )
    head = tag("thead", tag("tr", tag("th", "Setting", scope="col"), *heads))
    table = tag("table", head, tag("tbody", *body), class_="differences")
    scroll = tag(
        "div", table, class_="scroll", tabindex="0", role="region", aria_label="Differences"
    )
    return tag("article", title, scroll, class_="card")


def texts(run: Run) -> Html:
    """The objective and the configuration, folded."""
    if run.settings.text is None:
        return tag("p", f"This run has no {CONFIG}.", class_="none")
    parts = {"Objective": run.settings.objective, f"All of {CONFIG}": run.settings.text}
    return joined(
        tag("details", tag("summary", title), tag("pre", words, tabindex="0"))
        for title, words in parts.items()
        if words is not None
    )
