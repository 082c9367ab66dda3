"""A policy on prompts that are never trained on, and `klamp eval` on what is there already."""

import json
import math
import shutil

import pytest
import torch
from trainer_parts import TINY, load, nudge, tiny_config, tiny_run, trained
from trainer_processes import klamp

from klamp.errors import ConfigError
from klamp.inspect import runlog
from klamp.train import launch, rewards, saving, trainer
from klamp.train.evaluation import Examiner, accuracy, completion, decoding_of, mean
from klamp.train.examine import examine
from klamp.train.settings import RewardSettings, SamplingSettings
from klamp.train.tasks.digits import DigitTask
from klamp.train.tasks.task import Example

EXAMPLES = DigitTask().evaluation(40)


def examiner(**changes):
    given = {
        "examples": EXAMPLES,
        "sampling": SamplingSettings(max_new_tokens=8),
        "reward": RewardSettings(function="exact"),
        "shown": 5,
        "seed": 3,
    }
    return Examiner(**(given | changes))


@pytest.fixture(scope="module")
def models():
    return load()


def texts(models, who, **decoding):
    generator = torch.Generator().manual_seed(1)
    how = decoding_of(SamplingSettings(max_new_tokens=8))
    return who.completions(models, type(how)(**{**vars(how), **decoding}), generator)


def test_accuracies_and_scores_are_counted_over_every_prompt(models):
    found = examiner().evaluate(models, rewards.exact, 7)
    greedy = [t for t, _ in texts(models, examiner(), greedy=True)]
    right = [t == "".join(sorted(e.prompt[1:-1])) for e, t in zip(EXAMPLES, greedy, strict=True)]
    assert found.step == 7
    assert found.metrics["eval/accuracy_greedy"] == sum(right) / 40
    assert found.metrics["eval/score"] == found.metrics["eval/accuracy"]  # exact: 1 where right
    assert 0.1 < found.metrics["eval/accuracy"] < 0.7
    assert 6 <= found.metrics["eval/length"] <= 8


def test_two_policies_are_asked_the_same_and_one_answers_the_same_twice(models):
    once, again = (examiner().evaluate(models, rewards.exact, 0) for _ in range(2))
    torch.manual_seed(99)
    assert once == again == examiner().evaluate(models, rewards.exact, 0)
    assert examiner(seed=4).evaluate(models, rewards.exact, 0) != once


def test_the_first_few_completions_are_shown_with_their_scores(models):
    found = examiner().evaluate(models, rewards.exact, 0)
    assert [s.prompt for s in found.samples] == [e.prompt for e in EXAMPLES[:5]]
    for sample, example in zip(found.samples, EXAMPLES, strict=False):
        assert sample.answer == example.answer
        assert sample.correct == (sample.completion == example.answer) == bool(sample.score)
    assert examiner(shown=0).evaluate(models, rewards.exact, 0).samples == ()


def test_outliers_are_for_training_and_not_for_measuring(models):
    noisy = RewardSettings(function="exact", outliers={"fraction": 1.0, "size": 100.0})
    plain = examiner().evaluate(models, rewards.exact, 0)
    assert examiner(reward=noisy).evaluate(models, rewards.exact, 0) == plain


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_greedy_answers_do_not_depend_on_how_many_are_asked_at_once(models, monkeypatch, rows):
    whole = texts(models, examiner(), greedy=True)
    monkeypatch.setattr("klamp.train.evaluation.ROWS", rows)
    assert texts(models, examiner(), greedy=True) == whole


def test_the_policy_is_sampled_as_in_training():
    sampling = SamplingSettings(max_new_tokens=3, temperature=0.4, top_k=2, top_p=0.9)
    found = decoding_of(sampling)
    assert (found.max_new_tokens, found.temperature, found.top_k, found.top_p, found.greedy) == (
        (3, 0.4, 2, 0.9, False)
    )


def test_where_the_task_knows_no_answer_nothing_is_said_of_accuracy(models):
    open_ended = [Example(prompt=e.prompt) for e in EXAMPLES[:4]]
    found = examiner(examples=open_ended).evaluate(models, lambda p, c, **k: [1.0] * 4, 0)
    assert set(found.metrics) == {"eval/score", "eval/length"}
    assert {s.correct for s in found.samples} == {None}


def test_unknown_answers_and_missing_scores_are_left_out():
    known, unknown = Example(prompt="p", answer="1"), Example(prompt="q")
    assert accuracy([known, unknown, known], ["1", "1", "2"]) == 0.5
    assert accuracy([unknown], ["1"]) is None
    assert mean([]) is None and mean([1.0, 4.0]) == 2.5
    assert completion(known, "1", math.nan).score is None
    assert completion(known, "1", 0.5).score == 0.5


def test_a_missing_score_does_not_count_in_the_mean(models):
    scores = [None, 3.0, 1.0, None]
    found = examiner(examples=EXAMPLES[:4]).evaluate(models, lambda p, c, **k: scores, 0)
    assert found.metrics["eval/score"] == 2.0
    assert [s.score for s in found.samples] == scores


SETS = [w for s in (*TINY, "evaluation.prompts=24", "sampling.top_k=20") for w in ("--set", s)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    place = tmp_path_factory.mktemp("eval")
    code, said = klamp("train", *SETS, "--out", place / "run", log=place / "log")
    assert code == 0, said
    return place / "run"


def test_eval_of_a_run_is_the_runs_last_evaluation(finished, tmp_path):
    last = runlog.read(finished).evaluations[-1]
    assert last.step == 2
    assert examine(str(finished), None, []) == dict(last.metrics)
    code, said = klamp("eval", finished, "--json", log=tmp_path / "log")
    assert code == 0 and json.loads(said.splitlines()[-1]) == dict(last.metrics)


def test_eval_prints_a_name_and_a_number_a_line(finished, tmp_path):
    code, said = klamp("eval", finished, "--prompts", 8, log=tmp_path / "log")
    found = dict(line.split() for line in said.strip().splitlines())
    wanted = examine(str(finished), None, ["evaluation.prompts=8"])
    assert code == 0 and {k: float(v) for k, v in found.items()} == pytest.approx(wanted, abs=1e-4)


def test_eval_of_a_model_takes_the_task_of_a_config(finished):
    overrides = [s for s in SETS if s != "--set"]
    before = runlog.read(finished).evaluations[0]
    assert examine("builtin", None, overrides) == dict(before.metrics)
    last = runlog.read(finished).evaluations[-1]
    assert examine(str(finished / "model"), None, overrides) == dict(last.metrics)


def test_eval_of_a_run_that_is_not_finished_says_how_to_finish_it(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    with pytest.raises(ConfigError, match=r"no model yet.*`klamp train --resume .*run`"):
        examine(str(tmp_path / "run"), None, [])


@pytest.mark.parametrize("kind", ["model.lora={rank: 4}", "objective=trlx"])
def test_eval_of_a_run_needs_neither_adapter_nor_value_nor_reference(tmp_path, kind):
    run = tiny_run(tmp_path, kind, "evaluation.prompts=40")
    launch.write_text(tmp_path / "config.yaml", launch.dump(run.config))
    nudge(run.models.policy, 0.05)
    saving.save_model(run.models, tmp_path)
    wanted = run.examiner.evaluate(run.models, run.reward, 0).metrics
    assert examine(str(tmp_path), None, []) == pytest.approx(dict(wanted), abs=0.06)


def test_the_log_has_the_numbers_of_the_evaluation_in_the_line_of_its_step(tmp_path):
    run = tiny_run(tmp_path, "steps=4", "evaluation.every=3", "evaluation.shown=2")
    trained(run)
    log = runlog.read(tmp_path)
    assert [e.step for e in log.evaluations] == [0, 3, 4]
    for evaluation in log.evaluations[1:]:
        line = log.steps[evaluation.step - 1]
        assert {k: line.metrics[k] for k in evaluation.metrics} == dict(evaluation.metrics)
        assert len(evaluation.samples) == 2
    assert not any(k.startswith("eval/") for i in (0, 1) for k in log.steps[i].metrics)


@pytest.mark.parametrize(
    ("every", "steps"), [(2, [2, 4, 5]), (None, [5]), (5, [5]), (9, [5]), (1, [1, 2, 3, 4, 5])]
)
def test_what_happens_every_so_often_happens_at_the_end_too(every, steps):
    assert [s for s in range(1, 6) if trainer.due(s, every, 5)] == steps


def test_evaluation_prompts_are_as_many_as_asked_for_and_never_trained_on(tmp_path):
    run = tiny_run(tmp_path, "evaluation.prompts=50")
    asked = {e.prompt for e in run.examiner.examples}
    assert len(asked) == 50
    seen = {e.prompt for e in run.task.train(run.config.seed, 0, 400)}
    assert not asked & seen
    assert tiny_config().evaluation.prompts == 8
