import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import assert_close, prefix_mask, tensor
from klamp.objective.logratio import (
    excess,
    log_ratio,
    own_ratio,
    prefix_ratios,
    ratio,
    straight_through,
    widen,
)

NAN, INF = float("nan"), float("inf")
ON = torch.ones(1, 3, dtype=torch.bool)
quick = settings(max_examples=50, deadline=None, derandomize=True)
junk = st.sampled_from([NAN, INF, -INF, 1e30, -1e30, 3e38, 0.0])

USES = {
    "log_ratio": lambda p, q, m: log_ratio(p, q, m).value,
    "clamped": lambda p, q, m: log_ratio(p, q, m, bounds=(-1.0, 1.0)).value,
    "pass": lambda p, q, m: log_ratio(p, q, m, bounds=(-1.0, 1.0), gradient="pass").value,
    "ratio": lambda p, q, m: ratio(log_ratio(p, q, m).value),
    "own_ratio": own_ratio,
    "excess": lambda p, q, m: excess(log_ratio(p, q, m).value),
}


@quick
@given(
    st.sampled_from(list(USES)),
    st.lists(st.tuples(junk, junk), min_size=4, max_size=4),
    st.integers(0, 15),
)
def test_what_is_masked_reaches_neither_value_nor_gradient(use, dirt, bits):
    mask = torch.tensor([[bool(bits >> i & 1) for i in range(4)]])
    logp, ref = tensor([-1.0, -5.0, -0.5, -2.0]), tensor([-1.5, -1.0, -2.0, -2.0])
    found = []
    for dirty in (False, True):
        p, q = (
            torch.where(mask, x, torch.tensor([pair[i] for pair in dirt])) if dirty else x.clone()
            for i, x in enumerate((logp, ref))
        )
        p.requires_grad_(), q.requires_grad_()
        value = USES[use](p, q, mask)
        found.append((value.detach(), *torch.autograd.grad(value.sum(), (p, q))))
    for clean, dirty in zip(*found, strict=True):
        assert_close(dirty, clean)
    assert (found[1][1][~mask] == 0).all()


def test_the_clamp_by_hand():
    p, q = tensor([-1.0, -1.0, -1.0]), tensor([-4.0, -1.5, 2.0])  # d = 3, 0.5, −3
    found = log_ratio(p, q, ON, bounds=(-2.0, 1.0))
    assert_close(found.value, tensor([1.0, 0.5, -2.0]))
    assert found.clamped.tolist() == [[True, False, True]]


def test_a_token_at_the_bound_is_not_clamped():
    p = tensor([-2.0, 1.0, 1.25])
    found = log_ratio(p, tensor([0.0] * 3), ON, bounds=(-2.0, 1.0))
    assert found.clamped.tolist() == [[False, False, True]]


def test_a_masked_token_is_zero_and_not_clamped():
    found = log_ratio(tensor([9.0, 9.0]), tensor([0.0, 0.0]), prefix_mask([1], 2), bounds=(-1, 1))
    assert_close(found.value, tensor([1.0, 0.0]))
    assert found.clamped.tolist() == [[True, False]]


@pytest.mark.parametrize(("gradient", "at_the_clamp"), [("zero", 0.0), ("pass", 1.0)])
def test_the_gradient_where_it_was_clamped_is_a_choice(gradient, at_the_clamp):
    p = tensor([3.0, 0.5, -3.0]).requires_grad_()
    value = log_ratio(p, tensor([0.0] * 3), ON, bounds=(-1.0, 1.0), gradient=gradient).value
    assert_close(value.detach(), tensor([1.0, 0.5, -1.0]))
    assert_close(torch.autograd.grad(value.sum(), p)[0], tensor([at_the_clamp, 1.0, at_the_clamp]))


def test_passing_keeps_the_derivative_at_the_edge():
    # d/dd of e⁻ᵈ − 1 + d at the edge d = −1 is 1 − e, though d itself is −50.
    p = tensor([-50.0]).requires_grad_()
    d = log_ratio(p, tensor([0.0]), bounds=(-1.0, 1.0), gradient="pass").value
    assert_close(torch.autograd.grad(excess(-d).sum(), p)[0], tensor([1 - math.e]))


def test_ratios_by_hand_and_bounded():
    assert_close(ratio(tensor([0.0, math.log(2.0), -math.log(4.0)])), tensor([1.0, 2.0, 0.25]))
    far = ratio(tensor([1e4, -1e4, 1e15]))
    assert far.isfinite().all()
    assert (far > 0).all()
    assert_close(
        own_ratio(tensor([30.0, 0.0, -30.0]), tensor([0.0] * 3), ON).log(), tensor([20, 0, -20])
    )


def test_excess_by_hand():
    # 2 − 1 − log 2, ½ − 1 + log 2
    x = tensor([math.log(2.0), -math.log(2.0), 0.0])
    assert_close(excess(x), tensor([1 - math.log(2), math.log(2) - 0.5, 0.0]))


@quick
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8))
def test_excess_is_finite_and_never_negative(values):
    x = tensor(values).requires_grad_()
    found = excess(x)
    assert (found >= 0).all()
    assert found.isfinite().all()
    assert torch.autograd.grad(found.sum(), x)[0].isfinite().all()


@pytest.mark.parametrize("x", [1e-4, -1e-4])
def test_excess_keeps_its_digits_near_zero(x):
    # ½·(1e-4)² = 5e-9; a literal exp(x) − 1 − x would round to 0 or to 4e-8 in float32
    assert excess(tensor([x])).item() == pytest.approx(5e-9, rel=0.05)


def test_prefix_ratios_by_hand():
    # log-ratios 0.1, (masked), 0.3, −0.6: sums 0.1, 0.4, −0.2; before the token 0, 0.1, 0.4
    p, mask = tensor([0.1, NAN, 0.3, -0.6]), torch.tensor([[True, False, True, True]])
    found = prefix_ratios(p.requires_grad_(), tensor([0.0] * 4), mask)
    assert_close(found.through[mask].log(), torch.tensor([0.1, 0.4, -0.2]))
    assert_close(found.before[mask].log(), torch.tensor([0.0, 0.1, 0.4]))
    assert not found.through.requires_grad


def test_prefix_ratios_are_bounded_and_leave_their_bound():
    found = prefix_ratios(tensor([15.0, 15.0, -25.0]), tensor([0.0] * 3), ON)
    assert_close(found.through.log(), tensor([15.0, 20.0, 5.0]))  # the product, then the clamp
    assert_close(found.before.log(), tensor([0.0, 15.0, 20.0]))


def test_the_ratio_before_a_token_does_not_see_the_token():
    """Adding a huge own step and taking it off again would leave nothing of the others."""
    found = prefix_ratios(tensor([0.5, 1e8]), tensor([0.0, 0.0]), ON[:, :2])
    assert_close(found.before.log(), tensor([0.0, 0.5]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    p = torch.tensor([[0.0, -1.0]], dtype=dtype, requires_grad=True)
    q = torch.tensor([[-12.0, -1.5]], dtype=dtype)
    found = ratio(log_ratio(p, q).value)
    assert found.dtype == torch.float32
    assert_close(found.detach(), tensor([math.exp(12.0), math.exp(0.5)]))  # e¹² is inf in float16
    (grad,) = torch.autograd.grad(found.sum(), p)
    assert grad.dtype == dtype
    assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_gradient_too_large_for_its_dtype_saturates(dtype):
    x = torch.tensor([[1.0, -1.0, 1.0]], dtype=dtype, requires_grad=True)
    widen(x).mul(tensor([INF, INF, 2.0])).sum().backward()
    limit = torch.finfo(dtype).max
    assert x.grad.tolist() == [[limit, limit, 2.0]]
    x.grad = None
    (-3e38 * widen(x)).sum().backward()
    assert x.grad.isfinite().all()


def test_mixed_dtypes_are_computed_in_the_widest():
    half, double = torch.zeros(1, 3, dtype=torch.float16), torch.full((1, 3), 1e-12).double()
    found = log_ratio(half.requires_grad_(), double, ON).value
    assert found.dtype == torch.float64
    assert_close(found.detach(), -double)
    assert torch.autograd.grad(found.sum(), half)[0].dtype == torch.float16
    assert widen(double) is double


def test_straight_through_is_worth_nothing_and_has_a_gradient():
    x = tensor([5.0, -1e30, 3.0]).requires_grad_()
    found = straight_through(x)
    assert (found == 0).all()
    grad = torch.autograd.grad((tensor([2.0, 2.0, 2.0]) * found).sum(), x)[0]
    assert_close(grad[0, [0, 2]], torch.tensor([2.0, 2.0]))
    assert grad.isfinite().all()
