"""Hidden states to loss in one call: the objective's own loss of the plain form's log-probs."""

from dataclasses import replace

import pytest
import torch
from plain_head import (
    CountedProducts,
    assert_same_gradients,
    distribution,
    kl,
    logprobs_and_entropy,
    small_tiles,
    wide,
)

import klamp
from helpers import assert_close, prefix_mask
from klamp.errors import DataError, NumericsError
from klamp.heads import passes
from klamp.heads.fused import head_loss
from klamp.objective import terms
from klamp.objective.control import FixedKL
from klamp.objective.kl import KLTerm
from klamp.objective.losses import CISPO, ClippedSurrogate, PolicyGradient, ValueLoss
from klamp.objective.metrics import reduced
from klamp.objective.objective import Objective


def token_wise(objective, targets):
    return terms.token_wise(objective.surrogate, objective.kl, targets)


ROWS, WIDTH, FEATURES, VOCABULARY, TEMPERATURE = 4, 5, 6, 29, 0.9
PRESETS = ("open-instruct", "openrlhf", "roll", "trlx", "klamp")


def kl_objective(**settings):
    return Objective(kl=KLTerm(control=FixedKL(coef=0.3), **settings))


TOKEN_WISE = {
    **{name: klamp.presets.load(name) for name in PRESETS},
    "entropy": replace(klamp.presets.load("klamp"), entropy_coef=0.02),
    "token gradient": kl_objective(gradient="token", clamp_log_ratio=0.5),
    "importance of a value": kl_objective(weighting="importance"),
    "exact": kl_objective(estimator="exact"),
    "exact and entropy": replace(kl_objective(estimator="exact"), entropy_coef=0.02),
    "exact, sequence": kl_objective(estimator="exact", gradient="sequence"),
    "CISPO": Objective(surrogate=CISPO()),
    "REINFORCE with values": Objective(surrogate=PolicyGradient(), value_loss=ValueLoss(coef=0.5)),
}
GSPO = Objective(surrogate=ClippedSurrogate(ratio="sequence"))
TWO_PASSES = {
    "GSPO": GSPO,
    "GSPO with values": replace(GSPO, value_loss=ValueLoss(), entropy_coef=0.02),
    "importance": kl_objective(gradient="token", weighting="importance"),
    "importance, sequence": kl_objective(gradient="sequence", weighting="importance"),
    "exact, importance": kl_objective(estimator="exact", gradient="token", weighting="importance"),
}


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch):
    small_tiles(monkeypatch)


class Case:
    """Inputs of head_loss, near enough to the old policy that not everything is clipped."""

    def __init__(self, objective, lengths=(5, 3, 1, 4), frozen=False, to_come=True):
        self.objective = objective
        self.hidden = torch.randn(ROWS, WIDTH, FEATURES, requires_grad=True)
        self.weight = (0.3 * torch.randn(VOCABULARY, FEATURES)).requires_grad_(not frozen)
        self.bias = (0.3 * torch.randn(VOCABULARY)).requires_grad_(not frozen)
        self.labels = torch.randint(VOCABULARY, (ROWS, WIDTH))
        self.reference = torch.randn(ROWS, WIDTH, 3), 0.3 * torch.randn(VOCABULARY, 3)
        self.values = torch.randn(ROWS, WIDTH, requires_grad=True)
        now = logprobs_and_entropy(self.hidden, self.weight, self.labels, self.bias, TEMPERATURE)[0]
        self.batch = klamp.Batch(
            mask=prefix_mask(lengths, WIDTH),
            scores=torch.rand(ROWS),
            groups=torch.tensor([0, 0, 1, 1]),
            old_logprobs=now + 0.3 * torch.randn(ROWS, WIDTH),
            ref_logprobs=now + 0.3 * torch.randn(ROWS, WIDTH),
            exact_kl=torch.rand(ROWS, WIDTH),
            values=torch.randn(ROWS, WIDTH),
        )
        targets, _ = objective.prepare(self.batch, objective.init())
        targets = replace(targets, corrections=torch.rand(ROWS, WIDTH))
        self.targets = targets if to_come else replace(targets, kl_to_come=None)
        self.shares = objective.shares(self.targets.mask, self.targets.weights)

    def leaves(self):
        found = (self.hidden, self.weight, self.bias)
        values = self.objective.value_loss is not None
        return [x for x in (*found, *[self.values] * values) if x.requires_grad]

    def fused(self, **changes):
        ref_hidden, ref_weight = self.reference
        given = {
            "bias": self.bias,
            "temperature": TEMPERATURE,
            "values": self.values,
            "ref_hidden": ref_hidden,
            "ref_weight": ref_weight,
        }
        return head_loss(
            self.objective,
            changes.pop("hidden", self.hidden),
            self.weight,
            changes.pop("labels", self.labels),
            self.batch,
            self.targets,
            self.shares,
            **(given | changes),
        )

    def plain(self):
        """The loss with all logits in memory, in float64, and its gradients."""
        tensors = (self.hidden, self.weight, self.bias, self.values, *self.reference)
        hidden, weight, bias, values, ref_hidden, ref_weight = leaves = wide(*tensors)
        found = logprobs_and_entropy(hidden, weight, self.labels, bias, TEMPERATURE)
        logp = distribution(hidden, weight, bias, TEMPERATURE)
        out = self.objective.loss(
            found[0],
            self.batch,
            self.targets,
            self.shares,
            values=values,
            entropy=found[1],
            exact_kl=kl(logp, distribution(ref_hidden, ref_weight, None, TEMPERATURE)),
        )
        asked = [x for x in leaves[: 4 if self.objective.value_loss else 3] if x.requires_grad]
        return out, torch.autograd.grad(out.loss, asked), found


def assert_same(case, **changes):
    """Loss, gradients, metrics, log-probs and entropies are the plain form's."""
    made, (out, wanted, (logprobs, entropy)) = case.fused(**changes), case.plain()
    assert_close(made.output.loss, out.loss.float())
    assert_same_gradients(torch.autograd.grad(made.output.loss, case.leaves()), wanted)
    got, metrics = reduced(made.output.metrics), reduced(out.metrics)
    assert got.keys() == metrics.keys()
    for name, value in metrics.items():
        assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    mask = case.targets.mask
    assert_close(made.logprobs, torch.where(mask, logprobs, 0.0).float())
    assert_close(made.entropy, torch.where(mask, entropy, 0.0).float())
    assert not made.logprobs.requires_grad and not made.entropy.requires_grad


@pytest.mark.parametrize("chunk", [1, 5, None])
@pytest.mark.parametrize("name", TOKEN_WISE)
def test_one_pass_is_the_loss_of_the_plain_form(name, chunk):
    case = Case(TOKEN_WISE[name])
    assert token_wise(case.objective, case.targets)
    assert_same(case, chunk=chunk)


@pytest.mark.parametrize("chunk", [1, None])
@pytest.mark.parametrize("name", TWO_PASSES)
def test_two_passes_are_the_loss_of_the_plain_form(name, chunk):
    case = Case(TWO_PASSES[name])
    assert not token_wise(case.objective, case.targets)
    assert_same(case, chunk=chunk)


@pytest.mark.parametrize("estimator", ["k3", "exact"])
def test_a_kl_to_come_that_was_not_prepared_needs_two_passes(estimator):
    objective = kl_objective(gradient="sequence", estimator=estimator)
    prepared, case = Case(objective), Case(objective, to_come=False)
    assert token_wise(objective, prepared.targets)
    assert not token_wise(objective, case.targets)
    assert_same(case)


def test_a_filtered_token_is_still_to_come():
    case = Case(kl_objective(gradient="sequence"), to_come=False)
    mask = case.targets.mask.clone()
    mask[0, 2:] = False
    case.targets = replace(case.targets, mask=mask)
    case.shares = case.objective.shares(mask)
    made, (out, wanted, _) = case.fused(), case.plain()
    assert_close(made.output.loss, out.loss.float())
    assert_same_gradients(torch.autograd.grad(made.output.loss, case.leaves()), wanted)


def test_a_kl_in_the_reward_is_no_matter_of_the_loss():
    objective = Objective(kl=KLTerm(where="reward"))
    assert token_wise(objective, Case(objective).targets)
    assert not token_wise(replace(objective, surrogate=GSPO.surrogate), Case(objective).targets)


@pytest.mark.parametrize("name", ["klamp", "entropy", "exact and entropy"])
def test_a_frozen_head(name):
    case = Case(TOKEN_WISE[name], frozen=True)
    assert_same(case)
    assert case.weight.grad is None


def test_one_pass_makes_logits_once_and_only_of_tokens_that_count(monkeypatch):
    made = []
    unclipped = ClippedSurrogate(low=0.99, high=99.0, ratio="sequence")
    for objective in (TOKEN_WISE["klamp"], replace(GSPO, surrogate=unclipped)):
        case = Case(objective)
        counted = CountedProducts(monkeypatch)
        case.fused(chunk=1).output.loss.backward()
        made.append(counted.made)
    assert made == [4 * 13, 2 * 4 * 13]  # 4 tiles, 13 tokens; every block has a row


@pytest.mark.parametrize("objective", [TOKEN_WISE["exact and entropy"], GSPO], ids=["one", "two"])
def test_junk_at_masked_positions_reaches_nothing(objective):
    case = Case(objective)
    mask = case.batch.mask
    clean = case.fused()
    wanted = torch.autograd.grad(clean.output.loss, case.leaves())
    junk = torch.where(mask[..., None], case.hidden.detach(), torch.nan).requires_grad_()
    ref_hidden = torch.where(mask[..., None], case.reference[0], torch.inf)
    labels = torch.where(mask, case.labels, -100)
    made = case.fused(hidden=junk, labels=labels, ref_hidden=ref_hidden)
    assert_close(made.output.loss, clean.output.loss)
    assert_close(made.logprobs, clean.logprobs)
    assert (made.logprobs[~mask] == 0).all() and (made.entropy[~mask] == 0).all()
    got = torch.autograd.grad(made.output.loss, [junk, *case.leaves()[1:]])
    assert (got[0][~mask] == 0).all()
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b)


def test_a_token_without_a_share_is_reported_but_teaches_nothing():
    case = Case(TOKEN_WISE["klamp"])
    case.shares = case.shares.clone()
    case.shares[0] = 0.0
    assert_same(case)
    with torch.no_grad():
        case.hidden[0, 1] = torch.nan
    made = case.fused()
    by_hidden, by_weight = torch.autograd.grad(made.output.loss, (case.hidden, case.weight))
    assert made.logprobs[0, 1].isnan() and made.logprobs[0, 0] < 0
    assert (by_hidden[0] == 0).all() and by_weight.isfinite().all()


@pytest.mark.parametrize("name", ["klamp", "exact and entropy", "REINFORCE with values"])
def test_nothing_to_learn_from_is_a_zero_that_has_its_graph(name):
    case = Case(TOKEN_WISE[name])
    case.shares = torch.zeros_like(case.shares)
    case.targets = replace(case.targets, mask=torch.zeros_like(case.targets.mask))
    made = case.fused()
    assert made.output.loss == 0
    assert reduced(made.output.metrics)["actor/pg_loss"] == 0
    for g in torch.autograd.grad(made.output.loss, case.leaves()):
        assert (g == 0).all()


@pytest.mark.parametrize("objective", [TOKEN_WISE["klamp"], GSPO], ids=["one", "two"])
def test_gradients_scale_with_what_comes_back(objective):
    case = Case(objective)
    once = torch.autograd.grad(case.fused().output.loss, case.leaves())
    scaled = torch.autograd.grad(-2.5 * case.fused().output.loss, case.leaves())
    assert_same_gradients(scaled, [-2.5 * g for g in once])


def test_a_weight_that_is_also_the_embedding_gets_both_gradients():
    case = Case(TOKEN_WISE["klamp"])
    out = case.fused(hidden=case.weight[case.labels].tanh()).output
    (got,) = torch.autograd.grad(out.loss, case.weight)
    weight, bias = wide(case.weight, case.bias)
    given = (weight[case.labels].tanh(), weight, case.labels, bias, TEMPERATURE)
    logprobs, entropy = logprobs_and_entropy(*given)
    rest = (case.batch, case.targets, case.shares)
    plain = case.objective.loss(logprobs, *rest, entropy=entropy)
    assert_same_gradients([got], torch.autograd.grad(plain.loss, weight))


def test_a_bfloat16_model():
    case = Case(TOKEN_WISE["klamp"])
    for name in ("hidden", "weight", "bias"):
        setattr(case, name, getattr(case, name).detach().bfloat16().requires_grad_())
    made, (out, wanted, _) = case.fused(), case.plain()
    assert_close(made.output.loss, out.loss.float())  # no rounding but that of the inputs
    got = torch.autograd.grad(made.output.loss, case.leaves())
    assert all(g.dtype == torch.bfloat16 for g in got)
    assert_same_gradients(got, wanted, tolerance=2**-8)


@pytest.mark.parametrize("name", ["klamp", "exact"])
def test_without_gradients_there_is_the_loss_alone(name, monkeypatch):
    case = Case(TOKEN_WISE[name])
    counted = CountedProducts(monkeypatch)
    monkeypatch.delattr(passes, "slope")  # what every gradient goes through
    with torch.no_grad():
        made = case.fused()
    assert not made.output.loss.requires_grad
    assert counted.made == (4 if name == "klamp" else 8)
    assert_close(made.output.loss, case.plain()[0].loss.detach().float())


def test_a_second_backward_of_one_pass_is_refused():
    loss = Case(TOKEN_WISE["klamp"]).fused().output.loss
    loss.backward(retain_graph=True)
    with pytest.raises(NumericsError, match="handed over in its first backward; call it again"):
        loss.backward()


def test_what_is_refused():
    case = Case(TOKEN_WISE["exact"])
    with pytest.raises(DataError, match="got ref_hidden=None or ref_weight=None"):
        case.fused(ref_hidden=None)
    with pytest.raises(DataError, match="labels go from -1 to"):
        case.fused(labels=torch.where(case.labels == case.labels[0, 0], -1, case.labels))
    case = Case(TOKEN_WISE["REINFORCE with values"])
    with pytest.raises(DataError, match="needs values and returns but loss got values=None"):
        case.fused(values=None)


def test_labels_of_another_width_are_refused(as_users_run_it):
    case = Case(TOKEN_WISE["klamp"])
    with pytest.raises(DataError, match=r"labels \[4, 4\] but Batch.mask has \[4, 5\]"):
        case.fused(labels=case.labels[:, :4])
