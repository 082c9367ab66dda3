"""What a step leaves behind: its line, its warnings, its recorded batch."""

import math

import pytest
import torch
from trainer_parts import one_batch, tiny_run

from klamp.errors import NumericsError
from klamp.inspect import record as records
from klamp.inspect.runlog import Step
from klamp.objective.control import ControlState
from klamp.objective.state import ObjectiveState
from klamp.train import journal, trainer
from klamp.train.comm import OneProcess
from klamp.train.journal import ALWAYS, Outcome
from klamp.train.rollout import Samples
from klamp.train.tasks.task import Example
from klamp.train.tokens import Tokens


def line(**metrics):
    return Step(step=4, seconds=1.0, metrics={k.replace("__", "/"): v for k, v in metrics.items()})


def test_the_contracts_names_are_in_every_line_and_only_numbers():
    found = journal.complete({"critic/kl": 2.0, "z": math.nan, "b": 1.0, "a": math.inf})
    assert found == {**dict.fromkeys(ALWAYS, 0.0), "critic/kl": 2.0, "b": 1.0}
    assert {"critic/score/mean", "task/accuracy", "critic/kl_target"} <= set(ALWAYS)


@pytest.mark.parametrize(
    ("first", "furthest"),
    [
        ({"actor/ratio_min": 0.9, "actor/ratio_max": 1.05}, 0.9),
        ({"actor/ratio_min": 0.99, "actor/ratio_max": 1.05}, 1.05),
        ({}, 1.0),
    ],
    ids=str,
)
def test_the_ratio_before_anything_has_moved_is_the_one_furthest_from_one(first, furthest):
    assert journal.ratio_at_step0(first) == furthest


@pytest.mark.parametrize(
    ("ratio", "rounded", "told"),
    [
        *((1.0, False, 0), (1.0005, False, 0), (1.002, False, 1), (0.99, False, 1)),
        *((1.05, True, 0), (0.8, True, 1), (1.2, True, 1)),
    ],
)
def test_a_ratio_that_should_be_one_is_warned_of_by_name(ratio, rounded, told):
    said = journal.warnings(line(actor__ratio_at_step0=ratio), None, rounded=rounded)
    assert len(said) == told
    assert all(f"actor/ratio_at_step0 is {ratio:.4g} and should be 1" in s for s in said)


def test_a_skipped_update_is_warned_of_with_what_was_not_finite():
    (said,) = journal.warnings(line(), "values at row 3, position 0", rounded=False)
    assert said == "step 4: not finite: values at row 3, position 0; the update was skipped"


@pytest.mark.parametrize(("skipped", "most", "ends"), [(4, 5, False), (5, 5, True), (9, 5, True)])
def test_too_many_skipped_updates_in_a_row_end_the_run(tmp_path, skipped, most, ends):
    outcome = Outcome(
        state=ObjectiveState(), metrics={}, skipped=skipped, problem="logprobs at row 1, position 2"
    )
    if not ends:
        return journal.stop_if_lost(outcome, 8, most, tmp_path)
    said = (
        rf"^{skipped} updates in a row .* in step 8 the first was logprobs at row 1, position 2\."
    )
    with pytest.raises(NumericsError, match=said + rf" The batches are in {tmp_path}/records; lo"):
        journal.stop_if_lost(outcome, 8, most, tmp_path)


def test_of_a_batch_that_nothing_was_learnt_from_scores_and_coefficient_are_told():
    state = ObjectiveState(control=ControlState(coef=0.3))
    found = journal.of_skipped([1.0, math.nan, 2.0], state)
    assert found == {
        "critic/score/mean": 1.5,
        "critic/kl_coef": 0.3,
        "actor/skipped_updates": 1.0,
    }
    assert journal.of_skipped([math.nan], state)["critic/score/mean"] == 0.0


def samples_of(answers, texts, lengths, truncated):
    rows = len(texts)
    return Samples(
        tokens=Tokens(
            prompts=torch.ones(rows, 1, dtype=torch.long),
            prompt_mask=torch.ones(rows, 1, dtype=torch.bool),
            responses=torch.ones(rows, max(lengths), dtype=torch.long),
            mask=torch.arange(max(lengths)) < torch.tensor(lengths)[:, None],
        ),
        examples=tuple(Example(prompt="p", answer=a) for a in answers),
        texts=tuple(texts),
        groups=torch.arange(rows),
        sampler_logprobs=torch.zeros(rows, max(lengths)),
        truncated=torch.tensor(truncated),
    )


def test_accuracy_and_lengths_of_samples_are_counted():
    samples = samples_of(
        ["1", "2", None, "4"], ["1", "9", "x", "4"], [1, 2, 3, 6], [False, False, True, False]
    )
    assert journal.sample_metrics(samples, OneProcess()) == {
        "response/length_mean": 3.0,
        "response/length_max": 6.0,
        "response/truncated_frac": 0.25,
        "task/graded": 0.75,
        "task/accuracy": pytest.approx(2 / 3),  # of the three whose answer is known
    }


def test_speeds_are_of_the_whole_step():
    samples = samples_of(["1"] * 2, ["1"] * 2, [4, 6], [False] * 2)
    assert journal.speeds(samples, OneProcess(), 2.0, 0.5) == {
        "time/tokens_per_second": 5.0,
        "time/sample_seconds": 0.5,
        "time/train_seconds": 1.5,
    }


def test_a_recorded_batch_reads_back_and_can_be_prepared_again(tmp_path):
    run = tiny_run(tmp_path, file=None)
    samples = trainer.sample(run, 3)
    observed = trainer.observe(run, samples)
    scores = trainer.score(run, samples, 3)
    state = ObjectiveState(control=ControlState(coef=0.7, integral=0.25))
    journal.record(tmp_path, 3, samples, observed, scores, state, "the loss")
    found = records.read(tmp_path / "records" / "step-000003")
    assert found.about["step"] == 3 and found.about["reason"] == "the loss"
    assert ObjectiveState.from_dict(found.about["state"]) == state
    assert found.about["completions"] == list(samples.texts)
    assert found.about["prompts"] == [e.prompt for e in samples.examples]
    _, batch, _, _ = one_batch(run, 3)
    for name in ("mask", "groups", "old_logprobs", "ref_logprobs", "sampler_logprobs", "scores"):
        assert torch.equal(found.tensors[name], getattr(batch, name)), name
    assert torch.equal(found.tensors["responses"], samples.tokens.responses)
    assert torch.equal(found.tensors["truncated"], samples.truncated)
    assert "values" not in found.tensors
