"""The KL term: value × gradient × weighting × clamps × place × control, each its own setting.

As a *loss* (autograd through the value), k1 has zero expected gradient, k3 a biased one, k2 that of
one token's KL; and none of them knows that a token also changes the KL still to come. By
enumeration (tests/objective/test_kl_enumeration.py) the gradient of the KL of a whole response is

    ∇KL = E[ ∑ₜ cₜ ∇log πₜ ],   cₜ = sg( dₜ + ∑_{t'>t} k3ₜ' − bₜ ),   dₜ = log πₜ − log refₜ

"k1 now, k3 to come": E[k3 | prefix] is the conditional KL, and bₜ, the mean of the siblings' sums,
does not see its own sample. The bias of the usual losses is in Tang & Munos, arXiv 2506.09477; the
off-policy case in Shah et al., arXiv 2512.21852.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from klamp.errors import ConfigError, DataError
from klamp.objective.active import later, layout
from klamp.objective.control import AdaptiveKL, Control, FixedKL, PIControl
from klamp.objective.estimators import ESTIMATORS as ESTIMATORS
from klamp.objective.estimators import OF_LOG_RATIO, clamp_bounds
from klamp.objective.estimators import k1 as k1
from klamp.objective.estimators import k2 as k2
from klamp.objective.estimators import k3 as k3
from klamp.objective.estimators import k3_reversed as k3_reversed
from klamp.objective.exact import exact_kl as exact_kl
from klamp.objective.groups import leave_one_out_by_rank
from klamp.objective.logratio import (
    LARGEST,
    NO_WEIGHTS,
    Bounds,
    LogRatio,
    PrefixRatios,
    log_ratio,
    own_ratio,
    prefix_ratios,
    straight_through,
    widen,
)
from klamp.objective.settings import require_choice, require_kind, require_number
from klamp.types import ALONE, Batch, PerToken, TokenMask, Workers

CHOICES: dict[str, tuple[str | None, ...]] = {
    "estimator": (*ESTIMATORS, "exact"),
    "gradient": ("value", "token", "sequence"),
    "weighting": (None, "importance"),
    "clamp_gradient": ("zero", "pass"),
    "where": ("loss", "reward"),
    "watch": (None, *ESTIMATORS, "exact"),
    "watch_reduction": ("sequence_sum", "token_mean", "sequence_mean"),
}


NO_REFERENCE = (
    "the objective has a KL term but Batch.ref_logprobs is None; give the reference's log-probs, "
    "or use an Objective with kl=None"
)
NO_EXACT_KL = (
    "KLTerm(estimator='exact') needs exact_kl, got None; give Batch.exact_kl to prepare and "
    "exact_kl= to loss (klamp.objective.exact.exact_kl makes it)"
)


class KLTokens(NamedTuple):
    """What the KL term makes of each token: 0 and False where masked."""

    term: PerToken
    clamped: TokenMask
    """The value's clamp changed it."""
    bounded: TokenMask
    """The gradient's coefficient was bounded: its d, its sum to come or its prefix weight."""


@dataclass(frozen=True, kw_only=True)
class KLTerm:
    """How the KL to the reference is estimated, differentiated, clamped, placed and controlled."""

    estimator: str = "k3"
    """The reported value: k1, k2, k3, abs, k3_reversed, or exact (from ``exact_kl`` tensors)."""
    gradient: str = "value"
    """``value``: autograd through the estimator, as upstream does. ``token``: cₜ = dₜ, exact for
    each token's conditional KL. ``sequence``: exact for the KL of the whole response."""
    weighting: str | None = None
    """``importance`` corrects for samples of the old policy: by the prefix product of ratios in the
    token and sequence forms (detached); by the token's own, with its gradient, in ``value``."""
    clamp_log_ratio: float | None = None
    """d is clamped to ± this, before anything is made of it."""
    clamp_value: float | None = None
    """The estimator is clamped to ± this; done as the equivalent clamp of d, before the exp."""
    clamp_gradient: str = "zero"
    """``zero``: a clamped token has no gradient, as upstream. ``pass``: that of the clamp's edge;
    in the token and sequence forms, the clamped d as its coefficient."""
    clamp_to_come: float | None = None
    """Bounds ∑_{t'>t} k3ₜ' − bₜ of the sequence form."""
    where: str = "loss"
    """``loss``: a term of the loss. ``reward``: subtracted from the token rewards."""
    control: Control = FixedKL(coef=0.05)
    watch: str | None = None
    """The estimator that the controller watches; None = ``estimator``."""
    watch_reduction: str = "sequence_sum"
    """``sequence_sum``: nats per sequence. ``token_mean``: per token. ``sequence_mean``: the mean
    over sequences of their mean per token (what OpenRLHF and ROLL watch)."""
    accept_length_bias: bool = False
    """Allow ``gradient="sequence"`` with ``reduction="sequence_mean"``, which is another
    objective: with a share that depends on the own length the baseline is biased."""
    bounds: dict[str, Bounds] = field(init=False, repr=False, compare=False)
    """For each estimator, and the gradient's coefficient, the interval of d that is left as is."""

    def __post_init__(self) -> None:
        if self.weighting == "none":  # as a YAML file spells it
            object.__setattr__(self, "weighting", None)
        require_choice(self, **CHOICES)
        require_number(self, "clamp_log_ratio", "clamp_value", above=0.0, optional=True)
        require_number(self, "clamp_to_come", above=0.0, optional=True)
        require_kind(self, control=(FixedKL, AdaptiveKL, PIControl), accept_length_bias=(bool,))
        self._check_pairs()
        clamps = (self.clamp_log_ratio, self.clamp_value)
        bounds = {e: clamp_bounds(e, *clamps) for e in ESTIMATORS}
        # The user's clamps alone: that a value would overflow is no reason to let go of a token.
        own = self.clamp_value is not None and self.estimator != "exact"
        bounds["coefficient"] = clamp_bounds(self.estimator if own else "k1", *clamps)
        object.__setattr__(self, "bounds", bounds)

    def _check_pairs(self) -> None:
        if self.where == "reward" and (self.gradient != "value" or self.weighting is not None):
            raise ConfigError(
                f"KLTerm(where='reward') takes no gradient, got gradient={self.gradient!r} "
                f"weighting={self.weighting!r}; leave both at their defaults or use where='loss'"
            )
        if self.estimator == "exact" and self.gradient == "value" and self.weighting:
            raise ConfigError(
                "KLTerm(estimator='exact', gradient='value') has no sampled token to weigh by "
                "'importance'; use gradient='token' or 'sequence'"
            )

    @property
    def watched(self) -> str:
        """The estimator that the controller watches."""
        return self.watch or self.estimator

    def value(self, estimator: str, batch: Batch, mask: TokenMask) -> KLTokens:
        """An estimator at the old policy, with this term's clamps."""
        return self._value(estimator, batch.old_logprobs, batch, mask, batch.exact_kl)

    def to_come(self, batch: Batch, workers: Workers = ALONE) -> PerToken | None:
        """∑_{t'>t} k3ₜ' − bₜ at the old policy, aligned by active-token rank."""
        if self.gradient != "sequence" or self.where != "loss":
            return None
        active = layout(batch.mask)
        sums = active.compact(self._later_at_old(batch))
        centred = sums - leave_one_out_by_rank(sums, batch.groups, workers)
        # With importance weights the sum is made anew in the loss, and clamped there.
        bounded = centred if self.weighting else self._bounded(centred)
        return torch.where(batch.mask, active.expand(bounded), 0.0)

    def __call__(
        self,
        logprobs: PerToken,
        batch: Batch,
        mask: TokenMask,
        *,
        to_come: PerToken | None = None,
        exact_kl: PerToken | None = None,
    ) -> KLTokens:
        """The term of each token under the current policy: the value, with the chosen gradient."""
        logprobs = widen(logprobs)
        value, clamped, _ = self._value(self.estimator, logprobs, batch, mask, exact_kl)
        old = batch.old_logprobs
        if self.gradient == "value":
            weight = own_ratio(logprobs, old, mask) if self.weighting else 1.0
            return KLTokens(value * weight, clamped, clamped)
        weights = prefix_ratios(logprobs, old, batch.mask) if self.weighting else NO_WEIGHTS
        bounded = mask & weights.clamped
        if self.estimator == "exact":  # its own gradient is already that of the token's KL
            term, coef = weights.before * value, torch.zeros_like(value)
        else:
            d, far = self._log_ratio("coefficient", logprobs, batch, mask)
            now = d if self.clamp_gradient == "pass" else torch.where(far, 0.0, d)
            term, coef = (weights.through * value).detach(), weights.through * now
            bounded = bounded | far
        if self.gradient == "sequence":
            ahead = self._to_come_now(to_come, weights, logprobs, batch, exact_kl)
            at_limit = ahead.abs() >= (self.clamp_to_come or LARGEST)
            coef, bounded = coef + ahead, bounded | (mask & at_limit)
        pull = coef.detach() * straight_through(torch.where(mask, logprobs, 0.0))
        return KLTokens(term + pull, clamped, bounded)

    def _to_come_now(
        self,
        prepared: PerToken | None,
        weights: PrefixRatios,
        logprobs: PerToken,
        batch: Batch,
        exact_kl: PerToken | None,
    ) -> PerToken:
        """The prepared sums, or the current policy's; with weights, around the same baseline."""
        # Over the whole response: a token that a filter took out of the loss is still to come.
        if prepared is not None:
            prepared = torch.where(batch.mask, prepared, 0.0)
        if prepared is not None and self.weighting is None:
            return self._bounded(prepared)
        weight = weights.before if self.estimator == "exact" else weights.through
        sums = later(weight * self._ahead(logprobs, batch, exact_kl), batch.mask)
        if prepared is not None:
            baseline = self._later_at_old(batch) - prepared
            sums = sums - weights.through * baseline
        return self._bounded(sums)

    def _later_at_old(self, batch: Batch) -> PerToken:
        return later(self._ahead(batch.old_logprobs, batch, batch.exact_kl), batch.mask)

    def _ahead(self, logprobs: PerToken, batch: Batch, exact_kl: PerToken | None) -> PerToken:
        """What one token adds to the sums of those before it: k3, or the exact KL."""
        estimator = "exact" if self.estimator == "exact" else "k3"
        return self._value(estimator, logprobs.detach(), batch, batch.mask, exact_kl).term.detach()

    def _value(
        self,
        estimator: str,
        logprobs: PerToken,
        batch: Batch,
        mask: TokenMask,
        exact_kl: PerToken | None,
    ) -> KLTokens:
        if estimator == "exact":
            return self._exact(exact_kl, mask)
        d, clamped = self._log_ratio(estimator, logprobs, batch, mask)
        return KLTokens(OF_LOG_RATIO[estimator](d), clamped, clamped)

    def _log_ratio(
        self, estimator: str, logprobs: PerToken, batch: Batch, mask: TokenMask
    ) -> LogRatio:
        if (ref := batch.ref_logprobs) is None:
            raise DataError(NO_REFERENCE)
        bounds, gradient = self.bounds[estimator], self.clamp_gradient
        return log_ratio(logprobs, ref, mask, bounds=bounds, gradient=gradient)

    def _exact(self, exact_kl: PerToken | None, mask: TokenMask) -> KLTokens:
        if exact_kl is None:
            raise DataError(NO_EXACT_KL)
        limit = LARGEST if self.clamp_value is None else self.clamp_value
        zero = torch.zeros_like(exact_kl)
        kept = log_ratio(exact_kl, zero, mask, bounds=(-limit, limit), gradient=self.clamp_gradient)
        return KLTokens(kept.value, kept.clamped, kept.clamped)

    def _bounded(self, x: PerToken) -> PerToken:
        limit = self.clamp_to_come or LARGEST
        return x.clamp(-limit, limit)
