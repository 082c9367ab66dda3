from pathlib import Path

import pytest

from klamp.inspect.runlog import Evaluation, RunLog, Step
from klamp.train import config as configs
from klamp.train.closing import closing, interrupted
from klamp.train.journal import complete

PLACE = Path("runs/default-1")


def log(scores, kl=(), target=0.0, accuracies=(), greedy=()):
    """A run with these rewards and KLs, step by step, and these accuracies, one per evaluation."""
    kl = kl or [0.0] * len(scores)
    steps = tuple(
        Step(
            step=n,
            seconds=0.1,
            metrics=complete(
                {"critic/score/mean": score, "critic/kl": k, "critic/kl_target": target}
            ),
        )
        for n, (score, k) in enumerate(zip(scores, kl, strict=True), start=1)
    )
    found = [
        Evaluation(step=n, metrics={"eval/accuracy": a, "eval/accuracy_greedy": g}, samples=())
        for n, (a, g) in enumerate(zip(accuracies, greedy, strict=True))
    ]
    return RunLog(path=PLACE, steps=steps, evaluations=tuple(found))


def said(log, *overrides):
    return closing(configs.load(None, overrides), log)


def test_the_first_line_says_what_improved():
    # Rewards 0, 1, …, 11: the last ten are 2, …, 11 and their mean is 6.5. KL 0.1, 0.2, …, 1.2:
    # the last ten are 0.3, …, 1.2, mean 0.75.
    first, _, _ = said(
        log(
            [float(i) for i in range(12)],
            kl=[0.1 * i for i in range(1, 13)],
            target=0.85,
            accuracies=[0.37, 0.5, 0.912],
            greedy=[0.42, 0.6, 0.98],
        )
    )
    assert first == (
        "true accuracy 37.0 % → 91.2 % sampled, 42.0 % → 98.0 % greedy; "
        "reward 0.00 → 6.50; KL 0.75 (target 0.85)"
    )


def test_a_short_run_is_read_from_all_of_its_steps():
    assert said(log([1.0, 2.0]))[0] == "reward 1.00 → 1.50"


def test_without_a_target_none_is_named():
    assert said(log([1.0], kl=[0.5]))[0] == "reward 1.00 → 1.00; KL 0.50"


def test_without_a_kl_there_is_nothing_to_say_of_it():
    assert "KL" not in said(log([1.0, 2.0], target=0.85))[0]


def test_a_task_that_knows_no_answer_has_no_accuracy():
    evaluation = Evaluation(step=0, metrics={"eval/score": 0.5}, samples=())
    found = RunLog(path=PLACE, steps=log([1.0]).steps, evaluations=(evaluation, evaluation))
    assert said(found)[0] == "reward 1.00 → 1.00"


def test_there_are_three_lines_and_the_second_says_where_the_run_is():
    lines = said(log([1.0]))
    assert len(lines) == 3 and all("\n" not in line for line in lines)
    assert lines[1] == (
        "run in runs/default-1: report.html to look at, model/ to load, metrics.jsonl to plot"
    )


@pytest.mark.parametrize(
    ("overrides", "next_command"),
    [
        ([], "`make train-contrast`"),
        (["reward.function=exact"], "`klamp eval runs/default-1`"),
        (["objective.kl=null"], "`klamp report runs/default-1 OTHER_RUN`"),
    ],
    ids=["the leaky reward under a KL", "another reward", "no KL to take away"],
)
def test_the_third_line_names_one_thing_to_do_next(overrides, next_command):
    third = said(log([1.0]), *overrides)[2]
    assert third.startswith("next: ") and next_command in third


def test_an_interrupted_run_says_how_to_go_on():
    assert interrupted(PLACE, 12, 90) == [
        "stopped after step 12 of 90; everything is saved in runs/default-1",
        "go on with: klamp train --resume runs/default-1",
    ]
