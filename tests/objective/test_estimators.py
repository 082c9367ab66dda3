import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers import assert_close, tensor
from klamp.objective.estimators import (
    ESTIMATORS,
    OF_LOG_RATIO,
    clamped_estimate,
    k1,
    k2,
    k3,
    k3_reversed,
    value_bounds,
)

LOG2 = math.log(2.0)
PLAIN = {  # as they are defined, without a thought for overflow
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: (-d).exp() - 1 + d,
    "abs": lambda d: d.abs(),
    "k3_reversed": lambda d: d.exp() - 1 - d,
}
each_estimator = pytest.mark.parametrize("name", ESTIMATORS)


@pytest.mark.parametrize(
    ("name", "at_log_2", "at_minus_log_2"),
    [
        ("k1", LOG2, -LOG2),
        ("k2", LOG2**2 / 2, LOG2**2 / 2),
        ("k3", LOG2 - 0.5, 1 - LOG2),  # ½ − 1 + log 2, 2 − 1 − log 2
        ("abs", LOG2, LOG2),
        ("k3_reversed", 1 - LOG2, LOG2 - 0.5),  # 2 − 1 − log 2, ½ − 1 + log 2
    ],
)
def test_each_estimator_by_hand(name, at_log_2, at_minus_log_2):
    logp, ref = tensor([-1.0, -3.0]), tensor([-1.0 - LOG2, -3.0 + LOG2])
    assert_close(ESTIMATORS[name](logp, ref), tensor([at_log_2, at_minus_log_2]))


@each_estimator
def test_equal_policies_have_no_divergence(name):
    logp = -torch.rand(2, 5)
    assert (ESTIMATORS[name](logp, logp) == 0).all()


def test_the_expectation_of_k1_and_k3_is_the_kl_and_that_of_k3_reversed_is_not():
    logp, ref = torch.randn(2, 1, 6, dtype=torch.float64).log_softmax(-1)
    p, true_kl = logp.exp(), (logp.exp() * (logp - ref)).sum()
    assert_close((p * k1(logp, ref)).sum(), true_kl)
    assert_close((p * k3(logp, ref)).sum(), true_kl)
    chi_squared = (p * (logp - ref).exp()).sum() - 1
    assert_close((p * k3_reversed(logp, ref)).sum(), chi_squared - true_kl)


def test_k3_is_never_negative_and_k1_is_sometimes():
    logp, ref = -3 * torch.rand(2, 4, 50)
    assert (k3(logp, ref) >= 0).all()
    assert (k1(logp, ref) < 0).any()


def test_k2_and_k3_keep_precision_when_the_policies_nearly_agree():
    logp = torch.full((1, 1), -2.0)
    # ½·(1e-4)² = 5e-9; a literal exp(x) − 1 − x would round to 0 or to 4e-8 in float32
    assert k3(logp, logp + 1e-4).item() == pytest.approx(5e-9, rel=0.05)
    assert k2(logp, logp + 1e-4).item() == pytest.approx(5e-9, rel=0.05)


@each_estimator
@pytest.mark.parametrize("d", [1e4, -1e4, 1e30, -1e30])
def test_values_and_gradients_are_finite_however_far_apart(name, d):
    logp = tensor([d]).requires_grad_()
    value = ESTIMATORS[name](logp, tensor([0.0]))
    assert value.isfinite().all()
    assert torch.autograd.grad(value.sum(), logp)[0].isfinite().all()


@each_estimator
@pytest.mark.parametrize("clamp", [1e-3, 1.0, 10.0, 1e4])
def test_at_its_bounds_an_estimator_reaches_the_clamp(name, clamp):
    low, high = value_bounds(name, clamp)
    assert low < 0 < high
    found = OF_LOG_RATIO[name](torch.tensor([low, high], dtype=torch.float64))
    sign = -1.0 if name == "k1" else 1.0
    assert_close(found, torch.tensor([sign * clamp, clamp], dtype=torch.float64))


@each_estimator
def test_without_a_clamp_only_what_would_overflow_is_bounded(name):
    low, high = value_bounds(name, None)
    assert (low > -1e3) == (name == "k3")
    assert (high < 1e3) == (name == "k3_reversed")
    bounds = torch.tensor([low, high], dtype=torch.float32)
    assert (OF_LOG_RATIO[name](bounds) * math.exp(20.0)).isfinite().all()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.sampled_from(list(ESTIMATORS)),
    st.floats(0.01, 100.0),
    st.lists(st.floats(-50, 50), min_size=1, max_size=6),
)
def test_clamping_the_log_ratio_is_clamping_the_value(name, clamp, values):
    """The same numbers and the same gradient, wherever the plain form is finite."""
    d = torch.tensor([values], dtype=torch.float64)
    at_the_edge = (PLAIN[name](d).abs() - clamp).abs() < 1e-6 * (1 + clamp)
    assume(not at_the_edge.any())
    ref, found = torch.full_like(d, -2.0), []
    for estimate in (
        lambda p: clamped_estimate(name, p, ref, clamp_value=clamp),
        lambda p: PLAIN[name](p - ref).clamp(-clamp, clamp),
    ):
        logp = (ref + d).requires_grad_()
        value = estimate(logp)
        found.append((value.detach(), torch.autograd.grad(value.sum(), logp)[0]))
    assert_close(found[0][0], found[1][0])
    assert_close(found[0][1], found[1][1])


def test_a_clamped_value_is_finite_where_the_plain_one_is_not():
    logp = tensor([-1e4, -95.0]).requires_grad_()
    value = clamped_estimate("k3", logp, tensor([0.0, 0.0]), clamp_value=10.0)
    assert_close(value.detach(), tensor([10.0, 10.0]))
    assert (torch.autograd.grad(value.sum(), logp)[0] == 0).all()  # and not NaN
