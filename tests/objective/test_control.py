import math
import random
from dataclasses import replace
from statistics import mean

import pytest

from klamp.errors import ConfigError
from klamp.objective.control import AdaptiveKL, ControlState, FixedKL, PIControl, controller

NAN, INF = float("nan"), float("inf")
ADAPTIVE = AdaptiveKL(init_coef=0.1, target=6.0, horizon=10_000)
PI = PIControl(init_coef=0.1, target=6.0, proportional_gain=0.5, integral_gain=0.1)


def after(control, *kls, n=64):
    """The state after a row of observed KLs."""
    state = control.init()
    for kl in kls:
        state = control.update(state, kl, n)
    return state


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.1),  # on target: nothing moves
        (6.6, 0.1 * (1 + 0.1 * 64 / 10_000)),  # 10 % above
        (5.4, 0.1 * (1 - 0.1 * 64 / 10_000)),  # 10 % below
        (60.0, 0.1 * (1 + 0.2 * 64 / 10_000)),  # far above: the error is clipped at +0.2
        (0.0, 0.1 * (1 - 0.2 * 64 / 10_000)),  # far below: at −0.2
        (-3.0, 0.1 * (1 - 0.2 * 64 / 10_000)),  # k1 can be negative: far below
    ],
)
def test_the_adaptive_update_by_hand(kl, expected):
    assert after(ADAPTIVE, kl).coef == pytest.approx(expected, rel=1e-12)


def test_the_error_clip_is_a_setting():
    wider = replace(ADAPTIVE, error_clip=0.5)
    assert after(wider, 60.0).coef == pytest.approx(0.1 * (1 + 0.5 * 64 / 10_000), rel=1e-12)


def test_the_coefficient_never_turns_negative():
    # 1 − 0.2 · 60 000 / 10 000 = −0.2: the formula alone would flip the sign of the penalty.
    state = AdaptiveKL(init_coef=0.1).update(ControlState(coef=0.1), 0.0, 60_000)
    assert state.coef == pytest.approx(0.001)  # a hundredth at most
    # 1 − 0.2 · 48 000 / 10 000 = 0.04 is drastic but sane, and upstream's.
    assert AdaptiveKL().update(ControlState(coef=0.1), 0.0, 48_000).coef == pytest.approx(0.004)


def test_an_adaptive_coefficient_stays_in_the_numbers():
    low = after(ADAPTIVE, *[0.0] * 200, n=50_000)
    high = after(ADAPTIVE, *[1e300] * 200, n=50_000)
    assert low.coef == pytest.approx(1e-12)
    assert high.coef == pytest.approx(1e6)
    assert ADAPTIVE.update(low, 60.0, 50_000).coef == pytest.approx(2e-12)  # and can come back


@pytest.mark.parametrize("kl", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "control", [FixedKL(coef=0.1), ADAPTIVE, PI], ids=lambda c: type(c).__name__
)
def test_a_kl_that_is_no_number_moves_nothing_and_is_counted(control, kl):
    before = after(control, 9.0)
    once = control.update(before, kl, 64)
    twice = control.update(once, kl, 64)
    assert replace(twice, refused=0) == before
    assert (before.refused, once.refused, twice.refused) == (0, 1, 2)


def test_an_update_returns_a_new_state():
    state = ADAPTIVE.init()
    moved = ADAPTIVE.update(state, 60.0, 64)
    assert state == ControlState(coef=0.1)
    assert moved.coef > state.coef


def test_fixed_never_moves():
    assert after(FixedKL(coef=0.05), 0.0, 6.0, 1e9) == ControlState(coef=0.05)
    assert FixedKL(coef=0.05).target is None


def test_the_pi_update_by_hand():
    # e = log(9.8923 / 6) = 0.5, I = 0.1 · 0.5, β = 0.1 · exp(0.5 · 0.5 + 0.05)
    first = after(PI, 6 * math.exp(0.5))
    assert first.integral == pytest.approx(0.05)
    assert first.coef == pytest.approx(0.1 * math.exp(0.30))
    # then e = −0.2, I = 0.05 − 0.02, β = 0.1 · exp(−0.1 + 0.03)
    second = PI.update(first, 6 * math.exp(-0.2), 64)
    assert second.integral == pytest.approx(0.03)
    assert second.coef == pytest.approx(0.1 * math.exp(-0.07))


@pytest.mark.parametrize(("kl", "error"), [(1e9, 1.0), (0.0, -1.0), (-5.0, -1.0)])
def test_the_pi_error_is_clipped(kl, error):
    state = after(replace(PI, error_clip=1.0), kl)
    assert state.integral == pytest.approx(0.1 * error)
    assert state.coef == pytest.approx(0.1 * math.exp(0.6 * error))


def test_on_target_the_pi_coefficient_stays():
    assert after(PI, 6.0, 6.0, 6.0) == ControlState(coef=0.1)


@pytest.mark.parametrize(("far", "back", "bound"), [(1e9, 5.9, 2.0), (0.0, 6.1, 0.01)])
def test_pi_leaves_a_bound_with_the_first_error_of_the_other_sign(far, back, bound):
    control = replace(PI, floor=0.01, ceiling=2.0)
    stuck = after(control, *[far] * 500)
    assert stuck.coef == pytest.approx(bound, rel=1e-12)
    free = control.update(stuck, back, 64)
    # What is left of the bound is one error: e = log(back / 6), through both gains.
    assert free.coef == pytest.approx(bound * (back / 6) ** 0.6, rel=1e-9)


def test_pi_does_not_depend_on_the_number_of_sequences():
    assert after(PI, 9.0, n=1) == after(PI, 9.0, n=100_000)


def drifting_policy(control, drift, *, steps=300, noise=0.05, seed=0):
    """kl/target − 1 of a policy that drifts away by ``drift`` a step and is pulled by β · kl.

    It holds the target where β = drift / target. It starts at the reference, as a run does.
    """
    generator, state, kl, errors = random.Random(seed), control.init(), 0.0, []
    for _ in range(steps):
        errors.append(kl / control.target - 1)
        state = control.update(state, kl, 256)
        kl = max(kl + drift - state.coef * kl + generator.gauss(0, noise), 0.0)
    return errors


def distance(errors):
    """The mean relative error over the last third."""
    return mean(map(abs, errors[-len(errors) // 3 :]))


def settled(errors):
    """The first step after which the KL stays within 20 % of its target."""
    return max((i + 1 for i, e in enumerate(errors) if abs(e) > 0.2), default=0)


@pytest.mark.parametrize("off", [0.1, 0.3, 3.0, 10.0])
@pytest.mark.parametrize("drift", [0.1, 0.3, 1.0, 3.0])
def test_pi_settles_closer_and_sooner_than_the_adaptive_controller(drift, off):
    """Wherever the first coefficient is not already the right one."""
    start = off * drift / 6.0
    for seed in range(3):
        pi = drifting_policy(PIControl(init_coef=start), drift, seed=seed)
        adaptive = drifting_policy(AdaptiveKL(init_coef=start), drift, seed=seed)
        assert distance(pi) < distance(adaptive)
        assert settled(pi) < settled(adaptive)


@pytest.mark.parametrize("drift", [0.3, 1.0, 3.0])
def test_pi_holds_its_target_from_any_start(drift):
    for start in (0.005, 0.05, 0.5, 5.0):
        errors = drifting_policy(PIControl(init_coef=start), drift)
        assert distance(errors) < 0.05
        assert settled(errors) < 150


def test_a_state_is_its_coefficient_as_a_number():
    assert float(ControlState(coef=0.2, integral=1.0)) == 0.2


def test_a_target_selects_the_controller():
    assert controller(0.2, None) == FixedKL(coef=0.2)
    assert controller(0.0, 6.0) == FixedKL(coef=0.0)
    assert controller(0.2, 5.0, 100) == AdaptiveKL(init_coef=0.2, target=5.0, horizon=100)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FixedKL(coef=-0.1), r"FixedKL\.coef must be .* >= 0, got -0\.1; 0 watches"),
        (lambda: FixedKL(coef=NAN), r"FixedKL\.coef must be a finite number .* got nan"),
        (lambda: AdaptiveKL(target=0.0), r"AdaptiveKL\.target .* > 0, got 0\.0; .* use FixedKL"),
        (lambda: AdaptiveKL(init_coef=0.0), r"AdaptiveKL\.init_coef .* got 0\.0"),
        (lambda: AdaptiveKL(horizon=-1), r"AdaptiveKL\.horizon .* got -1"),
        (lambda: AdaptiveKL(error_clip=INF), r"AdaptiveKL\.error_clip .* got inf"),
        (lambda: PIControl(target=-6.0), r"PIControl\.target .* > 0, got -6\.0"),
        (lambda: PIControl(integral_gain=0.0), r"PIControl\.integral_gain .* > 0, got 0\.0"),
        (lambda: PIControl(proportional_gain=-1.0), r"PIControl\.proportional_gain .* >= 0"),
        (
            lambda: PIControl(init_coef=0.5, ceiling=0.1),
            r"PIControl needs floor <= init_coef <= ceiling, got floor=1e-06 init_coef=0\.5 "
            r"ceiling=0\.1",
        ),
    ],
)
def test_a_wrong_setting_is_refused_when_built(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
