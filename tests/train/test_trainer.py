"""The loop: what a step does and leaves, and what happens when numbers are not finite."""

import json
import math
from dataclasses import replace

import pytest
import torch
from trainer_parts import (
    CONFIGS,
    load,
    model_directory,
    nudge,
    one_batch,
    tiny_config,
    tiny_run,
    trained,
    weights,
)

from klamp.errors import NumericsError
from klamp.inspect import record as records
from klamp.inspect import runlog
from klamp.objective.state import ObjectiveState
from klamp.train import checkpoint, loading, trainer
from klamp.train.checkpoint import Progress
from klamp.train.comm import Distributed, OneProcess
from klamp.train.journal import ALWAYS

LAYER = "model.layers.0.mlp.down_proj.weight"


class Seen:
    """What a person would be shown."""

    def __init__(self):
        self.lines, self.said = [], []

    def __call__(self, line, said):
        self.lines.append(line)
        self.said += said


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run of five steps, and what was shown of it."""
    run = tiny_run(
        tmp_path_factory.mktemp("run"),
        *("steps=5", "checkpoints.every=2", "evaluation.every=2", "optimizer.epochs=2"),
        *("optimizer.schedule=linear", "optimizer.warmup_steps=1"),
    )
    before, seen = weights(run.models.policy), Seen()
    return run, before, trained(run, seen), seen


def test_a_run_has_a_line_for_every_step_and_its_contracts_names_in_each(finished):
    run, _, progress, seen = finished
    log = runlog.read(run.place)
    assert [line.step for line in log.steps] == [1, 2, 3, 4, 5] and progress.step == 5
    for line in log.steps:
        assert set(ALWAYS) <= line.metrics.keys()
        assert all(math.isfinite(x) for x in line.metrics.values())
        assert line.seconds > 0
    assert list(log.steps) == seen.lines and not seen.said


def test_the_policy_moves_and_its_reference_does_not(finished):
    run, before, _, _ = finished
    assert all(not torch.equal(before[n], p) for n, p in run.models.policy.named_parameters())
    assert all(torch.equal(before[n], p) for n, p in run.models.reference.named_parameters())


def test_the_ratio_is_one_where_nothing_has_moved_yet_and_not_for_ever(finished):
    for line in finished[-1].lines:
        assert line.metrics["actor/ratio_at_step0"] == pytest.approx(1.0, abs=1e-4)
        assert line.metrics["actor/ratio_max"] > 1.001  # of both epochs


def test_the_controllers_coefficient_moves_from_line_to_line_and_ends_in_the_state(finished):
    run, _, progress, seen = finished
    coefs = [line.metrics["critic/kl_coef"] for line in seen.lines]
    assert coefs[0] == run.objective.kl.control.init_coef
    assert len(set(coefs)) == 5
    assert progress.state.kl_coef not in coefs
    state = run.objective.init()
    for line in seen.lines:  # the controller by hand, from what each line says
        assert line.metrics["critic/kl_coef"] == pytest.approx(state.kl_coef)
        state = replace(
            state,
            control=run.objective.kl.control.update(state.control, line.metrics["critic/kl"], 16),
        )
    assert progress.state.kl_coef == pytest.approx(state.kl_coef)


def test_the_rate_of_each_step_is_the_schedules(finished):
    # Five steps, one of warm-up: a half, then from 1 to 0.1 in three equal parts.
    rates = [line.metrics["actor/lr"] / 3e-4 for line in finished[-1].lines]
    assert rates == pytest.approx([0.5, 1.0, 0.7, 0.4, 0.1])


def test_policy_and_value_each_have_their_own_rate_of_the_step(tmp_path):
    rates = ("optimizer.lr=0.01", "optimizer.value_lr=0.2", "optimizer.warmup_steps=1")
    run = tiny_run(tmp_path, *rates, file=CONFIGS / "ppo.yaml")
    trainer.set_rate(run, 1)  # half way up
    assert [g["lr"] for g in run.learner.optimizer.param_groups] == pytest.approx([0.005, 0.1])


def test_checkpoints_are_saved_every_so_often_and_at_the_end(finished):
    run, _, progress, _ = finished
    place = run.place / "checkpoints"
    assert sorted(p.name for p in place.iterdir()) == ["LATEST", "step-000004", "step-000005"]
    fresh = tiny_run(run.place)
    assert (
        checkpoint.restore(checkpoint.latest(run.place), fresh.models, fresh.learner.optimizer)
        == progress
    )
    own = weights(run.models.policy)
    assert all(torch.equal(own[n], p) for n, p in fresh.models.policy.named_parameters())


def test_a_config_and_a_seed_make_the_run(tmp_path, finished):
    lines = []
    for seed in (0, 0, 1):
        place = tmp_path / str(len(lines))
        place.mkdir()
        run = tiny_run(place, f"seed={seed}")
        torch.manual_seed(len(lines))  # what happens outside does not matter
        trained(run)
        found = [s.metrics for s in runlog.read(place).steps]
        lines.append([{k: v for k, v in m.items() if not k.startswith("time/")} for m in found])
    assert lines[0] == lines[1] != lines[2]


def test_a_fresh_value_head_is_the_same_on_every_process(tmp_path):
    heads = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        run = tiny_run(
            tmp_path, "model.lora={rank: 4}", "model.value=own", file=CONFIGS / "ppo.yaml"
        )
        heads.append(weights(run.models.policy) | weights(run.models.value))
    assert all(torch.equal(x, heads[1][n]) for n, x in heads[0].items())
    assert any(x.std() > 0 for n, x in heads[0].items() if "lora_A" in n)


def test_prompts_go_on_where_the_last_step_ended(tmp_path):
    run = tiny_run(tmp_path)
    asked = [e.prompt for step in (1, 2, 3) for e in trainer.sample(run, step).examples[::4]]
    assert asked == [e.prompt for e in run.task.train(0, 0, 12)]


def test_every_step_and_every_rank_has_random_numbers_of_its_own(tmp_path):
    """Told by one prompt that is asked again and again."""
    for name, prompt in (("train", "s394571="), ("held", "s123=")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "1"}))
    files = f"{{file: {tmp_path}/train.jsonl, evaluation_file: {tmp_path}/held.jsonl, name: file}}"
    sizes = (f"task={files}", "sampling.prompts=2", "sampling.samples_per_prompt=24")
    first, second = (tiny_run(tmp_path, *sizes, comm=Distributed(rank, 2)) for rank in (0, 1))
    asked = ((first, 1), (first, 2), (second, 1), (first, 1))
    drawn = [trainer.sample(run, step).texts for run, step in asked]
    assert len(set(drawn)) == 3 and drawn[0] == drawn[3]


def test_every_step_and_every_rank_has_outliers_of_its_own(tmp_path):
    noisy = "reward={function: exact, outliers: {fraction: 0.5, size: 100.0}}"
    first, second = (tiny_run(tmp_path, noisy, comm=Distributed(rank, 2)) for rank in (0, 1))
    samples = trainer.sample(tiny_run(tmp_path), 1)
    asked = ((first, 1), (first, 2), (second, 1), (first, 1))
    scores = [tuple(trainer.score(run, samples, step)) for run, step in asked]
    assert len(set(scores)) == 3 and scores[0] == scores[3]
    assert {abs(s) for s in scores[0]} <= {0.0, 1.0, 100.0}


def test_a_step_that_is_asked_to_stop_is_finished_and_saved(tmp_path):
    run = tiny_run(tmp_path, "steps=5", "checkpoints.every=4")
    answers = iter([False, True])
    progress = trainer.train(run, trainer.resume(run), lambda *_: None, lambda: next(answers))
    assert progress.step == 2
    assert checkpoint.latest(tmp_path).name == "step-000002"
    assert len(runlog.read(tmp_path).steps) == 2


def test_a_run_that_is_at_its_end_stays_as_it_is(tmp_path, finished):
    run, _, progress, _ = finished
    log = runlog.read(run.place)
    again = tiny_run(run.place, "steps=5")
    assert trained(again, lambda *_: pytest.fail("a step was made")) == progress
    assert runlog.read(run.place) == log


# ── not finite ──


def poisoned_run(place, poison, *overrides, file=None):
    """Five steps at most; ``poison(run, step)`` is called before each."""
    run = tiny_run(place, "steps=5", *overrides, file=file)
    seen = Seen()

    def watch(line, said):
        seen(line, said)
        poison(run, line.step + 1)

    poison(run, 1)
    return run, seen, watch


def bad_gradient(*steps):
    """The gradient of one weight is infinite in some steps."""
    now = []

    def poison(run, step):
        if not now:
            parameter = dict(run.models.policy.named_parameters())[LAYER]
            parameter.register_hook(
                lambda g: torch.full_like(g, torch.inf) if now[-1] in steps else None
            )
        now.append(step)

    return poison


def test_a_step_that_is_not_finite_is_skipped_recorded_and_told_and_the_run_goes_on(tmp_path):
    run, seen, watch = poisoned_run(tmp_path, bad_gradient(2, 4))
    kept = {}

    def keep(line, said):
        kept[line.step] = weights(run.models.policy)
        watch(line, said)

    progress = trained(run, keep)
    skipped = [line.metrics["actor/skipped_updates"] for line in seen.lines]
    assert skipped == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert progress.step == 5 and progress.skipped == 0
    same = [all(torch.equal(kept[a][n], kept[a + 1][n]) for n in kept[a]) for a in (1, 2, 3, 4)]
    assert same == [True, False, True, False]
    problem = f"the gradient of policy parameter {LAYER}"
    assert seen.said == [
        f"step {step}: not finite: {problem}; the update was skipped" for step in (2, 4)
    ]
    places = sorted((tmp_path / "records").iterdir())
    assert [p.name for p in places] == ["step-000002", "step-000004"]
    for place, step in zip(places, (2, 4), strict=True):
        found = records.read(place)
        assert found.about["step"] == step and found.about["reason"] == problem
        coef = seen.lines[step - 1].metrics["critic/kl_coef"]
        assert ObjectiveState.from_dict(found.about["state"]).kl_coef == coef  # before the batch
        assert len(found.about["completions"]) == len(found.tensors["scores"]) == 16


@pytest.mark.parametrize("most", [1, 2, 4])
def test_after_too_many_in_a_row_the_run_stops_with_the_first_of_the_step_by_name(tmp_path, most):
    run, seen, watch = poisoned_run(tmp_path, bad_gradient(2, 3, 4, 5), f"max_skipped={most}")
    said = (
        rf"{most} updates in a row were not finite.*in step {most + 1} the first was the gradient"
    )
    with pytest.raises(NumericsError, match=said + rf" of policy parameter {LAYER}"):
        trained(run, watch)
    assert [line.step for line in runlog.read(tmp_path).steps] == list(range(1, most + 2))
    assert len(list((tmp_path / "records").iterdir())) == most
    assert seen.lines[-1].step == most + 1  # also the last one was shown


def spoil(network):
    with torch.no_grad():
        next(p for p in network.parameters() if p.ndim > 1)[3:].fill_(torch.nan)


@pytest.mark.parametrize("what", ["reference", "value"])
def test_what_the_other_networks_say_is_looked_at_before_anything_is_learnt(tmp_path, what):
    def poison(run, step):
        if step == 2:
            network = run.models.reference if what == "reference" else run.models.value
            spoil(network if what == "reference" else network.trunk)

    run, seen, watch = poisoned_run(tmp_path, poison, "max_skipped=2", file=CONFIGS / "ppo.yaml")
    name = "ref_logprobs" if what == "reference" else "values"
    with pytest.raises(NumericsError, match=rf"the first was {name} at row 0, position 0"):
        trained(run, watch)
    coefs = [line.metrics["critic/kl_coef"] for line in seen.lines]
    assert len(coefs) == 3 and coefs[1] == coefs[2]  # the controller saw nothing
    assert seen.lines[1].metrics["actor/skipped_updates"] == 1.0
    assert 0 < seen.lines[1].metrics["critic/score/mean"] < 2
    found = records.read(tmp_path / "records" / "step-000002").tensors
    assert found[name].isnan().any() and found["old_logprobs"].isfinite().all()


def test_skipped_updates_in_a_row_are_counted_over_a_resume(tmp_path):
    run, _, watch = poisoned_run(tmp_path, bad_gradient(2), "max_skipped=2", "checkpoints.every=1")
    run = replace(run, config=run.config.model_copy(update={"steps": 2}))
    assert trained(run, watch).skipped == 1
    again, _, watch = poisoned_run(tmp_path, bad_gradient(1, 3), "max_skipped=2")
    with pytest.raises(NumericsError, match=r"^2 updates in a row.*in step 3"):
        trained(again, watch)


def test_weights_that_have_left_the_numbers_end_the_run_in_the_sampler(tmp_path):
    run = tiny_run(tmp_path)
    spoil(run.models.policy)
    with pytest.raises(NumericsError, match=r"the policy's logits are not finite in row 0"):
        trainer.one_step(run, Progress(step=0, state=run.objective.init()), lambda *_: None, [])


def test_a_missing_score_is_counted_and_nothing_else_is_lost(tmp_path):
    first, then = "def some(prompts, completions, **columns):", "[None, 1.0, 0.0, 2.0]"
    (tmp_path / "mine.py").write_text(f"{first}\n    return {then} * (len(prompts) // 4)\n")
    trained(tiny_run(tmp_path, "steps=1", f"reward.function={tmp_path}/mine.py:some"))
    (line,) = runlog.read(tmp_path).steps
    assert line.metrics["signal/missing_scores"] == 4
    assert line.metrics["critic/score/mean"] == pytest.approx(1.0)


# ── the ratio at step 0 ──


DROPOUT = {"attn_pdrop": 0.3, "embd_pdrop": 0.3, "resid_pdrop": 0.3}


@pytest.mark.parametrize("without", [True, False])
def test_dropout_would_be_warned_of_by_name(tmp_path, monkeypatch, without):
    path = model_directory(tmp_path / "model", "gpt2", **DROPOUT)
    if not without:
        monkeypatch.setattr(loading, "without_dropout", lambda model: None)
    run = tiny_run(tmp_path, "steps=1", f"model.path={path}")
    run.models.policy.train()
    seen = Seen()
    trained(run, seen)
    ratio = seen.lines[0].metrics["actor/ratio_at_step0"]
    told = [s for s in seen.said if s.startswith("actor/ratio_at_step0 is")]
    assert (abs(ratio - 1) < 1e-4) == without and bool(told) == (not without)


def test_bfloat16_is_rounding_and_not_warned_of(tmp_path):
    run = tiny_run(tmp_path, "model.precision=bfloat16")
    seen = Seen()
    trained(run, seen)
    assert not seen.said
    assert [line.metrics["actor/skipped_updates"] for line in seen.lines] == [0.0, 0.0]


def test_sampling_observing_and_learning_agree_at_every_temperature(tmp_path):
    run = tiny_run(tmp_path, "sampling.temperature=0.6")
    nudge(run.models.policy)
    samples, batch, targets, _ = one_batch(run)
    torch.testing.assert_close(
        batch.old_logprobs[batch.mask], batch.sampler_logprobs[batch.mask], rtol=1e-5, atol=5e-5
    )
    rows = torch.arange(len(batch.mask))
    metrics, _ = run.learner.update(samples.tokens, batch, targets, rows)
    ratios = [metrics["actor/ratio_min"], metrics["actor/ratio_max"]]
    assert ratios == pytest.approx([1.0, 1.0], abs=1e-5)


def test_the_log_is_json_a_line(tmp_path):
    trained(tiny_run(tmp_path))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [set(json.loads(line)) for line in lines] == [{"step", "seconds", "metrics"}] * 2


def test_seconds_are_the_steps_own_without_evaluation(tmp_path, monkeypatch):
    run = tiny_run(tmp_path, "steps=1")
    now = [100.0]

    def takes_five_seconds(prompts, completions, **columns):
        now[0] += 5.0
        return [0.5] * len(prompts)

    monkeypatch.setattr(trainer.time, "perf_counter", lambda: now[0])
    trained(replace(run, reward=takes_five_seconds))  # before, in the step, and after it
    (line,) = runlog.read(tmp_path).steps
    assert now[0] == 115.0
    assert line.seconds == line.metrics["time/train_seconds"] == 5.0
    assert line.metrics["time/sample_seconds"] == 0.0


def test_threads_are_set_where_asked_for(tmp_path):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        tiny_run(tmp_path, "threads=1")
        assert torch.get_num_threads() == 1
        torch.set_num_threads(2)
        trainer.set_up(tiny_config("threads=null"), tmp_path, OneProcess())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_reference_is_loaded_to_watch_the_kl_where_none_is_applied(tmp_path):
    run = tiny_run(tmp_path, "objective.kl=null", "model.reference=copy", "optimizer.lr=3e-3")
    seen = Seen()
    trained(run, seen)
    assert seen.lines[0].metrics["critic/kl_coef"] == 0.0
    assert seen.lines[1].metrics["critic/kl"] != 0.0
    assert load().reference is None
