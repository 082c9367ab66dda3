import io
import re
import time
from pathlib import Path

import pytest
import rich
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from klamp.inspect.runlog import Step
from klamp.train import config as configs
from klamp.train.journal import complete
from klamp.train.view import (
    BARS,
    ROWS,
    TREND,
    Live,
    Plain,
    Quiet,
    View,
    headline,
    plain_line,
    shown,
    sparkline,
    view_of,
)

PLACE = Path("runs/default-1")
LABELS = {name: label for label, name, _ in ROWS}


def config(*overrides):
    return configs.load(None, ["sampling.prompts=2", "sampling.samples_per_prompt=4", *overrides])


def line(step, **metrics):
    """A line of a log; every name's first underscore is a slash."""
    named = {name.replace("_", "/", 1): x for name, x in metrics.items()}
    return Step(
        step=step, seconds=0.5, metrics=complete({"time/tokens_per_second": 1500.0, **named})
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


# The sparkline.

values = st.lists(st.integers(-1000, 1000), min_size=1, max_size=200)


def test_a_rise_over_eight_steps_is_the_eight_bars():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == BARS == "▁▂▃▄▅▆▇█"


def test_many_values_are_averaged_into_few_bars():
    # 60 values in 30 pairs: of each pair (i, −i) the mean is 0, so the line is flat.
    assert sparkline([x for i in range(30) for x in (i, -i)]) == BARS[0] * TREND
    # Zeros, then ones: half of the bars are low, half are high.
    assert sparkline([0.0] * 45 + [1.0] * 45) == BARS[0] * 15 + BARS[-1] * 15


@given(values)
def test_a_sparkline_is_as_long_as_its_values_and_never_longer_than_the_column(series):
    drawn = sparkline(series)
    assert len(drawn) == min(len(series), TREND) and set(drawn) <= set(BARS)


@given(values)
def test_a_sparkline_touches_top_and_bottom_unless_it_is_flat(series):
    drawn = sparkline(series)
    assert BARS[0] in drawn
    assert (BARS[-1] in drawn) == (len(set(drawn)) > 1)


@given(values)
def test_what_rises_is_drawn_rising(series):
    heights = [BARS.index(bar) for bar in sparkline(sorted(series))]
    assert heights == sorted(heights)


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=TREND))
def test_unit_and_origin_do_not_change_the_shape(series):
    assert sparkline([4.0 * x - 8.0 for x in series]) == sparkline(series)


# One line for a log file.


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [(0.3712, "percent", "37.1 %"), (1234.56, "count", "1,235"), (0.12345, "number", "0.123")],
)
def test_numbers_are_shown_as_a_person_reads_them(value, kind, text):
    assert shown(value, kind) == text


def test_a_plain_line_says_what_matters_most():
    found = plain_line(
        line(
            5,
            task_accuracy=0.762,
            task_graded=1.0,
            critic_kl=0.556,
            critic_kl_target=0.85,
            critic_kl_coef=0.453,
            actor_clip_frac=0.012,
            **{"critic_score/mean": 1.031},
        ),
        90,
    )
    assert found == (
        "step  5/90  accuracy 76.2 %  reward 1.031  KL 0.556 of 0.85  β 0.453  "
        "clipped 1.2 %  1500 tokens/s"
    )


def test_an_evaluation_is_in_the_line_of_its_step():
    found = plain_line(line(15, eval_accuracy=0.895, eval_accuracy_greedy=0.98), 90)
    assert "held out 89.5 % (greedy 98.0 %)" in found


def test_a_target_is_said_only_where_there_is_one():
    assert " of " not in plain_line(line(1), 9)


@pytest.mark.parametrize("graded", [{}, {"task_graded": 0.0}])
def test_an_accuracy_that_nobody_knows_is_not_shown(graded):
    """The log has a 0.0 for it, as for everything that is off."""
    unknown = line(1, **graded)
    live = Live(config(), PLACE)
    live(unknown, [])
    assert unknown.metrics["task/accuracy"] == 0.0
    assert "accuracy" not in plain_line(unknown, 9)
    assert LABELS["task/accuracy"] not in picture(live)


def test_the_headline_says_which_run_this_is():
    assert headline(config("steps=7"), PLACE) == (
        "klamp: builtin on sort, reward leaky, 7 steps of 2 × 4 samples → runs/default-1"
    )
    mine = config("task.name=file", "task.file=mine.jsonl", "reward.function=a.py:f")
    assert "builtin on mine.jsonl, reward a.py:f, " in headline(mine, PLACE)


def plain_steps(capsys, steps):
    """The steps that a plain view prints a line for, after its headline."""
    settings = config(f"steps={steps}")
    with Plain(settings, PLACE) as view:
        for step in range(1, steps + 1):
            view(line(step), [])
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == headline(settings, PLACE)
    return [int(re.match(r"step +(\d+)/", text)[1]) for text in rest]


@pytest.mark.parametrize(
    ("steps", "printed"),
    [(1, [1]), (4, [1, 2, 3, 4]), (90, [1, *range(5, 91, 5)]), (100, [1, *range(5, 101, 5)])],
)
def test_plain_lines_are_some_twenty_with_the_first_and_the_last(capsys, steps, printed):
    assert plain_steps(capsys, steps) == printed


def test_the_last_step_has_a_line_even_out_of_turn(capsys):
    assert plain_steps(capsys, 92)[-2:] == [90, 92]


@pytest.mark.parametrize("make", [lambda: Quiet(), lambda: Plain(config("steps=90"), PLACE)])
def test_every_warning_goes_to_stderr(capsys, make):
    with make() as view:
        capsys.readouterr()
        view(line(3), ["look out", "and there"])
    said = capsys.readouterr()
    assert said.err == "warning: look out\nwarning: and there\n" and said.out == ""


def test_the_view_fits_where_the_output_goes(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert type(view_of(config(), PLACE, quiet=False)) is Plain
    monkeypatch.setattr("sys.stdout", Terminal())
    assert type(view_of(config(), PLACE, quiet=False)) is Live
    assert type(view_of(config(), PLACE, quiet=True)) is Quiet


# The live view.


@pytest.fixture
def terminal(monkeypatch):
    """rich's own console, drawing into a terminal of 110 columns that remembers everything."""
    console = Console(file=io.StringIO(), force_terminal=True, width=110, height=40, record=True)
    monkeypatch.setattr(rich, "_console", console)
    return console


def picture(live):
    """What the live view shows now, without colours."""
    console = Console(file=io.StringIO(), width=110, record=True)
    console.print(live.drawn())
    return console.export_text()


def row(text, name):
    """The cells beside the label of a metric."""
    label = LABELS[name]
    (found,) = [t for t in text.splitlines() if t.startswith(label + " ")]
    return found.removeprefix(label).strip().split("  ", 1)


def test_every_view_is_a_view():
    views = [Quiet(), Plain(config(), PLACE), Live(config(), PLACE)]
    assert all(isinstance(view, View) for view in views)


def test_before_the_first_step_it_says_that_it_is_starting():
    text = picture(Live(config("steps=4"), PLACE))
    assert headline(config("steps=4"), PLACE) in text
    assert "step 0/4" in text and "starting: the policy is evaluated before the first" in text


def test_values_and_their_course_are_shown():
    live = Live(config("steps=8"), PLACE)
    for step in range(1, 9):
        live(
            line(
                step,
                task_accuracy=step / 10,
                task_graded=1.0,
                critic_kl=0.5,
                critic_kl_target=0.85,
                critic_kl_coef=1.0 / step,
                actor_clip_frac=0.01,
                **{"critic_score/mean": 1.0 + step},
            ),
            [],
        )
    text = picture(live)
    assert "step 8/8" in text
    assert row(text, "task/accuracy") == ["80.0 %", BARS]
    assert row(text, "critic/score/mean") == ["9.000", BARS]
    assert row(text, "critic/kl") == ["0.500", BARS[0] * 8]
    assert row(text, "critic/kl_target") == ["0.850", BARS[0] * 8]
    assert row(text, "critic/kl_coef")[0] == "0.125"
    assert row(text, "critic/kl_coef")[1].startswith(BARS[-1])
    assert row(text, "actor/clip_frac") == ["1.0 %", BARS[0] * 8]
    assert row(text, "time/tokens_per_second") == ["1,500", BARS[0] * 8]


def test_what_the_log_lacks_takes_no_room():
    live = Live(config(), PLACE)
    live(line(1), [])
    text = picture(live)
    assert row(text, "critic/kl") == ["0.000", BARS[0]]
    assert all(LABELS[name] not in text for name in ("eval/accuracy", "actor/entropy"))


def test_an_evaluation_stays_in_view_until_the_next():
    live = Live(config(), PLACE)
    live(line(1, eval_accuracy=0.25), [])
    live(line(2), [])
    assert row(picture(live), "eval/accuracy")[0] == "25.0 %"


@pytest.mark.parametrize(
    ("first", "done", "steps", "left"),
    [
        (1, 3, 9, "1:00 left"),  # 30 s for 3 steps; 6 more
        (1, 3, 4, "0:10 left"),
        (1, 3, 3, "0:00 left"),
        (31, 33, 90, "9:30 left"),  # resumed at 30: 10 s a step, 57 more
    ],
)
def test_the_time_left_is_at_the_pace_of_the_steps_made_here(first, done, steps, left):
    live = Live(config(f"steps={steps}"), PLACE)
    for step in range(first, done + 1):
        live(line(step), [])
    live.began = time.monotonic() - 30.0
    assert live.time_left(done) == left and left in picture(live)


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (["one", "two", "one", "one"], ["one", "two"]),
        (["one", "two", "three", "four"], ["two", "three", "four"]),
    ],
    ids=["once each", "the last three"],
)
def test_a_warning_is_shown_once_and_the_last_three_stay(said, left):
    live = Live(config(), PLACE)
    for step, warning in enumerate(said, start=1):
        live(line(step), [warning])
    found = [t.strip() for t in picture(live).splitlines() if "warning" in t]
    assert found == [f"warning: {warning}" for warning in left]


def test_brackets_in_a_path_are_no_markup():
    assert "→ runs/[bold]x" in picture(Live(config(), Path("runs/[bold]x")))


def test_a_terminal_is_drawn_again_with_every_step_and_the_last_picture_stays(terminal):
    with Live(config("steps=2"), PLACE) as live:
        live(line(1, **{"critic_score/mean": 0.123}), ["look out"])
        live.live.refresh()
        live(line(2, **{"critic_score/mean": 0.456}), [])
    sent = terminal.file.getvalue()
    first, second = sent.index("0.123"), sent.rindex("0.456")
    assert first < second and "\x1b[" in sent[first:second]
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent[sent.rindex("klamp: builtin") :])
    assert all(part in last for part in ("step 2/2", "0.456", "warning: look out", "0:00 left"))
    assert sent.endswith("\n") or sent.endswith("\x1b[?25h")  # the cursor is given back


def test_an_error_ends_the_drawing_and_comes_through(terminal):
    with pytest.raises(ZeroDivisionError), Live(config(), PLACE) as live:
        raise ZeroDivisionError
    assert not live.live.is_started


def test_rounding_below_zero_is_zero():
    assert shown(-1e-9, "number") == "0.000"
    assert shown(-0.0006, "number") == "-0.001"
