"""KL controllers: settings that turn (state, observed KL, sequences) into the next state.

A controller holds settings only. What it remembers is a plain value that belongs to the caller,
who can therefore log it, checkpoint it, or replay a run from any step. Any controller may drive
the coefficient of the reward's KL or of the loss's.
"""

import math
from dataclasses import dataclass, replace

from klamp.errors import ConfigError
from klamp.objective.settings import require_number

SMALLEST_COEF, LARGEST_COEF = 1e-12, 1e6
FIXED = "to hold one coefficient use FixedKL"


@dataclass(frozen=True, kw_only=True)
class ControlState:
    """All that a controller remembers."""

    coef: float
    """β: what the KL is multiplied by."""
    integral: float = 0.0
    """The accumulated error of ``PIControl``, in units of log β."""
    refused: int = 0
    """Observations that were not finite, and moved nothing."""

    def __float__(self) -> float:
        """β."""
        return self.coef


@dataclass(frozen=True, kw_only=True)
class FixedKL:
    """The same coefficient for the whole run."""

    coef: float

    def __post_init__(self) -> None:
        require_number(self, "coef", low=0.0, hint="0 watches the KL without applying it")

    @property
    def target(self) -> None:
        """A fixed coefficient has no target."""

    def init(self) -> ControlState:
        """The state before the first batch."""
        return ControlState(coef=self.coef)

    def update(self, state: ControlState, kl: float, n: int) -> ControlState:
        """β stays; a KL that is not finite is counted."""
        return state if math.isfinite(kl) else _refuse(state)


@dataclass(frozen=True, kw_only=True)
class AdaptiveKL:
    """β ← β · (1 + clip(KL/target − 1, ±error_clip) · n / horizon): steers the KL to its target.

    n is the number of sequences observed. One update never shrinks β more than a hundredfold, so
    that it cannot turn negative when n outgrows the horizon.
    Reference: Ziegler et al. 2019, section 2.2, https://arxiv.org/abs/1909.08593.
    """

    init_coef: float = 0.05
    """β of the first batch: 0.05 is conservative, 0.1 moderate."""
    target: float = 6.0
    """The KL to hold, in the unit that ``KLTerm`` watches: 5–6 nats per sequence is usual."""
    horizon: float = 10_000
    """Sequences over which a full error moves β by a fifth: scale it to the length of the run."""
    error_clip: float = 0.2
    """The largest relative error that one update acts on."""

    def __post_init__(self) -> None:
        require_number(self, "init_coef", "target", "horizon", "error_clip", above=0.0, hint=FIXED)

    def init(self) -> ControlState:
        """The state before the first batch."""
        return ControlState(coef=self.init_coef)

    def update(self, state: ControlState, kl: float, n: int) -> ControlState:
        """The state after n sequences showed this KL."""
        if not math.isfinite(kl):
            return _refuse(state)
        error = _clip(kl / self.target - 1.0, self.error_clip)
        factor = max(1.0 + error * n / self.horizon, 0.01)
        return replace(state, coef=min(max(state.coef * factor, SMALLEST_COEF), LARGEST_COEF))


@dataclass(frozen=True, kw_only=True)
class PIControl:
    """Proportional-integral control of log β: no horizon to tune.

        e = clip(log(KL / target), ±error_clip),   I ← I + integral_gain · e
        β = clip(init_coef · exp(proportional_gain · e + I), floor, ceiling)

    The proportional part answers at once, the integral removes what error is left. The integral
    never goes past what alone gives a bound (anti-windup), so that β leaves the bound with the
    first error of the other sign. Against ``AdaptiveKL`` it settles sooner and closer wherever the
    first β is not already the right one (tests/objective/test_control.py).
    """

    init_coef: float = 0.05
    """β when the KL is on target and nothing has accumulated."""
    target: float = 6.0
    """The KL to hold, in the unit that ``KLTerm`` watches."""
    proportional_gain: float = 1.0
    """What a KL of e times the target adds to log β at once."""
    integral_gain: float = 0.1
    """What it adds for good with every batch."""
    error_clip: float = 1.0
    """The largest |log(KL / target)| that one update acts on."""
    floor: float = 1e-6
    """The smallest β."""
    ceiling: float = 100.0
    """The largest β."""

    def __post_init__(self) -> None:
        positive = ("init_coef", "target", "integral_gain", "error_clip", "floor", "ceiling")
        require_number(self, *positive, above=0.0, hint=FIXED)
        require_number(self, "proportional_gain", low=0.0)
        if not self.floor <= self.init_coef <= self.ceiling:
            raise ConfigError(
                f"PIControl needs floor <= init_coef <= ceiling, got floor={self.floor} "
                f"init_coef={self.init_coef} ceiling={self.ceiling}"
            )

    def init(self) -> ControlState:
        """The state before the first batch."""
        return ControlState(coef=self.init_coef)

    def update(self, state: ControlState, kl: float, n: int) -> ControlState:
        """The state after a batch showed this KL; n does not matter."""
        if not math.isfinite(kl):
            return _refuse(state)
        error = _clip(math.log(max(kl, 1e-30) / self.target), self.error_clip)
        low, high = math.log(self.floor / self.init_coef), math.log(self.ceiling / self.init_coef)
        integral = min(max(state.integral + self.integral_gain * error, low), high)
        log_factor = min(max(self.proportional_gain * error + integral, low), high)
        return replace(state, coef=self.init_coef * math.exp(log_factor), integral=integral)


Control = FixedKL | AdaptiveKL | PIControl


def controller(init_coef: float, target: float | None, horizon: float = 10_000) -> Control:
    """``AdaptiveKL`` where there is a target, ``FixedKL`` where there is none.

    Zero times anything is zero, so an adaptive coefficient that starts at 0 is the fixed 0.
    """
    if target is None or init_coef == 0:
        return FixedKL(coef=init_coef)
    return AdaptiveKL(init_coef=init_coef, target=target, horizon=horizon)


def _refuse(state: ControlState) -> ControlState:
    return replace(state, refused=state.refused + 1)


def _clip(x: float, bound: float) -> float:
    return min(max(x, -bound), bound)
