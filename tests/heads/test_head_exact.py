"""The KL of two heads over the full vocabulary: that of the plain form, with its gradients."""

import pytest
import torch
from plain_head import (
    CountedProducts,
    LargestTensor,
    assert_same_gradients,
    distribution,
    kl,
    small_tiles,
    wide,
)

from helpers import assert_close
from klamp.errors import DataError
from klamp.heads import tiles
from klamp.heads.exact import head_kl, head_kl_sum
from klamp.objective.exact import exact_kl

ROWS, WIDTH, FEATURES, VOCABULARY = 3, 4, 6, 29


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch):
    small_tiles(monkeypatch)


def inputs(ref_features=4):
    hidden = torch.randn(ROWS, WIDTH, FEATURES, requires_grad=True)
    weight = torch.randn(VOCABULARY, FEATURES, requires_grad=True)
    reference = torch.randn(ROWS, WIDTH, ref_features), torch.randn(VOCABULARY, ref_features)
    return hidden, weight, *reference


def weighted(form, given, weights, **settings):
    """∑ weight · KL by either form, and the KL of each token."""
    if form is head_kl_sum:
        return form(*given, weights, **settings)
    found = form(*given, **settings)
    return (found * weights).sum(), found.detach()


both = pytest.mark.parametrize("form", [head_kl, head_kl_sum])


@both
@pytest.mark.parametrize("chunk", [1, 5, None])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_of_the_plain_form(form, chunk, temperature):
    given, weights = inputs(), torch.randn(ROWS, WIDTH)
    bias, ref_bias = torch.randn(2, VOCABULARY)
    bias.requires_grad_()
    settings = {"bias": bias, "ref_bias": ref_bias, "temperature": temperature, "chunk": chunk}
    total, found = weighted(form, given, weights, **settings)
    leaves = wide(*given, bias, ref_bias)
    logp = distribution(leaves[0], leaves[1], leaves[4], temperature)
    plain = kl(logp, distribution(leaves[2], leaves[3], leaves[5], temperature))
    assert_close(found, plain.float())
    assert_close(total, (plain * weights).sum().float())
    assert_same_gradients(
        torch.autograd.grad(total, (*given[:2], bias)),
        torch.autograd.grad((plain * weights).sum(), (leaves[0], leaves[1], leaves[4])),
    )


@both
def test_agrees_with_the_exact_kl_of_the_objective(form):
    given = inputs()
    ones = torch.ones(ROWS, WIDTH)
    _, found = weighted(form, given, ones)
    logp, logq = distribution(*given[:2]), distribution(*given[2:])
    assert_close(found, exact_kl(logp, logq).detach())


@both
def test_a_head_has_no_kl_to_itself_and_no_gradient(form):
    hidden, weight, *_ = inputs()
    total, found = weighted(form, (hidden, weight, hidden, weight), torch.ones(ROWS, WIDTH))
    assert_close(found, torch.zeros(ROWS, WIDTH))
    for g in torch.autograd.grad(total, (hidden, weight)):
        assert_close(g, torch.zeros_like(g))


@both
def test_the_reference_gets_no_gradient(form):
    given = [x.detach().requires_grad_() for x in inputs()]
    weighted(form, given, torch.ones(ROWS, WIDTH))[0].backward()
    assert given[0].grad.abs().sum() > 0
    assert given[2].grad is None and given[3].grad is None


@both
def test_a_vocabulary_that_is_padded_in_both(form):
    given, weights = inputs(), torch.rand(ROWS, WIDTH)
    padding = torch.zeros(VOCABULARY)
    padding[17:] = -torch.inf
    total, found = weighted(form, given, weights, bias=padding, ref_bias=padding)
    leaves = wide(*given)
    logp = distribution(leaves[0], leaves[1][:17])
    plain = kl(logp, distribution(leaves[2], leaves[3][:17]))
    assert_close(found, plain.float())
    assert_same_gradients(
        torch.autograd.grad(total, given[:2]),
        torch.autograd.grad((plain * weights).sum(), leaves[:2]),
    )


@both
def test_tokens_that_the_reference_cannot_produce_count_for_1e15_at_most(form):
    given = inputs()
    padding = torch.zeros(VOCABULARY)
    padding[1:] = -torch.inf
    settings = {"ref_bias": padding, "temperature": 0.1}
    total, found = weighted(form, given, torch.ones(ROWS, WIDTH), **settings)
    assert found.max() == 1e15 and (found > 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(total, given[:2]))


@both
def test_large_logits_cost_no_precision(form):
    given = [x.detach().round() for x in inputs()]  # whole numbers: logits are exact
    given = (*(x.requires_grad_() for x in given[:2]), *given[2:])
    tops = {"bias": torch.full((VOCABULARY,), 10000.0), "ref_bias": torch.full((VOCABULARY,), -7e3)}
    total, found = weighted(form, given, torch.ones(ROWS, WIDTH), **tops)
    leaves = wide(*given)
    plain = kl(distribution(*leaves[:2]), distribution(*leaves[2:]))  # a softmax knows no shift
    assert_close(found, plain.float())
    assert_same_gradients(
        torch.autograd.grad(total, given[:2]), torch.autograd.grad(plain.sum(), leaves[:2])
    )


@both
def test_junk_at_a_position_of_no_weight_stays_there(form):
    given, weights = inputs(), torch.rand(ROWS, WIDTH)
    weights[1, 2] = weights[0, 0] = 0.0
    junk = torch.where(weights[..., None] == 0, torch.nan, given[0].detach()).requires_grad_()
    wanted, _ = weighted(form, given, weights)
    if form is head_kl_sum:
        total, found = head_kl_sum(junk, *given[1:], weights)
        assert found[1, 2] == 0
        assert_close(total, wanted)
    else:
        found = torch.where(weights == 0, 0.0, head_kl(junk, *given[1:]))
        total = (found * weights).sum()
    got = torch.autograd.grad(total, (junk, given[1]))
    assert got[0][1, 2].eq(0).all()
    for a, b in zip(got, torch.autograd.grad(wanted, given[:2]), strict=True):
        assert_close(a, b)


def test_the_sum_makes_each_logits_once_and_scales_with_what_comes_back(monkeypatch):
    given, weights = inputs(), torch.rand(ROWS, WIDTH)
    counted = CountedProducts(monkeypatch)
    total, _ = head_kl_sum(*given, weights)
    got = torch.autograd.grad(3.0 * total, given[:2])
    assert counted.made == 2 * len(tiles.columns_of(VOCABULARY, ROWS * WIDTH))
    wanted = torch.autograd.grad((head_kl(*given) * weights).sum(), given[:2])
    assert_same_gradients(got, [3.0 * g for g in wanted])


def test_no_tensor_of_tokens_times_vocabulary(monkeypatch):
    small_tiles(monkeypatch, columns=64)
    hidden = torch.randn(40, FEATURES, requires_grad=True)
    weight = torch.randn(640, FEATURES, requires_grad=True)
    with LargestTensor() as largest:
        head_kl(hidden, weight, hidden.detach(), weight.detach() + 1).sum().backward()
        head_kl_sum(hidden, weight, hidden, weight.detach(), torch.ones(40), chunk=5)[0].backward()
    assert largest.numel == weight.numel() < 40 * 640 / 6


@both
def test_no_rows(form):
    hidden, weight = torch.randn(0, 3, requires_grad=True), torch.randn(9, 3, requires_grad=True)
    total, found = weighted(form, (hidden, weight, hidden, weight), torch.ones(0))
    assert found.shape == (0,) and total == 0
    total.backward()
    assert (weight.grad == 0).all()


def test_what_is_refused(as_users_run_it):
    hidden, weight, ref_hidden, ref_weight = inputs()
    with pytest.raises(DataError, match="the reference has 12 positions and 28 tokens"):
        head_kl(hidden, weight, ref_hidden, ref_weight[:-1])
    with pytest.raises(DataError, match="ref_hidden has 4 features but its weight is"):
        head_kl(hidden, weight, ref_hidden, ref_weight[:, :-1])
