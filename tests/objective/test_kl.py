"""KLTerm: its clamps, its refusals, and what it counts. Expectations are in test_kl_enumeration."""

from dataclasses import replace

import pytest
import torch

from helpers import assert_close, make_batch, tensor
from klamp.errors import ConfigError, DataError
from klamp.objective.kl import KLTerm
from klamp.types import Batch


def one_row(d, **changes):
    """A batch of one sequence whose log π − log ref is d, and its log-probs as a leaf."""
    logprobs = torch.tensor([d]) - 1.0
    batch = Batch(
        mask=torch.ones(1, len(d), dtype=torch.bool),
        scores=torch.zeros(1),
        groups=torch.zeros(1, dtype=torch.long),
        old_logprobs=logprobs,
        ref_logprobs=torch.full((1, len(d)), -1.0),
    )
    return replace(batch, **changes), logprobs.clone().requires_grad_()


def value_and_gradient(term, d, **changes):
    batch, leaf = one_row(d, **changes)
    tokens = term(leaf, batch, batch.mask)
    (grad,) = torch.autograd.grad(tokens.term.sum(), leaf)
    return tokens.term.detach(), grad, tokens.clamped


D = [0.5, -0.5, 30.0, -30.0, 200.0, -200.0]


def test_open_instruct_clamps_the_log_ratio():
    value, grad, clamped = value_and_gradient(KLTerm(clamp_log_ratio=40.0), D)
    d = torch.tensor([D]).clamp(-40, 40)
    assert_close(value, torch.expm1(-d) + d)
    assert clamped.tolist() == [[False, False, False, False, True, True]]
    assert grad[0, 4:].tolist() == [0.0, 0.0]
    assert grad[0, 3].item() == pytest.approx(1 - torch.tensor(30.0).exp().item(), rel=1e-5)


def test_openrlhf_clamps_the_value_and_its_gradient_vanishes_where_drift_is_largest():
    for estimator in ("k1", "k2", "k3"):
        value, grad, _ = value_and_gradient(KLTerm(estimator=estimator, clamp_value=10.0), D)
        assert value.abs().max().item() == pytest.approx(10.0, rel=1e-6)
        assert grad[0, 2:].abs().max() == 0 if estimator != "k3" else grad[0, 3:].abs().max() == 0
        assert grad.isfinite().all()  # upstream's is NaN at −200


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "k3_reversed"])
@pytest.mark.parametrize("clamp", [{"clamp_log_ratio": 2.0}, {"clamp_value": 5.0}])
def test_pass_keeps_the_value_and_gives_the_derivative_at_the_edge(estimator, clamp):
    zero = KLTerm(estimator=estimator, **clamp)
    passed = replace(zero, clamp_gradient="pass")
    low, high = zero.bounds[estimator]
    found, grad, clamped = value_and_gradient(passed, [low - 100, high + 100, 0.3])
    at_edge, edge_grad, _ = value_and_gradient(KLTerm(estimator=estimator), [low, high, 0.3])
    assert clamped.tolist() == [[True, True, False]]
    assert_close(found, at_edge)
    assert_close(grad, edge_grad)
    assert value_and_gradient(zero, [low - 100, high + 100, 0.3])[1][0, :2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("form", ["token", "sequence"])
def test_a_clamped_token_is_pulled_back_by_the_clamped_log_ratio(form):
    term = KLTerm(estimator="k1", gradient=form, clamp_log_ratio=5.0, clamp_gradient="pass")
    _, grad, _ = value_and_gradient(term, [100.0, -100.0])
    # k1 now (±5), k3 of the clamped −5 to come for the first: e⁵ − 1 − 5
    to_come = torch.tensor(5.0).expm1().item() - 5.0 if form == "sequence" else 0.0
    assert_close(grad, tensor([5.0 + to_come, -5.0]))
    stopped = replace(term, clamp_gradient="zero")
    assert_close(value_and_gradient(stopped, [100.0, -100.0])[1], tensor([to_come, 0.0]))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "k3_reversed"])
@pytest.mark.parametrize("form", ["token", "sequence"])
def test_without_a_clamp_the_pull_does_not_vanish_where_the_value_would_overflow(estimator, form):
    _, grad, _ = value_and_gradient(KLTerm(estimator=estimator, gradient=form), [-70.0])
    assert grad.item() == -70.0


def test_a_bounded_coefficient_is_counted():
    term = KLTerm(gradient="sequence", clamp_to_come=2.0, weighting="importance")
    batch, leaf = one_row([0.0, -10.0, 0.1])
    tokens = term(leaf, batch, batch.mask)
    assert tokens.clamped.tolist() == [[False, False, False]]
    assert tokens.bounded.tolist() == [[True, False, False]]  # k3 of −10 is to come after it
    off = replace(batch, old_logprobs=batch.old_logprobs - 25.0)  # a prefix 25 nats likelier
    assert term(leaf, off, batch.mask).bounded.tolist() == [[True, True, True]]


def test_the_sum_to_come_is_bounded():
    term = KLTerm(gradient="sequence", clamp_to_come=2.0)
    _, grad, _ = value_and_gradient(term, [0.0, -10.0])
    assert grad[0, 0].item() == pytest.approx(2.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    batch, leaf = one_row([-15.0, 0.5])
    leaf = leaf.detach().to(dtype).requires_grad_()
    half = replace(batch, ref_logprobs=batch.ref_logprobs.to(dtype))
    tokens = KLTerm(estimator="k3")(leaf, half, half.mask)
    assert tokens.term.dtype == torch.float32
    assert tokens.term[0, 0].item() == pytest.approx(torch.tensor(15.0).exp().item(), rel=1e-4)
    tokens.term.sum().backward()
    assert leaf.grad.dtype == dtype
    assert leaf.grad.isfinite().all()  # −3.3e6 does not fit a float16: it saturates


def test_to_come_is_the_siblings_centred_sum_and_only_the_sequence_form_has_it():
    batch = make_batch()
    assert KLTerm(gradient="token").to_come(batch) is None
    assert KLTerm(where="reward").to_come(batch) is None
    sums = KLTerm(gradient="sequence").to_come(batch)
    assert sums.shape == batch.mask.shape
    assert (sums[~batch.mask] == 0).all()


def test_a_batch_of_one_has_no_baseline():
    batch, _ = one_row([0.0, -1.0, 2.0])
    d = torch.tensor([-1.0, 2.0])
    k3 = torch.expm1(-d) + d
    wanted = tensor([k3.sum().item(), k3[1].item(), 0.0])
    assert_close(KLTerm(gradient="sequence").to_come(batch), wanted)


def test_a_missing_reference_or_exact_kl_says_what_to_give():
    batch, leaf = one_row([0.0])
    with pytest.raises(DataError, match=r"ref_logprobs is None; give the reference's log-probs"):
        KLTerm()(leaf, replace(batch, ref_logprobs=None), batch.mask)
    with pytest.raises(DataError, match=r"needs exact_kl, got None; give Batch.exact_kl"):
        KLTerm(estimator="exact")(leaf, batch, batch.mask)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"estimator": "k9"}, r"KLTerm.estimator must be one of k1, k2, k3, abs.*got 'k9'"),
        ({"gradient": "exact"}, r"KLTerm.gradient must be one of value, token, sequence"),
        ({"weighting": "is"}, r"KLTerm.weighting must be one of None, importance, got 'is'"),
        ({"clamp_value": 0.0}, r"KLTerm.clamp_value must be .* > 0, got 0.0; None turns it off"),
        ({"clamp_log_ratio": float("nan")}, r"clamp_log_ratio must be a finite number"),
        ({"watch_reduction": "mean"}, r"KLTerm.watch_reduction must be one of sequence_sum"),
        ({"where": "reward", "gradient": "token"}, r"where='reward'\) takes no gradient"),
        ({"estimator": "exact", "weighting": "importance"}, r"no sampled token to weigh"),
    ],
)
def test_wrong_settings_are_refused_when_built(settings, message):
    with pytest.raises(ConfigError, match=message):
        KLTerm(**settings)


def test_none_as_yaml_spells_it_is_none():
    assert KLTerm(weighting="none") == KLTerm()
