"""The page as a whole: one file, nothing outside it, nothing in it that could get out of place."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from fake_run import write_run

from klamp.errors import DataError
from klamp.inspect import render, runlog
from klamp.inspect.runlog import Completion, Evaluation

HOSTILE = "</script><script>alert(1)</script><!-- <b>&amp;\" 'x' \u2028\u2029 ${x} \\u003c $title é"
VOID = {"meta", "link", "br", "wbr"}


class Parsed(HTMLParser):
    """A page taken apart: (tag, attributes) in order, and the text inside each kind of element."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tags, self.texts, self.open = [], {}, []
        self.feed(page)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in set(self.open):
            self.texts[tag][-1] += data

    def attributes(self, name):
        return [attrs[name] for _, attrs in self.tags if name in attrs]

    @property
    def data(self):
        return json.loads(self.texts["script"][0])

    @property
    def words(self):
        return " ".join("".join(self.texts["body"]).split())


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", steps=20, every=10)


def drawn(parsed):
    """Every (metric, run's colour) that the script draws."""
    return [(line["metric"], line["colour"]) for p in parsed.data["panels"] for line in p["lines"]]


def test_the_report_is_written_into_the_first_run_and_nothing_else_is(tmp_path, run):
    other = write_run(tmp_path / "other", steps=2)
    before = {p.name for p in run.iterdir()}
    assert render.write([run, other]) == run / "report.html"
    assert {p.name for p in run.iterdir()} == before | {"report.html"}
    assert not (other / "report.html").exists()
    assert (run / "report.html").read_text(encoding="utf-8") == render.report([run, other])


def test_the_page_needs_nothing_from_outside(run):
    page = render.report([run])
    without_licences = re.sub(r"/\*!.*?\*/", "", page, flags=re.DOTALL)
    assert "://" not in without_licences
    parsed = Parsed(page)
    assert not parsed.attributes("src")
    assert all(h.startswith("#") or h == "data:," for h in parsed.attributes("href"))
    assert not re.search(r"@import|url\(", page)
    assert "Leon Sorokin" in page, "uPlot's licence asks for its notice"


def test_the_browser_is_told_to_run_this_script_and_to_load_nothing(run):
    parsed = Parsed(render.report([run]))
    digest = hashlib.sha256(parsed.texts["script"][1].encode()).digest()
    (policy,) = [a["content"] for t, a in parsed.tags if t == "meta" and "http-equiv" in a]
    assert f"script-src 'sha256-{base64.b64encode(digest).decode()}';" in policy
    assert policy.startswith("default-src 'none';")


def test_every_link_leads_somewhere(run):
    parsed = Parsed(render.report([run]))
    ids = parsed.attributes("id")
    assert len(ids) == len(set(ids))
    links = [href[1:] for href in parsed.attributes("href") if href.startswith("#")]
    assert len(links) > 5
    assert set(links) <= set(ids)


def test_nothing_that_was_logged_is_invisible(run):
    log = runlog.read(run)
    logged = {m for s in log.steps for m in s.metrics} | {
        m for e in log.evaluations for m in e.metrics
    }
    parsed = Parsed(render.report([run]))
    metrics = [metric for metric, _ in drawn(parsed)]
    assert len(metrics) == len(set(metrics))
    named = set(parsed.texts["code"])
    assert logged | {"seconds"} == set(metrics) | (named & logged)
    assert not set(metrics) & named


def test_points_are_the_log(run):
    log = runlog.read(run)
    data = Parsed(render.report([run])).data
    lines = {line["metric"]: line for panel in data["panels"] for line in panel["lines"]}
    for metric in ("critic/kl", "actor/lr", "signal/groups_effective"):
        line = lines[metric]
        got = list(zip(data["steps"][line["x"]], line["y"], strict=True))
        assert got == [(x, pytest.approx(y, rel=1e-5)) for x, y in log.series(metric)]
    assert data["steps"][lines["eval/accuracy"]["x"]] == [0, 10, 20]


def test_every_chart_has_a_place_a_text_and_a_sentence(run):
    parsed = Parsed(render.report([run]))
    panels = [int(number) for number in parsed.attributes("data-panel")]
    assert panels == list(range(len(parsed.data["panels"])))
    plots = [attrs for _, attrs in parsed.tags if attrs.get("class") == "plot"]
    assert len(plots) == len(panels)
    assert all(re.search(r"\d( %)? at step \d+", plot["aria-label"]) for plot in plots)
    assert all(plot["role"] == "img" for plot in plots)
    captions = parsed.texts["figcaption"]
    assert len(captions) >= 14
    assert all(caption.rstrip().endswith(".") for caption in captions)


def test_hostile_text_stays_text(tmp_path):
    run = write_run(tmp_path / "<b>&'\"<script>", steps=3, extra=lambda _: {f"x/{HOSTILE}": 1.5})
    sample = Completion(
        prompt=f"p{HOSTILE}", completion=f"c{HOSTILE}", answer=f"a{HOSTILE}", score=1, correct=False
    )
    for step in (0, 3):
        runlog.write_evaluation(run, Evaluation(step=step, metrics={}, samples=(sample,)))
    (run / "config.yaml").write_text(f"objective: {json.dumps(HOSTILE)}", encoding="utf-8")

    page = render.report([run])
    parsed = Parsed(page)

    assert sum(tag == "script" for tag, _ in parsed.tags) == 2
    assert not any(tag == "b" for tag, attrs in parsed.tags if attrs.get("aria-hidden") != "true")
    assert parsed.texts["bdi"] == [f"{x}{HOSTILE}" for x in "pacc"]
    assert parsed.texts["h1"] == ["<b>&'\"<script>"]
    assert f"x/{HOSTILE}" in [metric for metric, _ in drawn(parsed)]
    assert f"x/{HOSTILE}" in parsed.texts["h4"]
    assert json.dumps(HOSTILE) in parsed.texts["pre"][1]
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert block is not None
    assert not re.search("[<>&\u2028\u2029]", block[1])


def test_a_lone_surrogate_does_not_stop_the_report(run):
    path = run / "evaluations" / "step-000000.json"
    path.write_text(path.read_text().replace("Let me add", r"\ud800 add"))
    assert "? add" in render.write([run]).read_text(encoding="utf-8")


def test_the_assets_can_be_inlined():
    for name in (*render.SCRIPTS, "uPlot.LICENSE"):
        text = render.asset(name)
        assert "</script" not in text.lower()
        assert "<!--" not in text
    assert "*/" not in render.asset("uPlot.LICENSE")
    for name in ("uPlot.min.css", "report.css"):
        assert "</style" not in render.asset(name).lower()


def test_runs_are_overlaid_with_a_colour_each_and_their_differences(tmp_path):
    one = write_run(tmp_path / "a" / "run", steps=8, every=4)
    two = write_run(tmp_path / "b" / "run", steps=12, every=4, seed=1, gradient="token")
    parsed = Parsed(render.report([one, two]))
    found = drawn(parsed)
    assert {("critic/kl", 0), ("critic/kl", 1), ("eval/accuracy", 0), ("eval/accuracy", 1)} <= set(
        found
    )
    assert len(found) == len(set(found))
    runs = {(line["run"], line["colour"]) for p in parsed.data["panels"] for line in p["lines"]}
    assert runs == {("a/run", 0), ("b/run", 1)}
    assert "2 runs, overlaid" in parsed.words
    differences = parsed.words.split("Where the runs differ")[1]
    assert differences.strip().startswith(
        "Settinga/runb/runseed01steps812objective.kl.gradientsequencetoken"
    )
    assert len(parsed.texts["table"]) == 3  # the completions of each, and the differences


def test_runs_with_the_same_settings_say_so(tmp_path):
    runs = [write_run(tmp_path / name, steps=2) for name in ("a", "b")]
    assert "Nowhere that config.yaml shows." in Parsed(render.report(runs)).words


def test_one_run_has_no_table_of_differences(run):
    assert "differ" not in Parsed(render.report([run])).words


def test_without_evaluations_there_is_no_table_and_the_headline_says_where_it_looked(tmp_path):
    run = write_run(tmp_path / "run", steps=5, every=None)
    words = Parsed(render.report([run])).words
    assert "This run has no evaluations." in words
    assert "of training samples; no evaluation was made" in words
    assert "Before training" not in words


def test_a_single_evaluation_has_a_single_column(tmp_path):
    run = write_run(tmp_path / "run", steps=5, every=None)
    sample = Completion(prompt="p", completion="", answer=None, score=None, correct=None)
    runlog.write_evaluation(run, Evaluation(step=5, metrics={}, samples=(sample,)))
    parsed = Parsed(render.report([run]))
    assert parsed.texts["th"] == ["Prompt", "Answer", "After 5 updates", "p"]
    assert parsed.texts["td"] == ["–", "(empty)"]


def test_completions_stand_beside_each_other_with_mark_and_score(tmp_path):
    run = write_run(tmp_path / "run", steps=5, every=None)
    before = Completion(prompt="p", completion=" no\n", answer="yes", score=0.25, correct=False)
    after = Completion(prompt="p", completion="yes", answer="yes", score=1.0, correct=True)
    for step, sample in ((0, before), (5, after)):
        runlog.write_evaluation(run, Evaluation(step=step, metrics={}, samples=(sample,)))
    parsed = Parsed(render.report([run]))
    assert parsed.texts["td"] == ["yes", "✗ wrongscore 0.25 no\n", "✓ rightscore 1yes"]
    assert "1 prompt: 0 right before, 1 after; 1 turned right, 0 turned wrong." in parsed.words


def test_one_step_is_enough(tmp_path):
    run = write_run(tmp_path / "run", steps=1, every=None)
    parsed = Parsed(render.report([run]))
    assert "1 step2" in parsed.words  # 1 step, 2-odd seconds
    assert ("critic/kl", 0) in drawn(parsed)
    assert all(len(line["y"]) == 1 for panel in parsed.data["panels"] for line in panel["lines"])


def test_a_log_without_a_whole_step_is_a_report_that_says_so(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "sec')
    parsed = Parsed(render.report([tmp_path]))
    assert "The log has no whole step yet." in parsed.words
    assert "0 steps" in parsed.words
    assert "This run has no config.yaml." in parsed.words
    assert parsed.data == {"steps": [], "panels": []}


def test_a_torn_last_line_is_as_if_it_were_not_there(run):
    whole = render.report([run])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "seconds": 0.4, "metrics": {"critic/k')
    assert render.report([run]) == whole


def test_what_is_not_finite_is_a_gap_and_a_warning(tmp_path):
    def broken(step):
        return {"critic/kl": float("nan"), "actor/grad_norm": float("inf")} if step == 2 else {}

    parsed = Parsed(render.report([write_run(tmp_path / "run", steps=3, extra=broken)]))
    lines = {line["metric"]: line["y"] for p in parsed.data["panels"] for line in p["lines"]}
    assert [y is None for y in lines["critic/kl"]] == [False, True, False]
    assert "critic/kl at step 2, actor/grad_norm at step 2" in parsed.words


def test_skipped_updates_are_told_above_everything(tmp_path):
    skipped = write_run(
        tmp_path / "run", steps=3, extra=lambda step: {"actor/skipped_steps": float(step == 3)}
    )
    (alert,) = [t for t in Parsed(render.report([skipped])).texts["header"] if "skipped" in t]
    assert "Careful: Updates were skipped" in alert


def test_the_objective_comes_before_the_whole_config(run):
    parsed = Parsed(render.report([run]))
    objective, whole = parsed.texts["pre"]
    assert objective.startswith("type: Objective")
    assert whole == (run / "config.yaml").read_text()
    assert parsed.texts["summary"][-2:] == ["Objective", "All of config.yaml"]


def test_what_is_no_run_is_refused_in_words(tmp_path):
    with pytest.raises(DataError, match=r"has no metrics\.jsonl: not the directory of a run"):
        render.write([tmp_path])
    assert not (tmp_path / "report.html").exists()
    with pytest.raises(DataError, match="at least one run, got none"):
        render.report([])
