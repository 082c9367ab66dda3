"""The report as a browser shows it: everything drawn, nothing thrown, nothing out of the window."""

import json

import chromium
import pytest
from fake_run import write_run

from klamp.inspect import render, runlog
from klamp.inspect.runlog import Completion, Evaluation

pytestmark = pytest.mark.skipif(
    chromium.executable() is None, reason=f"none of {', '.join(chromium.NAMES)} is installed"
)
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)><!--\u2028"

LONG_NAME = "b<i>" + "x" * 150

# How many pixels of a panel are of its last line's colour, as far as smooth edges leave it pure.
PIXELS = """(place) => {
  const probe = document.body.appendChild(document.createElement("i"));
  const data = JSON.parse(document.getElementById("data").textContent);
  const { colour } = data.panels[place.dataset.panel].lines.at(-1);
  probe.style.color = `var(--c${colour})`;
  const [r, g, b] = getComputedStyle(probe).color.match(/[0-9]+/g).map(Number);
  probe.remove();
  const canvas = place.querySelector("canvas");
  const { data: d } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let seen = 0;
  for (let i = 0; i < d.length; i += 4) {
    const off = Math.abs(d[i] - r) + Math.abs(d[i + 1] - g) + Math.abs(d[i + 2] - b);
    if (d[i + 3] > 100 && off < 24) seen++;
  }
  return seen;
}"""
PLACES = "[...document.querySelectorAll('[data-panel]')]"
AREA = """(({ left, top, width }) => [left, top, width])(
  document.querySelector(".u-over").getBoundingClientRect())"""
# Whatever ends right of the window, unless it is in a box of its own that scrolls.
OUTSIDE = """[...document.querySelectorAll("body *")]
  .filter((e) => !e.closest(".scroll, pre, nav"))
  .filter((e) => e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
  .map((e) => e.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    page = chromium.Page(tmp_path_factory.mktemp("profile"))
    yield page
    page.close()


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return render.write([write_run(tmp_path_factory.mktemp("one") / "run")])


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Runs of different lengths; one has gaps, text that tries to get out, and a long word."""

    def gaps(step):
        return {"critic/kl": float("nan"), f"x/{HOSTILE}": 1.0} if step % 7 == 0 else {}

    place = tmp_path_factory.mktemp("two")
    runs = [write_run(place / "a"), write_run(place / LONG_NAME, steps=25, every=5, extra=gaps)]
    said = Completion(
        prompt=HOSTILE, completion=HOSTILE + "x" * 500, answer="y" * 200, score=None, correct=None
    )
    for step in (0, 25):
        runlog.write_evaluation(runs[1], Evaluation(step=step, metrics={}, samples=(said,)))
    return render.write(runs)


def expected_points(path):
    """How many points each panel has, from the file itself."""
    block = path.read_text().split('id="data">')[1].split("</script>")[0]
    panels = json.loads(block)["panels"]
    return [sum(y is not None for line in p["lines"] for y in line["y"]) for p in panels]


def points(browser):
    return browser.run(f"{PLACES}.map((place) => Number(place.dataset.points))")


def assert_in_order(browser, path):
    """Drawn to the last point, without a complaint or a request for anything else."""
    assert browser.run("document.documentElement.dataset.error") is None
    assert browser.complaints() == []
    assert browser.requests() == [path.resolve().as_uri()]
    assert not [e for e in browser.events if e["method"] == "Page.javascriptDialogOpening"]
    assert points(browser) == expected_points(path)
    assert all(points(browser))
    assert browser.run("window.klampCharts.length") == len(points(browser))
    assert browser.run("document.documentElement.dataset.charts") == str(len(points(browser)))


def seen(browser):
    """The pixels of the last line of every panel: it lies above the others."""
    return browser.run(f"{PLACES}.map({PIXELS})")


def test_every_chart_is_drawn_and_nothing_complains(browser, one):
    browser.scheme("light")
    browser.open(one)
    assert_in_order(browser, one)
    assert len(points(browser)) >= 20
    assert min(seen(browser)) > 20


def test_overlaid_runs_are_drawn_and_their_text_stays_text(browser, two):
    browser.open(two)
    assert_in_order(browser, two)
    assert browser.run("document.querySelectorAll('img, header i:not(.key)').length") == 0
    assert (
        browser.run("document.querySelector('.runs li:last-child strong').textContent") == LONG_NAME
    )
    assert min(seen(browser)) > 5
    rows = "[...document.querySelectorAll('.legend')[0].children].map((row) => row.innerText)"
    head, *runs = (row.split() for row in browser.run(rows))  # a row per run, a value per metric
    assert head == ["training", "samples", "evaluation", "greedy", "evaluation"]
    assert [(run[0], run.count("%")) for run in runs] == [("a", 3), (LONG_NAME, 3)]


def test_a_script_that_throws_is_noticed_and_stops_one_chart_only(browser, one, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(one.read_text().replace('"lines":[', '"lines":[null,', 1))
    browser.open(broken)
    assert "TypeError" in browser.run("document.documentElement.dataset.error")
    assert len(browser.complaints()) == 1
    first, *others = points(browser)
    assert first is None
    assert others == expected_points(one)[1:]
    assert "at step 60" in browser.run("document.querySelector('.plot').textContent")


@pytest.mark.parametrize("width", [360, 800])
def test_nothing_sticks_out_of_a_narrow_window(browser, two, width):
    browser.open(two, width=1280)
    browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    browser.resize(width, 740)  # and the charts follow a window that changes
    browser.frames()
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run(OUTSIDE) == []
    assert browser.run(f"""{PLACES}.every((place) => {{
      const [frame, canvas] = [place.querySelector(".plot"), place.querySelector("canvas")];
      return frame.clientWidth > 200 && canvas.clientWidth === frame.clientWidth;
    }})""")
    assert_in_order(browser, two)


def test_charts_follow_the_system_from_light_to_dark_and_back(browser, one):
    browser.scheme("light")
    browser.open(one)
    background = "getComputedStyle(document.body).backgroundColor"
    axis = """(() => {
      const canvas = document.querySelector("canvas");
      const { data } = canvas.getContext("2d").getImageData(0, 0, 36, canvas.height);
      const ink = [...Array(data.length / 4).keys()].filter((i) => data[4 * i + 3] > 200);
      return ink.reduce((sum, i) => sum + data[4 * i], 0) / ink.length;
    })()"""
    light = browser.run(background), browser.run(axis)
    browser.scheme("dark")
    dark = browser.run(background), browser.run(axis)
    assert light[0] != dark[0] == "rgb(15, 17, 21)"
    assert dark[1] > light[1] + 20  # lighter labels on the dark ground
    assert min(seen(browser)) > 20  # in the dark palette, which is another one
    browser.scheme("light")
    assert (browser.run(background), browser.run(axis)) == light
    assert browser.run("document.documentElement.dataset.error") is None


def test_pointing_at_a_chart_shows_the_step_and_its_values_in_all_of_them(browser, one):
    browser.open(one)
    at = "[...new Set([...document.querySelectorAll('.at')].map((e) => e.textContent))]"
    value = "document.querySelectorAll('.legend output')[{}].textContent"
    assert browser.run(at) == [""]
    log = runlog.read(one.parent)
    last = 100 * log.series("task/accuracy")[-1][1]
    assert float(browser.run(value.format(0)).split()[0]) == pytest.approx(last, rel=1e-2)
    left, top, width = browser.run(AREA)
    browser.move(left + width / 2, top + 50)
    assert browser.run(at) == ["step 30"]
    assert float(browser.run(value.format(0)).split()[0]) == pytest.approx(
        100 * dict(log.series("task/accuracy"))[30], rel=1e-2
    )
    browser.move(left + width * 2 / 3, top + 50)  # step 40: evaluations are at 30 and 45
    evaluated = {e.step: e.metrics["eval/accuracy"] for e in log.evaluations}
    assert float(browser.run(value.format(1)).split()[0]) == pytest.approx(
        100 * evaluated[30], rel=1e-2
    )
    dots = "((u) => u.cursor.idxs.map((i) => u.data[0][i]))(window.klampCharts[0].plot())"
    assert browser.run(dots)[1:] == [40, 30, 30]  # where the values are that the legend shows
    browser.move(5, 5)
    assert browser.run(at) == [""]


def test_a_name_in_the_legend_hides_its_line_and_a_button_makes_the_scale_logarithmic(browser, one):
    browser.open(one)
    before = points(browser)
    browser.run("document.querySelector('.legend button').click()")
    browser.frames()
    assert points(browser)[0] == before[0] - 60
    browser.run("document.querySelector('.legend button').click()")
    browser.run("document.querySelectorAll('.log button').forEach((b) => b.click())")
    browser.frames()
    assert points(browser) == before
    kl = "window.klampCharts[2].plot().scales.y"
    assert browser.run(f"{kl}.distr") == 3
    assert browser.complaints() == []


def test_paper_is_white_and_charts_fit_it(browser, one):
    browser.scheme("dark")
    browser.open(one)
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    browser.call("Emulation.setEmulatedMedia", media="print", features=[dark])
    browser.resize(718, 1000)  # an A4 page between its margins
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.frames()
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert (
        browser.run("getComputedStyle(document.querySelector('.card')).color") == "rgb(22, 25, 29)"
    )
    assert browser.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.run(OUTSIDE) == []
    browser.run("dispatchEvent(new Event('afterprint'))")
    browser.call("Emulation.setEmulatedMedia", media="")
    browser.frames()
    assert browser.run("document.documentElement.className") == ""
    assert browser.complaints() == []


def test_a_single_step_can_be_seen(browser, tmp_path):
    path = render.write([write_run(tmp_path / "run", steps=1, every=None)])
    browser.scheme("light")
    browser.open(path)
    assert_in_order(browser, path)
    assert min(seen(browser)) > 3


def test_without_javascript_the_charts_are_in_words(browser, one):
    browser.open(one, scripts=False)
    words = browser.run("document.querySelector('.panel').innerText")
    assert "evaluation: 7.0 % at step 0" in words
