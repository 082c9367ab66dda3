import math

import pytest
import torch

from helpers import assert_close, prefix_mask, tensor
from klamp.errors import ConfigError, DataError
from klamp.objective.losses import CISPO, ClippedSurrogate, PolicyGradient, ValueLoss, policy_ratio

NAN, INF = float("nan"), float("inf")
ONE = torch.ones(1, 1, dtype=torch.bool)
SURROGATES = {
    "clipped": ClippedSurrogate(),
    "dual": ClippedSurrogate(dual=3.0),
    "sequence": ClippedSurrogate(ratio="sequence"),
    "cispo": CISPO(low=0.5),
    "gradient": PolicyGradient(),
}
each_surrogate = pytest.mark.parametrize("surrogate", SURROGATES.values(), ids=SURROGATES)


def run(surrogate, log_ratio, advantages, mask=None, old=0.0):
    """What the surrogate makes of log π = old + log_ratio, and the gradient of its sum."""
    logprobs = (log_ratio + old).requires_grad_()
    mask = torch.ones_like(log_ratio, dtype=torch.bool) if mask is None else mask
    found = surrogate(logprobs, torch.full_like(log_ratio, old), advantages, mask)
    return found, torch.autograd.grad(found.loss[mask].sum(), logprobs)[0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "has_gradient", "clipped"),
    [
        (1.0, 1.0, -1.0, True, None),
        (1.5, 1.0, -1.28, False, "high"),  # good token, already pushed far enough: clipped
        (1.5, -1.0, 1.5, True, None),  # bad token made likelier: never clipped
        (0.5, 1.0, -0.5, True, None),  # good token made rarer: never clipped
        (0.5, -1.0, 0.8, False, "low"),  # bad token, already pushed far enough: clipped
    ],
)
def test_the_five_regions_of_the_clipped_surrogate(
    ratio, advantage, expected, has_gradient, clipped
):
    surrogate = ClippedSurrogate(low=0.2, high=0.28)
    found, grad = run(surrogate, tensor([math.log(ratio)]), tensor([advantage]))
    assert_close(found.loss, tensor([expected]))
    assert_close(found.ratio, tensor([ratio]))
    # d(−ρA)/d log π = −ρA where the surrogate is not flat
    assert_close(grad, tensor([-ratio * advantage if has_gradient else 0.0]))
    assert found.clipped_low.item() == (clipped == "low")
    assert found.clipped_high.item() == (clipped == "high")
    assert not found.dual_clipped.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "bound"),
    [
        (5.0, -2.0, 6.0, True),  # 10 without it, at most 3 · 2
        (2.5, -2.0, 5.0, False),  # below the bound
        (5.0, 2.0, -2.4, False),  # a good token has its own clip: 1.2 · 2
    ],
)
def test_the_dual_clip_bounds_what_a_bad_token_costs(ratio, advantage, expected, bound):
    surrogate = ClippedSurrogate(dual=3.0)
    found, grad = run(surrogate, tensor([math.log(ratio)]), tensor([advantage]))
    assert_close(found.loss, tensor([expected]))
    assert found.dual_clipped.item() == bound
    assert (grad == 0).item() == (bound or advantage > 0)


@pytest.mark.parametrize(
    ("low", "ratio", "weight"),
    [(None, 0.5, 0.5), (None, 0.01, 0.01), (0.1, 0.5, 0.9), (0.1, 1.1, 1.1), (0.1, 3.0, 1.2)],
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_the_cispo_gradient_is_minus_the_clipped_weight_times_the_advantage(
    low, ratio, weight, advantage
):
    surrogate = CISPO(low=low, high=0.2)
    found, grad = run(surrogate, tensor([math.log(ratio)]), tensor([advantage]), old=-3.0)
    assert_close(grad, tensor([-weight * advantage]))
    assert_close(found.loss, tensor([-weight * advantage * (math.log(ratio) - 3.0)]))
    assert found.clipped_high.item() == (ratio > 1.2)
    assert found.clipped_low.item() == (low is not None and ratio < 0.9)


def test_the_policy_gradient_is_minus_the_advantage():
    found, grad = run(PolicyGradient(), tensor([0.3, -0.5]), tensor([2.0, -1.5]), old=-1.0)
    assert_close(found.loss, tensor([2.0 * 0.7, -1.5 * 1.5]))  # −Â log π, log π = −0.7, −1.5
    assert_close(grad, tensor([-2.0, 1.5]))
    assert_close(found.ratio, tensor([math.exp(0.3), math.exp(-0.5)]))
    assert not (found.clipped_low | found.clipped_high).any()


def test_the_sequence_ratio_by_hand():
    # Mean log-ratio of the active tokens (0.1 + 0.3) / 2 = 0.2 | 0.9 / 1
    log_ratio, mask = tensor([0.1, 9.0, 0.3], [9.0, 0.9, 9.0]), prefix_mask([2, 1], 3)
    mask = mask[:, [0, 2, 1]]  # active, masked, active | active, masked, masked
    log_ratio[1] = tensor([0.9, 9.0, 9.0])
    surrogate = ClippedSurrogate(low=0.2, high=0.28, ratio="sequence")
    found, grad = run(surrogate, log_ratio, torch.ones(2, 3), mask)
    rho = math.exp(0.2)  # 1.2214: inside the range
    assert_close(found.ratio[mask], torch.tensor([rho, rho, math.exp(0.9)]))
    assert_close(found.loss[mask], torch.tensor([-rho, -rho, -1.28]))
    # Each of two tokens moves both losses by ρ / 2; the second row is clipped.
    assert_close(grad, tensor([-rho, 0.0, -rho], [0.0, 0.0, 0.0]))
    assert found.clipped_high.tolist()[1][0]


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
@each_surrogate
def test_what_is_masked_reaches_neither_loss_nor_gradient(surrogate, junk):
    log_ratio, advantages, mask = *torch.randn(2, 3, 4), torch.rand(3, 4) < 0.6
    clean, grad = run(surrogate, log_ratio, advantages, mask)
    dirty, dirty_grad = run(surrogate, torch.where(mask, log_ratio, junk), advantages, mask)
    assert_close(dirty.loss[mask], clean.loss[mask])
    assert_close(dirty_grad, grad)
    assert (grad[~mask] == 0).all()
    assert not dirty.clamped[~mask].any()
    assert dirty.loss.isfinite().all()


@pytest.mark.parametrize(
    ("d", "advantage"), [(25.0, -1.0), (-25.0, 1.0), (1e4, -1.0), (-1e30, 1.0)]
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_log_ratio_past_twenty_is_finite_without_gradient_and_counted(level, d, advantage):
    found, grad = run(ClippedSurrogate(ratio=level), tensor([d]), tensor([advantage]))
    assert_close(found.ratio, tensor([math.exp(math.copysign(20.0, d))]))
    assert_close(found.loss, -advantage * found.ratio.detach())
    assert grad.item() == 0
    assert found.clamped.item()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_log_ratio_below_twenty_is_as_it_is(level):
    found, grad = run(ClippedSurrogate(ratio=level), tensor([19.0]), tensor([-1.0]))
    assert_close(found.loss, tensor([math.exp(19.0)]))
    assert_close(grad, tensor([math.exp(19.0)]))
    assert not found.clamped.item()


def test_the_clamp_is_a_setting():
    found, _ = run(ClippedSurrogate(clamp_log_ratio=2.0), tensor([3.0]), tensor([-1.0]))
    assert_close(found.loss, tensor([math.exp(2.0)]))


def test_an_empty_row_has_a_sequence_ratio_of_one():
    x = tensor([1.0, 2.0])
    found = policy_ratio(x, 0 * x, torch.zeros(1, 2, dtype=torch.bool), level="sequence")
    assert_close(found.value, tensor([1.0, 1.0]))
    assert not found.clamped.any()


@each_surrogate
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(surrogate, dtype):
    logprobs = torch.tensor([[-1.0, -15.0]], dtype=dtype, requires_grad=True)
    old = torch.tensor([[-1.5, -1.0]], dtype=dtype)
    mask = torch.ones(1, 2, dtype=torch.bool)
    found = surrogate(logprobs, old, tensor([1.0, -3e4]), mask)
    assert found.loss.dtype == torch.float32
    (grad,) = torch.autograd.grad(1e6 * found.loss.sum(), logprobs)
    assert grad.dtype == dtype
    assert grad.isfinite().all()


@pytest.mark.parametrize(
    ("value", "expected", "grad", "clipped"),
    [
        (1.0, 1.125, 0.0, True),  # (1 − 2)² = 1 < (0.5 − 2)² = 2.25: half of the larger
        (0.25, 1.53125, -1.75, False),  # inside: ½ · 1.75²
        (5.0, 4.5, 3.0, False),  # (5 − 2)² = 9 > (0.5 − 2)²: the plain error is the larger
    ],
)
def test_the_value_loss_by_hand(value, expected, grad, clipped):
    values = tensor([value]).requires_grad_()
    found = ValueLoss(clip=0.5)(values, tensor([0.0]), tensor([2.0]), ONE)
    assert_close(found.loss, tensor([expected]).double())
    assert_close(torch.autograd.grad(found.loss.sum(), values)[0], tensor([grad]))
    assert found.clipped.item() == clipped


def test_the_value_loss_without_clip_and_with_a_coefficient():
    found = ValueLoss(coef=0.1)(tensor([5.0]), None, tensor([2.0]), ONE)
    assert_close(found.loss, tensor([0.45]).double())  # 0.1 · ½ · 9
    assert not found.clipped.any()


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("size", [1e30, 3e38])
def test_a_large_value_error_is_finite(clip, size):
    values = tensor([size, -size]).requires_grad_()
    mask = torch.ones(1, 2, dtype=torch.bool)
    found = ValueLoss(clip=clip)(values, values.detach(), tensor([0.0, size]), mask)
    (grad,) = torch.autograd.grad(found.loss.sum() * 1e-3, values)
    assert found.loss.isfinite().all()
    assert grad.isfinite().all()
    assert found.loss[0, 0].item() == pytest.approx(0.5 * size**2, rel=1e-5)


@pytest.mark.parametrize("junk", [NAN, INF, 1e30])
def test_masked_values_reach_neither_loss_nor_gradient(junk):
    mask, data = prefix_mask([2], 3), torch.randn(3, 1, 3)
    dirty = [torch.where(mask, x, junk) for x in data]

    def loss_and_grad(values, old, returns):
        values = values.clone().requires_grad_()
        found = ValueLoss(clip=0.2)(values, old, returns, mask)
        return found.loss, found.clipped, torch.autograd.grad(found.loss.sum(), values)[0]

    for a, b in zip(loss_and_grad(*dirty), loss_and_grad(*data), strict=True):
        assert_close(a, b)


def test_clipping_values_needs_the_old_ones():
    with pytest.raises(DataError, match=r"ValueLoss\.clip needs Batch\.values .* set clip=None"):
        ValueLoss(clip=0.2)(tensor([1.0]), None, tensor([1.0]), ONE)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ClippedSurrogate(low=0.0), r"ClippedSurrogate\.low .* > 0 and <= 1, got 0\.0"),
        (lambda: ClippedSurrogate(low=1.5), r"ClippedSurrogate\.low .* got 1\.5"),
        (lambda: ClippedSurrogate(high=-0.2), r"ClippedSurrogate\.high .* > 0, got -0\.2"),
        (lambda: ClippedSurrogate(dual=1.0), r"ClippedSurrogate\.dual .* > 1, got 1\.0; None"),
        (lambda: ClippedSurrogate(ratio="group"), r"ClippedSurrogate\.ratio must be one of token"),
        (lambda: ClippedSurrogate(clamp_log_ratio=90.0), r"clamp_log_ratio .* <= 80, got 90"),
        (lambda: CISPO(high=0.0), r"CISPO\.high .* > 0, got 0\.0"),
        (lambda: CISPO(low=2.0), r"CISPO\.low .* <= 1, got 2\.0"),
        (lambda: ValueLoss(clip=0.0), r"ValueLoss\.clip .* > 0, got 0\.0; None turns it off"),
        (lambda: ValueLoss(coef=-1.0), r"ValueLoss\.coef .* >= 0, got -1\.0"),
    ],
)
def test_a_wrong_setting_is_refused_when_built(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_shapes_are_checked_while_testing():
    with pytest.raises(Exception, match="advantages"):
        ClippedSurrogate()(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), ONE.expand(2, 3))
