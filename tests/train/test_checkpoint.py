"""Checkpoints: what comes back, what is kept, and what is never read."""

import pytest
import torch
from trainer_parts import CONFIGS, nudge, one_batch, tiny_run, weights

from klamp.errors import DataError
from klamp.objective.control import ControlState
from klamp.objective.state import ObjectiveState
from klamp.train import checkpoint, trainer
from klamp.train.checkpoint import LATEST, Progress

KINDS = {
    "grpo": (None, ()),
    "own value": (CONFIGS / "ppo.yaml", ()),
    "shared value": (CONFIGS / "ppo.yaml", ("model.value=shared",)),
    "adapter": (None, ("model.lora={rank: 4}",)),
}


def a_run(place, kind="grpo", *overrides):
    file, own = KINDS[kind]
    return tiny_run(place, *own, *overrides, file=file)


def moved(run):
    """The run after an update, so that there are moments."""
    samples, batch, targets, state = one_batch(run)
    run.learner.update(samples.tokens, batch, targets, torch.arange(len(batch.mask)))
    return state


def networks(run):
    parts = [run.models.policy, *([] if run.models.value is None else [run.models.value])]
    return torch.nn.ModuleList(parts)


def save(run, step, keep=2, **progress):
    state = ObjectiveState(control=ControlState(coef=0.1 * step))
    checkpoint.save(
        run.place,
        run.models,
        run.learner.optimizer,
        Progress(step=step, state=state, **progress),
        keep=keep,
    )


def names(run):
    return sorted(p.name for p in (run.place / "checkpoints").iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_everything_that_moves_comes_back(tmp_path, kind):
    run = a_run(tmp_path, kind)
    state = moved(run)
    given = Progress(step=7, state=state, skipped=3)
    checkpoint.save(tmp_path, run.models, run.learner.optimizer, given, keep=1)
    fresh = a_run(tmp_path, kind)
    nudge(networks(fresh))
    found = checkpoint.restore(checkpoint.latest(tmp_path), fresh.models, fresh.learner.optimizer)
    assert found == given
    old, new = weights(networks(run)), weights(networks(fresh))
    assert all(
        torch.equal(old[n], new[n]) for n, p in networks(run).named_parameters() if p.requires_grad
    )
    before = run.learner.optimizer.state_dict()["state"]
    after = fresh.learner.optimizer.state_dict()["state"]
    assert before and before.keys() == after.keys()
    for key, moments in before.items():
        assert {"exp_avg", "exp_avg_sq", "step"} <= moments.keys()
        assert all(torch.equal(after[key][n], x) for n, x in moments.items())


def test_only_what_is_trained_is_saved(tmp_path):
    run = a_run(tmp_path, "adapter")
    saved = checkpoint.trained(run.models.policy)
    assert saved and all("lora_" in name for name in saved)
    assert checkpoint.trained(run.models.policy.get_base_model()).keys() != saved.keys()


def test_without_a_checkpoint_there_is_none(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    run = a_run(tmp_path)
    assert trainer.resume(run) == Progress(step=0, state=run.objective.init())


@pytest.mark.parametrize(
    ("keep", "left"), [(1, [8]), (2, [6, 8]), (3, [4, 6, 8]), (9, [2, 4, 6, 8])]
)
def test_the_last_few_are_kept(tmp_path, keep, left):
    run = a_run(tmp_path)
    for step in (2, 4, 6, 8):
        save(run, step, keep)
        assert checkpoint.latest(tmp_path).name == f"step-{step:06d}"
    assert names(run) == [LATEST, *(f"step-{step:06d}" for step in left)]


def test_a_step_that_is_made_again_replaces_the_first(tmp_path):
    run = a_run(tmp_path)
    save(run, 4)
    (tmp_path / "checkpoints" / "step-000004" / "junk").write_text("old")
    nudge(run.models.policy)
    save(run, 4, skipped=2)
    place = checkpoint.latest(tmp_path)
    assert not (place / "junk").exists()
    fresh = a_run(tmp_path)
    assert checkpoint.restore(place, fresh.models, fresh.learner.optimizer).skipped == 2
    new = weights(fresh.models.policy)
    assert all(torch.equal(new[n], p) for n, p in run.models.policy.named_parameters())


def test_a_half_written_checkpoint_is_never_read_and_goes_with_the_next(tmp_path):
    run = a_run(tmp_path)
    save(run, 2)
    partial = tmp_path / "checkpoints" / ".step-000004.partial"
    partial.mkdir()
    (partial / "state.json").write_text('{"step": 4')
    assert checkpoint.latest(tmp_path).name == "step-000002"
    save(run, 4)
    assert names(run) == [LATEST, "step-000002", "step-000004"]
    assert checkpoint.latest(tmp_path).name == "step-000004"


def test_a_whole_checkpoint_that_latest_does_not_name_is_not_read(tmp_path):
    run = a_run(tmp_path)
    save(run, 2)
    save(run, 4)
    (tmp_path / "checkpoints" / LATEST).write_text("step-000002\n")
    assert trainer.resume(run).step == 2


@pytest.mark.parametrize("how", ["gone", "half"])
def test_a_latest_that_names_what_is_not_there_is_refused(tmp_path, how):
    run = a_run(tmp_path)
    save(run, 2)
    state = tmp_path / "checkpoints" / "step-000002" / "state.json"
    state.unlink()
    if how == "gone":
        for path in state.parent.iterdir():
            path.unlink()
        state.parent.rmdir()
    with pytest.raises(DataError, match=r"LATEST names step-000002, which is not there; was it"):
        trainer.resume(run)


@pytest.mark.parametrize(
    ("saved", "read", "other"),
    [
        ("grpo", "adapter", "lora_"),
        ("adapter", "grpo", "lora_"),
        ("own value", "shared value", "trunk"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_what_differs(tmp_path, saved, read, other):
    run = a_run(tmp_path, saved)
    save(run, 2)
    with pytest.raises(DataError, match=rf"is of another model: they differ in '.*{other}.*'; use"):
        trainer.resume(a_run(tmp_path, read))


def test_a_checkpoint_of_a_model_of_another_size_is_refused(tmp_path):
    save(a_run(tmp_path, "grpo", "model.lora={rank: 4}"), 2)
    with pytest.raises(DataError, match=r"is of another model"):
        trainer.resume(a_run(tmp_path, "grpo", "model.lora={rank: 2}"))


def test_a_checkpoint_without_a_value_function_is_refused_where_one_is_needed(tmp_path):
    save(a_run(tmp_path, "grpo"), 2)
    with pytest.raises(DataError, match=r"value"):
        trainer.resume(a_run(tmp_path, "own value"))


def test_settings_that_are_changed_on_resume_hold(tmp_path):
    """`--resume RUN --set optimizer.lr=…` is what the error about non-finite weights advises."""
    run = a_run(tmp_path)
    moved(run)
    save(run, 2)
    changed = ("optimizer.lr=1e-6", "optimizer.betas=[0.5, 0.6]", "optimizer.weight_decay=0.25")
    other = a_run(tmp_path, "grpo", *changed)
    trainer.resume(other)
    (group,) = other.learner.optimizer.param_groups
    assert (group["base"], group["betas"], group["weight_decay"]) == (1e-6, (0.5, 0.6), 0.25)
    trainer.set_rate(other, 1)
    assert group["lr"] == pytest.approx(1e-6)


def test_resuming_cuts_the_log_back_to_the_checkpoint(tmp_path):
    from klamp.inspect import runlog

    run = a_run(tmp_path)
    save(run, 2)
    for step in (1, 2, 3):
        runlog.append(tmp_path, runlog.Step(step=step, seconds=0.5, metrics={"x": step}))
        found = runlog.Evaluation(step=step, metrics={}, samples=())
        runlog.write_evaluation(tmp_path, found)
    assert trainer.resume(run).step == 2
    log = runlog.read(tmp_path)
    assert [s.step for s in log.steps] == [e.step for e in log.evaluations] == [1, 2]
