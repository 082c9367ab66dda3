"""Is E[value] the KL, is E[gradient] its gradient? By enumeration of all 3-token sequences."""

from dataclasses import replace

import pytest
import torch
from tabular import (
    LENGTH,
    SEQUENCES,
    batch_of,
    conditional_kl,
    logprobs_of,
    random_logits,
    sequence_kl,
    sum_of_conditional_kls,
)

from klamp.objective.exact import exact_kl
from klamp.objective.kl import KLTerm

UNBIASED = {"k1", "k3", "exact"}


@pytest.fixture
def tables():
    """Policy, sampling policy and reference."""
    return random_logits().requires_grad_(), random_logits(), random_logits()


def expectation(term, logits, sampled_from, ref_logits, to_come=None):
    """E over sequences of the sum over tokens, as a function of the logits; sampling fixed."""
    weight = logprobs_of(sampled_from).sum(1).exp().detach()
    batch = batch_of(sampled_from, ref_logits)
    tokens = term(
        logprobs_of(logits),
        batch,
        batch.mask,
        to_come=to_come,
        exact_kl=conditional_kl(logits, ref_logits),
    ).term
    return (weight[:, None] * tokens).sum()


def gradient(value, logits):
    return torch.autograd.grad(value, logits)[0]


def relative_error(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "k3_reversed", "exact"])
@pytest.mark.parametrize("form", ["value", "token", "sequence"])
def test_the_expected_value_is_the_kl_where_the_estimator_claims_it(tables, estimator, form):
    logits, _, ref = tables
    value = expectation(KLTerm(estimator=estimator, gradient=form), logits, logits, ref)
    bias = abs(value - sequence_kl(logits, ref)).item()
    assert bias < 1e-6 if estimator in UNBIASED else bias > 1e-2


def test_k3_reversed_estimates_chi_squared_less_kl():
    """One token: E_π[eᵈ − 1 − d] = ∑ π²/ref − 1 − KL."""
    p, q = torch.randn(2, 5, dtype=torch.float64).softmax(-1)
    chi_squared = (p * p / q).sum() - 1
    kl = (p * (p / q).log()).sum()
    value = KLTerm(estimator="k3_reversed")
    batch = replace_logprobs(p.log(), q.log())
    found = (p * value(p.log()[:, None], batch, batch.mask).term[:, 0]).sum()
    assert abs(found - (chi_squared - kl)) < 1e-12


def replace_logprobs(logp, ref):
    batch = batch_of(random_logits(), random_logits()).select(slice(0, len(logp)))
    column = torch.ones(len(logp), 1, dtype=torch.bool)
    changed = {"mask": column, "old_logprobs": logp[:, None], "ref_logprobs": ref[:, None]}
    return replace(batch, exact_kl=None, **changed)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "exact"])
def test_the_token_form_has_the_gradient_of_the_conditional_kls(tables, estimator):
    logits, _, ref = tables
    wanted = gradient(sum_of_conditional_kls(logits, ref), logits)
    term = KLTerm(estimator=estimator, gradient="token")
    found = gradient(expectation(term, logits, logits, ref), logits)
    assert relative_error(found, wanted) < 1e-6


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_reversed", "exact"])
def test_the_sequence_form_has_the_gradient_of_the_kl_of_the_response(tables, estimator):
    logits, _, ref = tables
    wanted = gradient(sequence_kl(logits, ref), logits)
    term = KLTerm(estimator=estimator, gradient="sequence")
    found = gradient(expectation(term, logits, logits, ref), logits)
    assert relative_error(found, wanted) < 1e-6


@pytest.mark.parametrize("form", ["token", "sequence"])
@pytest.mark.parametrize("estimator", ["k1", "k3", "exact"])
def test_importance_weights_make_both_forms_exact_off_policy(tables, estimator, form):
    logits, old, ref = tables
    kl = {"token": sum_of_conditional_kls, "sequence": sequence_kl}[form](logits, ref)
    wanted = gradient(kl, logits)
    plain = KLTerm(estimator=estimator, gradient=form)
    weighted = replace(plain, weighting="importance")
    assert abs(expectation(weighted, logits, old, ref) - sequence_kl(logits, ref)) < 1e-6
    assert relative_error(gradient(expectation(weighted, logits, old, ref), logits), wanted) < 1e-6
    assert relative_error(gradient(expectation(plain, logits, old, ref), logits), wanted) > 0.05


@pytest.mark.parametrize(
    ("estimator", "one_token", "sequence"),
    [("k1", "biased", "biased"), ("k2", "exact", "biased"), ("k3", "biased", "biased")],
)
def test_what_autograd_through_the_value_gives(tables, estimator, one_token, sequence):
    logits, _, ref = tables
    found = gradient(expectation(KLTerm(estimator=estimator), logits, logits, ref), logits)
    for kl, claim in ((sum_of_conditional_kls, one_token), (sequence_kl, sequence)):
        error = relative_error(found, gradient(kl(logits, ref), logits))
        assert error < 1e-6 if claim == "exact" else error > 0.05


def test_k1_as_a_loss_has_no_expected_gradient(tables):
    logits, _, ref = tables
    found = gradient(expectation(KLTerm(estimator="k1"), logits, logits, ref), logits)
    assert found.abs().max() < 1e-12


def test_the_token_ratio_makes_a_single_token_exact_off_policy():
    """open-instruct's fourth estimator: E_old[ρ·d] = KL and its gradient that of the KL."""
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    old, ref = torch.randn(2, 5, dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    kl = (logp.exp() * (logp - ref)).sum()
    batch = replace_logprobs(old, ref)
    term = KLTerm(estimator="k1", weighting="importance")
    found = (old.exp()[:, None] * term(logp[:, None], batch, batch.mask).term).sum()
    assert abs(found - kl) < 1e-9
    wanted = torch.autograd.grad(kl, logits, retain_graph=True)[0]
    assert relative_error(gradient(found, logits), wanted) < 1e-9


@pytest.mark.parametrize("estimator", ["k3", "exact"])
@pytest.mark.parametrize("weighting", [None, "importance"])
def test_the_siblings_baseline_adds_no_bias(tables, estimator, weighting):
    """All pairs of two samples of one prompt: the second is the first one's baseline."""
    logits, old, ref = tables
    old = old if weighting else logits.detach()
    n = len(SEQUENCES)
    own, other = (
        x.flatten() for x in torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    )
    batch = batch_of(old, ref, repeat=torch.stack([own, other], dim=1).flatten())
    batch = replace(batch, groups=torch.arange(2 * n * n) // 2)
    term = KLTerm(estimator=estimator, gradient="sequence", weighting=weighting)
    to_come = term.to_come(batch)
    p = logprobs_of(old).sum(1).exp().detach()
    rows = torch.arange(0, 2 * n * n, 2)  # the first of each pair
    tokens = term(
        logprobs_of(logits)[own],
        batch.select(rows),
        batch.mask[rows],
        to_come=to_come[rows],
        exact_kl=conditional_kl(logits, ref)[own],
    ).term
    found = gradient(((p[own] * p[other])[:, None] * tokens).sum(), logits)
    assert relative_error(found, gradient(sequence_kl(logits, ref), logits)) < 1e-6
    assert to_come.abs().max() > 0.1  # there was a baseline to be biased by


def test_a_baseline_that_sees_its_own_sample_would_show(tables):
    """The test above can fail: centre by a mean that includes the own sum."""
    logits, _, ref = tables
    batch = batch_of(logits.detach(), ref)
    term = KLTerm(gradient="sequence")
    own = term.to_come(replace(batch, groups=torch.zeros(len(SEQUENCES), dtype=torch.long)))
    found = gradient(expectation(term, logits, logits, ref, to_come=0.5 * own), logits)
    assert relative_error(found, gradient(sequence_kl(logits, ref), logits)) > 0.05


def test_a_clamp_that_never_binds_changes_nothing_and_one_that_does_shows_its_bias(tables):
    logits, _, ref = tables
    wanted = gradient(sequence_kl(logits, ref), logits)

    def error(**clamps):
        term = KLTerm(gradient="sequence", **clamps)
        return relative_error(gradient(expectation(term, logits, logits, ref), logits), wanted)

    assert error(clamp_log_ratio=20.0, clamp_to_come=50.0, clamp_gradient="pass") < 1e-6
    assert error(clamp_log_ratio=0.5, clamp_gradient="pass") > 0.05
    assert error(clamp_log_ratio=0.5, clamp_gradient="zero") > 0.05


def test_exact_kl_from_full_log_probs_is_the_enumerated_one():
    logits, ref = torch.randn(2, 4, LENGTH, 7, dtype=torch.float64)
    logits.requires_grad_()
    p, q = logits.log_softmax(-1), ref.log_softmax(-1)
    wanted = (p.exp() * (p - q)).sum(-1)
    found = exact_kl(p, q, chunk=5)
    assert (found - wanted).abs().max() < 1e-12
    weights = torch.randn(4, LENGTH, dtype=torch.float64)
    by_hand = gradient((weights * wanted).sum(), logits)
    p = logits.log_softmax(-1)
    assert (
        gradient((weights * exact_kl(p, q, chunk=5)).sum(), logits) - by_hand
    ).abs().max() < 1e-12
