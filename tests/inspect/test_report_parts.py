"""The parts of a report, one by one: what is drawn where, in which words, beside what."""

from dataclasses import replace
from pathlib import Path

import pytest
from fake_run import CONFIG

from klamp.errors import DataError
from klamp.inspect import settings
from klamp.inspect.charts import everything, in_words, sections, thinned
from klamp.inspect.completions import pairs, summary
from klamp.inspect.headline import tiles, warnings
from klamp.inspect.markup import Html, joined, script_json, tag
from klamp.inspect.runlog import Completion, Evaluation, RunLog, Step
from klamp.inspect.runs import names
from klamp.inspect.wording import count, duration, listed, number, percent, signed

HELD_OUT = (Evaluation(step=0, metrics={"eval/accuracy": 0.25}, samples=()),)


def log(*metrics, evaluations=()):
    """A log whose first step has the first metrics, and so on."""
    steps = tuple(Step(step=i, seconds=2.0, metrics=m) for i, m in enumerate(metrics, start=1))
    return RunLog(path=Path("run"), steps=steps, evaluations=tuple(evaluations))


def charts(*logs):
    found = sections([f"run{i}" for i in range(len(logs))], logs)
    return {chart.plan.title: chart for section in found for chart in section.charts}


def said(completion, prompt="p", answer="a", correct=None):
    return Completion(
        prompt=prompt, completion=completion, answer=answer, score=None, correct=correct
    )


def evaluation(step, *samples):
    return Evaluation(step=step, metrics={}, samples=samples)


# Words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"),
        (0.03125, "0.0312"),
        (-5.834, "-5.83"),
        (999.4, "999"),
        (12345.6, "12,346"),
        (2e-6, "2e-6"),
        (-0.000512, "-5.12e-4"),
        (2.5e8, "2.5e8"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_a_number_has_three_digits_and_an_exponent_only_far_from_one(value, words):
    assert number(value) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0, "0 s"),
        (4.216, "4.22 s"),
        (59.9, "59.9 s"),
        (135.2, "2 min 15 s"),
        (3599.9, "1 h 0 min"),
        (7500.0, "2 h 5 min"),
        (float("nan"), "nan s"),
        (float("inf"), "inf s"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds, words):
    assert duration(seconds) == words


def test_the_other_words():
    assert percent(0.8436) == "84.4 %"
    assert [signed("-0.5"), signed("0.5")] == ["−0.5", "+0.5"]
    assert [count(1, "step"), count(1200, "step")] == ["1 step", "1,200 steps"]
    assert listed(["a", "b", "c"], 2) == "a, b and 1 more"
    assert listed(["a", "b"], 2) == "a, b"


# HTML


def test_what_is_not_html_is_escaped_wherever_it_goes():
    made = tag("p", "<b>", Html("<i></i>"), class_="a\"'<", hidden=True, id=None, open=False)
    assert made == '<p class="a&quot;&#x27;&lt;" hidden>&lt;b&gt;<i></i></p>'
    assert joined(["<", Html("<br>")], "&") == "&lt;&amp;<br>"


def test_text_that_no_file_can_hold_is_replaced():
    assert tag("p", "a\0b\ud800c") == "<p>a\ufffdb?c</p>"
    tag("p", "\ud800").encode("utf-8")


def test_json_cannot_end_the_script_that_it_stands_in():
    made = script_json(["</script><!--&\u2028\u2029é"])
    assert made == r'["\u003c/script\u003e\u003c!--\u0026\u2028\u2029\u00e9"]'
    with pytest.raises(ValueError):
        script_json(float("nan"))  # JSON.parse would not read it


# Names


def test_runs_of_equal_names_are_told_apart_by_as_many_parents_as_it_takes():
    paths = [Path("/x/a/run"), Path("/x/b/run"), Path("/y/b/run"), Path("/x/other")]
    assert names(paths) == ["a/run", "x/b/run", "y/b/run", "other"]
    assert names([Path("/x/run"), Path("/run")]) == ["x/run", "/run"]
    assert names([Path()]) == [Path.cwd().name]


def test_a_run_is_refused_twice():
    with pytest.raises(DataError, match=r"/x/\.\./x/a is given twice; name each run .* once"):
        names([Path("/x/a"), Path("/x/../x/a")])


# Charts


def test_every_metric_has_one_home_even_if_nobody_planned_it():
    metrics = {
        "task/accuracy": 1.0,
        "actor/clip_frac_low": 1.0,
        "signal/groups_effective_frac": 1.0,
        "critic/advantages/std": 1.0,
        "time/new_seconds": 1.0,
        "time/pads_per_second": 1.0,
        "critic/grad_norm": 1.0,
        "never\nplanned": 1.0,
    }
    found = charts(log(metrics, evaluations=HELD_OUT))
    homes = {
        title: [line.metric for panel in chart.panels for line in panel.lines]
        for title, chart in found.items()
    }
    assert homes == {
        "Accuracy": ["task/accuracy", "eval/accuracy"],
        "What was clipped, clamped or cut": ["actor/clip_frac_low"],
        "Advantages": ["critic/advantages/std"],
        "Gradient norm": ["critic/grad_norm"],
        "Seconds per step": ["seconds", "time/new_seconds"],
        "What a batch teaches": ["signal/groups_effective_frac"],
        "All other metrics in the log": ["never\nplanned", "time/pads_per_second"],
    }


def test_what_is_zero_throughout_is_named_and_not_drawn():
    off = {"critic/kl": 0.5, "critic/kl_target": 0.0, "a_frac": 0.0, "b_frac": 0.0}
    found = charts(log(off, off | {"b_frac": 0.1}))
    assert [line.metric for line in found["KL and its target"].panels[0].lines] == ["critic/kl"]
    assert found["KL and its target"].always_zero == ("critic/kl_target",)
    assert found["What was clipped, clamped or cut"].always_zero == ("a_frac",)
    all_off = charts(log({"a_frac": 0.0}))["What was clipped, clamped or cut"]
    assert (all_off.panels, all_off.always_zero) == ((), ("a_frac",))


def test_zero_in_one_run_is_drawn_if_another_has_more():
    found = charts(log({"a_frac": 0.0}), log({"a_frac": 0.1}))["What was clipped, clamped or cut"]
    assert [len(panel.lines) for panel in found.panels] == [2]
    assert found.always_zero == ()


def test_one_run_has_a_colour_per_metric_and_several_have_a_colour_per_run():
    both = {"actor/ratio_mean": 1.0, "actor/ratio_max": 2.0}
    alone = charts(log(both))["Probability ratio"]
    assert [[(line.label, line.colour) for line in p.lines] for p in alone.panels] == [
        [("mean", 0), ("max", 1)]
    ]
    overlaid = charts(log(both), log(both))["Probability ratio"]
    assert [panel.title for panel in overlaid.panels] == ["mean", "max"]
    assert [[(line.run, line.colour) for line in p.lines] for p in overlaid.panels] == [
        [("run0", 0), ("run1", 1)],
        [("run0", 0), ("run1", 1)],
    ]


def test_a_run_without_a_metric_leaves_the_other_its_colour():
    found = charts(log({"actor/lr": 1.0}), log({"actor/entropy": 1.0}))["Entropy"]
    assert [(line.run, line.colour) for line in found.panels[0].lines] == [("run1", 1)]


def test_what_is_not_finite_is_a_gap_and_what_never_is_is_no_line():
    nan, inf = float("nan"), float("inf")
    found = everything(log({"a": 1.0, "b": nan}, {"a": inf, "b": nan}, {"a": 3, "b": -inf}))
    assert found["a"] == ((1, 1.0), (2, None), (3, 3))
    assert "b" not in found


def test_thinning_keeps_the_peaks_and_the_order():
    points = tuple((i, float(i == 700) - float(i == 7301)) for i in range(10_000))
    thin = thinned(points, 100)
    assert len(thin) <= 100
    assert list(thin) == sorted(thin)
    assert {(700, 1.0), (7301, -1.0)} <= set(thin)
    assert (thin[0], thin[-1]) == (points[0], points[-1])
    assert thinned(points, 10_000) == points
    gaps = tuple((i, None) for i in range(10)) + tuple((i, 2.0) for i in range(10, 20))
    assert thinned(gaps, 6) == ((0, None), (10, 2.0), (19, 2.0))


def test_a_chart_in_words_says_where_its_lines_begin_and_end():
    found = charts(log({"task/accuracy": 0.125}, {"task/accuracy": 0.5}, evaluations=HELD_OUT))
    chart = found["Accuracy"]
    assert in_words(chart.panels[0], chart.plan) == (
        "Accuracy. training samples: 12.5 % at step 1, 50.0 % at step 2; "
        "evaluation: 25.0 % at step 0."
    )
    overlaid = charts(log({"actor/ratio_max": 2.0}), log({"actor/ratio_max": 3.0}))
    chart = overlaid["Probability ratio"]
    assert in_words(chart.panels[0], chart.plan) == (
        "Probability ratio: max. run0: 2 at step 1; run1: 3 at step 1."
    )


# Headline


def test_accuracy_is_of_the_first_and_the_last_evaluation():
    seen = [
        Evaluation(step=s, metrics={"eval/accuracy": a, "eval/accuracy_greedy": g}, samples=())
        for s, a, g in [(0, 0.25, 0.3), (5, 0.9, 0.8), (9, 0.5, 0.6)]
    ]
    fact = tiles([log({"task/accuracy": 0.1}, evaluations=seen)])[0].facts[0]
    assert (fact.before, fact.after, fact.change) == ("25.0 %", "50.0 %", "+25.0 points")
    assert fact.detail == "greedy 30.0 % → 60.0 %"


def test_accuracy_without_evaluations_is_of_the_samples_and_zero_throughout_is_unknown():
    fact = tiles([log({"task/accuracy": 0.5}, {"task/accuracy": 0.25})])[0].facts[0]
    assert (fact.before, fact.after, fact.change) == ("50.0 %", "25.0 %", "−25.0 points")
    assert "no evaluation" in fact.detail
    assert tiles([log({"task/accuracy": 0.0})])[0].facts[0].after == "–"


def test_the_score_is_of_the_first_and_the_last_step():
    fact = tiles([log({"critic/score/mean": 0.5}, {"critic/score/mean": 2.0})])[1].facts[0]
    assert (fact.before, fact.after, fact.change) == ("0.5", "2", "+1.5")


@pytest.mark.parametrize(
    ("target", "change", "detail"),
    [
        (5.0, "30 % above", "target 5; mean of the last 10 steps"),
        (13.0, "50 % below", "target 13; mean of the last 10 steps"),
        (6.5, "at the target", "target 6.5; mean of the last 10 steps"),
        (0.0, None, "mean of the last 10 steps; no target"),
    ],
)
def test_kl_is_the_mean_of_the_last_ten_steps_beside_its_target(target, change, detail):
    steps = [{"critic/kl": float(kl), "critic/kl_target": target} for kl in range(12)]
    fact = tiles([log(*steps)])[2].facts[0]
    assert fact.after == "6.5"  # (2 + … + 11) / 10
    assert (fact.change, fact.detail) == (change, detail)


def test_an_empty_log_has_no_headline_but_says_so():
    assert [tile.facts[0].after for tile in tiles([log()])] == ["–", "–", "–"]
    assert list(warnings(log())) == ["The log has no whole step yet."]


@pytest.mark.parametrize("metric", ["actor/skipped_steps", "actor/skipped_updates"])
def test_skipped_updates_are_a_warning(metric):
    assert not list(warnings(log({metric: 0.0})))
    (words,) = warnings(log({metric: 0.0}, {metric: 1.0}, {metric: 2.0}))
    assert f"{metric} is above 0 at 2 steps, first at step 2" in words


def test_values_that_are_not_finite_are_a_warning():
    (words,) = warnings(log({"a": 1.0}, {"a": float("nan")}))
    assert words == "Not finite, and left out of the charts: a at step 2."


# Completions


def test_completions_are_put_together_by_prompt_and_answer_in_the_order_of_the_last():
    first = evaluation(0, said("1", "p"), said("2", "q"), said("3", "p"), said("4", "gone"))
    last = evaluation(9, said("5", "q"), said("6", "p"), said("7", "new"), said("8", "p"))
    got = [
        (p.before and p.before.completion, p.after and p.after.completion)
        for p in pairs(first, last)
    ]
    assert got == [("2", "5"), ("1", "6"), (None, "7"), ("3", "8"), ("4", None)]


def test_the_summary_counts_what_turned():
    was, now = [True, False, False, None], [False, True, True, True]
    first = evaluation(0, *(said("", str(i), correct=c) for i, c in enumerate(was)))
    last = evaluation(9, *(said("", str(i), correct=c) for i, c in enumerate(now)))
    expected = "4 prompts: 1 right before, 2 after; 2 turned right, 1 turned wrong."
    assert summary(pairs(first, last)) == expected
    unknown = [replace(p, before=None) for p in pairs(first, last)]
    assert summary(unknown) == "4 prompts."


# Settings


def test_settings_come_from_the_file_the_objective_as_yaml_of_its_own(tmp_path):
    written = CONFIG.format(seed=3, steps=4, gradient="token")
    (tmp_path / "config.yaml").write_text(written)
    got = settings.read(tmp_path)
    assert got.text == written
    assert got.objective is not None
    assert got.objective.startswith("type: Objective\nstages:\n- type: ClipScores\n")
    assert got.flat["objective.stages.1.mean"] == "group"


@pytest.mark.parametrize("written", ["a: [", "just words", "a: b: c", "\x07", "2001-99-99", "[]"])
def test_a_config_that_is_not_one_is_still_text(tmp_path, written):
    (tmp_path / "config.yaml").write_text(written)
    assert settings.read(tmp_path) == settings.Settings(text=written, objective=None, flat={})


def test_a_missing_config_is_none(tmp_path):
    assert settings.read(tmp_path).text is None


def test_without_pyyaml_the_config_is_text(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    (tmp_path / "config.yaml").write_text("seed: 1")
    assert settings.read(tmp_path) == settings.Settings(text="seed: 1", objective=None, flat={})


def test_differences_are_the_settings_that_are_not_the_same_everywhere():
    def made(**flat):
        return settings.Settings(text="", objective=None, flat=flat)

    runs = [made(seed="0", lr="1", a="x"), made(seed="0", lr="2"), made(seed="0", lr="1", b="y")]
    assert settings.differences(runs) == [
        ("lr", ("1", "2", "1")),
        ("a", ("x", "–", "–")),
        ("b", ("–", "–", "y")),
    ]
