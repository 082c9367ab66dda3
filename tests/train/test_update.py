"""From targets to new weights: cuts, epochs, clipping, schedules, and steps that are not finite."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from trainer_parts import CONFIGS, load, nudge, one_batch, precise, tiny_run, weights

from helpers import assert_close
from klamp.objective.losses import ValueLoss
from klamp.objective.objective import Objective
from klamp.train import models as networks
from klamp.train.models import read
from klamp.train.settings import OptimizerSettings
from klamp.train.states import head_of
from klamp.train.tokens import micro_batches
from klamp.train.update import first_bad, optimizer_of, rate, summary

NAN = float("nan")
PATHS = {
    "grpo": (None, ()),
    "ppo": (CONFIGS / "ppo.yaml", ()),
    "shared value": (CONFIGS / "ppo.yaml", ("model.value=shared",)),
    "exact KL": (None, ("objective.kl.estimator=exact",)),
    "entropy bonus": (None, ("objective.entropy_coef=0.1",)),
    "adapter": (None, ("model.lora={rank: 4}",)),
    "sequence mean": (CONFIGS / "open-instruct.yaml", ("objective.reduction=sequence_sum",)),
}


@pytest.fixture
def make(tmp_path):
    """A run with a batch to learn from; policy and reference differ, the policy has moved on."""

    def made(*overrides, file=None, moved=True):
        torch.manual_seed(0)
        run = tiny_run(tmp_path, *overrides, file=file)
        precise(run.models)
        nudge(run.models.policy)
        if run.models.value is not None:
            torch.nn.init.normal_(run.models.value.head.weight, std=0.1)
        found = one_batch(run)
        if moved:
            nudge(run.models.policy, 0.01)
        return run, *found

    return made


def settings_of(run, **changes):
    return replace(run.learner, settings=run.learner.settings.model_copy(update=changes))


class Steps:
    """What an optimizer is about to do: the gradients of each of its steps."""

    def __init__(self, optimizer):
        self.gradients = []
        optimizer.register_step_pre_hook(self)

    def __call__(self, optimizer, args, kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.gradients.append([None if p.grad is None else p.grad.clone() for p in parameters])

    def norm(self, step=-1):
        return float(torch.stack([g.norm() for g in self.gradients[step] if g is not None]).norm())


def everyone(batch):
    return torch.arange(len(batch.mask))


def order(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", PATHS)
def test_the_gradient_does_not_depend_on_how_rows_are_cut_into_passes(make, kind):
    file, overrides = PATHS[kind]
    found, numbers = [], []
    for most in (1, 60, 100_000):
        run, samples, batch, targets, _ = make(
            *overrides, f"optimizer.micro_tokens={most}", "optimizer.max_grad_norm=null", file=file
        )
        steps = Steps(run.learner.optimizer)
        passes = []
        head_of(run.models.policy).register_forward_pre_hook(lambda *_, seen=passes: seen.append(1))
        metrics, problem = run.learner.update(samples.tokens, batch, targets, everyone(batch))
        assert problem is None
        found.append(steps.gradients[0])
        numbers.append(metrics | {"passes": len(passes)})
    assert numbers[0].pop("passes") > numbers[1].pop("passes") > numbers[2].pop("passes")
    for other, metrics in zip(found[1:], numbers[1:], strict=True):
        for a, b in zip(found[0], other, strict=True):
            assert_close(a, b)
        assert metrics == pytest.approx(numbers[0], rel=1e-5, abs=1e-6)
    assert sum(float(g.abs().sum()) for g in found[0]) > 0.1


@pytest.mark.parametrize(("epochs", "cuts"), [(1, 1), (1, 4), (2, 1), (3, 2), (1, 5)])
def test_every_epoch_visits_every_row_once_in_so_many_steps(make, monkeypatch, epochs, cuts):
    run, samples, batch, targets, _ = make()
    learner = settings_of(run, epochs=epochs, updates_per_epoch=cuts)
    steps, seen = Steps(learner.optimizer), []
    tokens = samples.tokens
    # Each row gets a response of its own, so that it can be told from the others.
    own = tokens.responses.clone()
    own[:, 0] = torch.arange(len(own))
    tokens = replace(tokens, responses=own)

    def watched(models, network, part, *args, **kwargs):
        seen.extend(part.responses[:, 0].tolist())
        return read(models, network, part, *args, **kwargs)

    monkeypatch.setattr(networks, "read", watched)
    sizes = []  # rows that were seen before each step
    learner.optimizer.register_step_pre_hook(lambda *_: sizes.append(len(seen)))
    learner.learn(tokens, batch, targets, order(), 0)
    rows = len(batch.mask)
    assert len(steps.gradients) == epochs * cuts
    visits = [seen[i : i + rows] for i in range(0, len(seen), rows)]
    assert len(seen) == epochs * rows
    assert all(sorted(epoch) == list(range(rows)) for epoch in visits)
    ends = [0, *sizes]
    parts = [b - a for a, b in itertools.pairwise(ends)]
    assert sum(parts) == epochs * rows and max(parts) - min(parts) <= 1


def test_the_order_of_rows_is_the_generators(make):
    ends = []
    for seed in (1, 1, 2):
        run, samples, batch, targets, _ = make("optimizer.updates_per_epoch=4")
        run.learner.learn(samples.tokens, batch, targets, order(seed), 0)
        ends.append(torch.cat([p.flatten() for p in run.models.policy.parameters()]))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_an_update_of_some_rows_is_an_update_of_a_batch_of_those_rows(make):
    rows = torch.tensor([3, 8, 5])
    run, samples, batch, targets, _ = make()
    steps = Steps(run.learner.optimizer)
    run.learner.update(samples.tokens, batch, targets, rows)
    run, samples, batch, targets, _ = make()
    alone = Steps(run.learner.optimizer)
    part = samples.tokens.select(rows)
    wanted = part.mask.shape[1]
    narrow = {
        name: x[rows, :wanted]
        for name, x in vars(batch).items()
        if isinstance(x, torch.Tensor) and x.ndim == 2
    }
    aimed = {
        name: x[rows, :wanted]
        for name, x in vars(targets).items()
        if isinstance(x, torch.Tensor) and x.ndim == 2
    }
    run.learner.update(
        part,
        replace(batch.select(rows), **narrow),
        replace(targets.select(rows), **aimed),
        torch.arange(3),
    )
    for a, b in zip(steps.gradients[0], alone.gradients[0], strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("most", [1e-3, 1e6, None])
def test_a_gradient_is_clipped_to_its_norm_and_the_norm_before_is_reported(make, most):
    run, samples, batch, targets, _ = make()
    learner = settings_of(run, max_grad_norm=most)
    steps = Steps(learner.optimizer)
    metrics, _ = learner.update(samples.tokens, batch, targets, everyone(batch))
    whole = metrics["actor/grad_norm"]
    assert whole > 0.01
    assert steps.norm() == pytest.approx(1e-3 if most == 1e-3 else whole, rel=1e-4)


def test_policy_and_value_are_clipped_and_reported_apart(make):
    run, samples, batch, targets, _ = make(file=CONFIGS / "ppo.yaml")
    learner = settings_of(run, max_grad_norm=0.01)
    steps = Steps(learner.optimizer)
    metrics, _ = learner.update(samples.tokens, batch, targets, everyone(batch))
    count = len(learner.optimizer.param_groups[0]["params"])
    policy, value = steps.gradients[0][:count], steps.gradients[0][count:]
    for part in (policy, value):
        norm = torch.stack([g.norm() for g in part if g is not None]).norm()
        assert float(norm) == pytest.approx(0.01, rel=1e-3)
    assert metrics["actor/grad_norm"] > 0.01 and metrics["critic/grad_norm"] > 0.01
    assert metrics["actor/grad_norm"] != metrics["critic/grad_norm"]


def test_gradients_do_not_pile_up_from_update_to_update(make):
    run, samples, batch, targets, _ = make()
    first = Steps(run.learner.optimizer)
    frozen = replace(run.learner, optimizer=run.learner.optimizer)
    for group in frozen.optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(2):
        frozen.update(samples.tokens, batch, targets, everyone(batch))
    for a, b in zip(*first.gradients, strict=True):
        assert torch.equal(a, b)
    assert all(p.grad is None for p in run.models.policy.parameters())


def test_policy_and_value_have_rates_and_moments_as_set():
    models = load(Objective(value_loss=ValueLoss()), lora={"rank": 4})
    settings = OptimizerSettings(lr=0.02, value_lr=0.3, betas=(0.7, 0.8), weight_decay=0.01)
    optimizer = optimizer_of(models, settings)
    policy, value = optimizer.param_groups
    assert (policy["base"], value["base"]) == (0.02, 0.3)
    for group in (policy, value):
        assert (group["betas"], group["weight_decay"]) == ((0.7, 0.8), 0.01)
    assert {id(p) for p in policy["params"]} == {
        id(p) for n, p in models.policy.named_parameters() if "lora_" in n
    }
    assert {id(p) for p in value["params"]} == {id(p) for p in models.value.parameters()}


# Six steps, two of warm-up: 1/3, 2/3, then from 1 at step 3 to the end at step 6, a third of the
# way each. Linear to 0.1: 1, 0.7, 0.4, 0.1. Cosine: (1 + cos 60°)/2 = 3/4 and (1 + cos 120°)/2 =
# 1/4 of the way down from 1 to 0.1, so 0.1 + 0.9 · 3/4 = 0.775 and 0.1 + 0.9 / 4 = 0.325.
@pytest.mark.parametrize(
    ("schedule", "after"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.7, 0.4, 0.1]),
        ("cosine", [1.0, 0.775, 0.325, 0.1]),
    ],
)
def test_rates_warm_up_and_fall_as_worked_out(schedule, after):
    settings = OptimizerSettings(schedule=schedule, warmup_steps=2, final_lr=0.1)
    found = [rate(settings, step, 6) for step in range(1, 7)]
    assert found == pytest.approx([1 / 3, 2 / 3, *after], abs=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_without_warm_up_the_first_step_has_the_whole_rate(schedule):
    settings = OptimizerSettings(schedule=schedule, final_lr=0.25)
    assert rate(settings, 1, 10) == pytest.approx(1.0)
    last = 1.0 if schedule == "constant" else 0.25
    assert rate(settings, 10, 10) == pytest.approx(last, abs=1e-6)
    assert rate(settings, 1, 1) == pytest.approx(1.0)


@pytest.mark.parametrize("warmup", [6, 100])
def test_a_warm_up_longer_than_the_run_is_only_cut_off(warmup):
    settings = OptimizerSettings(schedule="linear", warmup_steps=warmup)
    assert rate(settings, 6, 6) == pytest.approx(6 / (warmup + 1))


def test_updates_of_one_step_are_summed_up_by_what_they_are():
    first = {"a/x": 1.0, "a/ratio_max": 3.0, "a/ratio_min": 0.5, "a/nonfinite_tokens": 2.0}
    other = {"a/x": 2.0, "a/ratio_max": 2.0, "a/ratio_min": 0.7, "a/nonfinite_tokens": 1.0}
    found = summary([first | {"actor/skipped_updates": 1.0}, other | {"only": 4.0}])
    assert found == {
        "a/x": 1.5,
        "a/ratio_max": 3.0,
        "a/ratio_min": 0.5,
        "a/nonfinite_tokens": 3.0,
        "actor/skipped_updates": 1.0,
        "only": 4.0,
    }


def test_the_first_bad_tensor_is_named_with_its_row_and_position():
    fine = torch.zeros(3, 4)
    bad = fine.clone()
    bad[2, 1] = NAN
    hidden = fine.clone()
    hidden[0, 3] = math.inf
    mask = torch.tensor([[True, True, True, False]] * 3)
    assert first_bad({"a": fine, "none": None, "b": bad}, mask) == "b at row 2, position 1"
    assert first_bad({"b": bad}, mask, torch.tensor([7, 5, 9])) == "b at row 9, position 1"
    assert first_bad({"c": hidden}, mask) is None
    assert first_bad({"a": fine, "loss": torch.tensor(NAN)}, mask) == "the loss"
    assert first_bad({"a": bad, "b": bad}, mask) == "a at row 2, position 1"


def before_and_after(run, learner, samples, batch, targets):
    """One update, with what it left of weights and moments."""
    state = run.learner.optimizer.state_dict()
    kept = {k: {n: x.clone() for n, x in s.items()} for k, s in state["state"].items()}
    network = torch.nn.ModuleList([run.models.policy, run.models.value or torch.nn.Identity()])
    old = weights(network)
    metrics, problem = learner.update(samples.tokens, batch, targets, everyone(batch))
    same_weights = all(torch.equal(p, old[n]) for n, p in network.named_parameters())
    now = run.learner.optimizer.state_dict()["state"]
    same_moments = all(torch.equal(now[k][n], x) for k, s in kept.items() for n, x in s.items())
    return metrics, problem, same_weights, same_moments and now.keys() == kept.keys()


def first_row(samples):
    """The row that is the first in the first pass."""
    rows = torch.arange(len(samples.tokens.mask))
    return int(micro_batches(samples.tokens, rows, 1)[0])


LAYER = "model.layers.1.mlp.up_proj.weight"


def poison(run, where):
    """Something that is not a number, in the next passes; returns what undoes it."""
    policy, value = run.models.policy, run.models.value
    if where == "logprobs":

        def spoil(module, args, out):
            spoil.passes += 1
            factor = torch.ones_like(out)
            factor[:, 2] = NAN if spoil.passes == spoil.bad else 1.0
            return out * factor

        spoil.passes = 0
        return head_of(policy).register_forward_hook(spoil), spoil
    if where == "values":
        return value.head.register_forward_hook(lambda m, a, out: out * NAN), None
    parameter = dict(policy.named_parameters())[LAYER]
    return parameter.register_hook(lambda g: torch.full_like(g, where)), None


@pytest.mark.parametrize(
    ("where", "said"),
    [
        pytest.param("logprobs", "logprobs at row 5, position 2", id="logprobs"),
        pytest.param("values", "values at row {first}, position 0", id="values"),
        pytest.param(NAN, f"the gradient of policy parameter {LAYER}", id="gradient NaN"),
        pytest.param(math.inf, f"the gradient of policy parameter {LAYER}", id="gradient inf"),
    ],
)
def test_an_update_that_is_not_finite_is_skipped_and_named(make, where, said):
    run, samples, batch, targets, _ = make(file=CONFIGS / "ppo.yaml", moved=False)
    learner = settings_of(run, micro_tokens=1)
    learner.update(samples.tokens, batch, targets, everyone(batch))  # there are moments to lose
    hook, spoil = poison(run, where)
    if spoil is not None:
        parts = micro_batches(samples.tokens, everyone(batch), 1)
        spoil.bad = 1 + [part.tolist() for part in parts].index([5])
    said = said.format(first=first_row(samples))
    metrics, problem, same_weights, same_moments = before_and_after(
        run, learner, samples, batch, targets
    )
    assert same_weights and same_moments
    assert metrics["actor/skipped_updates"] == 1.0
    assert problem == said
    hook.remove()
    metrics, problem, same_weights, _ = before_and_after(run, learner, samples, batch, targets)
    assert problem is None and not same_weights
    assert metrics["actor/skipped_updates"] == 0.0


@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_a_loss_that_is_not_finite_never_reaches_the_optimizer(make, bad):
    """Also where no gradient is bad: these log-probs are constants."""
    run, samples, batch, targets, _ = make(moved=False)

    head_of(run.models.policy).register_forward_hook(
        lambda module, args, out: out.index_fill(1, torch.tensor([2]), bad)
    )
    metrics, problem, same_weights, same_moments = before_and_after(
        run, run.learner, samples, batch, targets
    )
    assert problem == f"logprobs at row {first_row(samples)}, position 2"
    assert metrics["actor/skipped_updates"] == 1.0
    assert same_weights and same_moments


@pytest.mark.parametrize(
    ("bad", "before", "skipped"),
    [
        ([0, 0, 0, 0], 3, 0),
        ([1, 1, 1, 1], 3, 7),
        ([1, 1, 0, 1], 3, 1),
        ([0, 1, 1, 1], 3, 3),
    ],
    ids=str,
)
def test_skipped_updates_are_counted_in_a_row(make, bad, before, skipped):
    run, samples, batch, targets, _ = make("optimizer.updates_per_epoch=4")
    steps = iter(bad)
    parameter = dict(run.models.policy.named_parameters())[LAYER]
    parameter.register_hook(lambda g: g * math.inf if next(steps) else g)
    learnt = run.learner.learn(samples.tokens, batch, targets, order(), before)
    assert learnt.skipped == skipped
    assert learnt.metrics["actor/skipped_updates"] == sum(bad)
    assert (learnt.problem is None) == (not any(bad))


def test_the_first_update_of_a_batch_is_kept_apart(make):
    run, samples, batch, targets, _ = make("optimizer.epochs=3", moved=False)
    learnt = run.learner.learn(samples.tokens, batch, targets, order(), 0)
    assert learnt.first["actor/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert learnt.metrics["actor/ratio_max"] > 1.001


def test_more_updates_than_rows_still_learn_from_every_row(make):
    run, samples, batch, targets, _ = make(
        "sampling.prompts=1", "sampling.samples_per_prompt=2", "optimizer.updates_per_epoch=3"
    )
    steps = Steps(run.learner.optimizer)
    learnt = run.learner.learn(samples.tokens, batch, targets, order(), 0)
    assert learnt.problem is None and len(steps.gradients) == 3
