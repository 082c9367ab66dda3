"""The policy and KL terms with their gradient written down, as one expression for torch.compile.

The same numbers as ``terms.policy_term`` and ``terms.kl_term``. A compiler turns all of it, values,
metrics and gradient, into one loop over the tokens; ``fused.py`` does the same without one.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klamp.objective.kl import KLTerm
from klamp.objective.logratio import LARGEST, RATIO_LIMIT, bounded_ratio, excess_near, widen
from klamp.objective.losses import ClippedSurrogate, Surrogate
from klamp.objective.metrics import MAX, MEAN, MIN, SUM, Metric
from klamp.objective.terms import Attached, Term
from klamp.types import Batch, PerToken, Targets, TokenMask

KINDS = {
    "actor/pg_loss": SUM,
    "actor/ratio_mean": MEAN,
    "actor/ratio_max": MAX,
    "actor/ratio_min": MIN,
    "actor/clip_frac": MEAN,
    "actor/clip_frac_low": MEAN,
    "actor/clip_frac_high": MEAN,
    "actor/dual_clip_frac": MEAN,
    "actor/ratio_clamp_frac": MEAN,
    "actor/old_kl": MEAN,
    "actor/nonfinite_tokens": SUM,
    "actor/kl_loss": SUM,
    "actor/kl": MEAN,
    "actor/kl_clamp_frac": MEAN,
    "actor/kl_coef_clamp_frac": MEAN,
}


class Tokens(NamedTuple):
    """All that the terms of a token depend on."""

    logprobs: Tensor
    old: Tensor
    ref: Tensor | None
    advantages: Tensor
    corrections: Tensor
    to_come: Tensor | None
    shares: Tensor
    mask: Tensor
    kl_coef: Tensor | float
    rows: Tensor
    """True for each row; see ``sums``."""


def written_term(
    surrogate: Surrogate,
    kl: KLTerm | None,
    logprobs: PerToken,
    batch: Batch,
    targets: Targets,
    shares: PerToken,
    *,
    compiled: bool = False,
) -> Term:
    """The policy term and the KL term as one; ``terms.token_wise`` says for what."""
    assert isinstance(surrogate, ClippedSurrogate)
    tokens = Tokens(
        logprobs=logprobs.detach(),
        old=batch.old_logprobs,
        ref=None if kl is None else batch.ref_logprobs,
        advantages=targets.advantages,
        corrections=targets.corrections,
        to_come=targets.kl_to_come,
        shares=shares,
        mask=targets.mask,
        # As a tensor it may move without a new compilation.
        kl_coef=logprobs.new_tensor(targets.kl_coef) if compiled else targets.kl_coef,
        rows=targets.weights.isfinite(),
    )
    function = _compiled() if compiled else sums
    gradient, numbers = function(surrogate, kl, tokens)
    found = numbers.tolist() if numbers.is_cpu and compiled else numbers.unbind()
    count = found[0]
    names = [name for name in KINDS if kl is not None or not name.startswith("actor/kl")]
    metrics = {
        name: Metric(x, 1.0 if KINDS[name] == SUM else count, KINDS[name])
        for name, x in zip(names, found[1:], strict=True)
    }
    loss = metrics["actor/pg_loss"].sum + (0.0 if kl is None else metrics["actor/kl_loss"].sum)
    return Term(Attached.apply(logprobs, torch.as_tensor(loss).to(logprobs), gradient), metrics)


@lru_cache(maxsize=1)
def _compiled() -> Any:
    # A product and a sum in one rounding: fewer instructions, and no less exact.
    options: dict[str, Any] = {"cpp.enable_floating_point_contract_flag": "fast"}
    return torch.compile(sums, fullgraph=True, options=options)


def sums(surrogate: ClippedSurrogate, kl: KLTerm | None, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The gradient, and the number of active tokens followed by each metric's sum.

    A factor of 1 for each row keeps the gradient's loop one over rows and columns, like that of the
    sums: as one they read every input once, where a flat loop would be a second one.
    """
    active = tokens.mask & (tokens.shares > 0)
    share = torch.where(active, tokens.shares, 0.0)
    gradient, found = _policy(surrogate, tokens, active, share)
    if kl is not None:
        more, others = _penalty(kl, tokens, active, share)
        gradient, found = gradient + more, [*found, *others]
    numbers = torch.stack([x.to(torch.float64) for x in (_count(active), *found)])
    return gradient * tokens.rows[:, None], numbers


def _policy(
    surrogate: ClippedSurrogate, tokens: Tokens, active: TokenMask, share: PerToken
) -> tuple[Tensor, list[Tensor]]:
    """−∑ w min(ρ Â, clip(ρ) Â); its derivative by log π is −w ρ Â where neither clip is binding."""
    limit = surrogate.clamp_log_ratio
    raw = torch.where(active, tokens.logprobs - widen(tokens.old), 0.0)
    near = raw.clamp(-limit, limit)
    rho, clamped = bounded_ratio(near), raw.abs() > limit
    far = raw.clamp(-RATIO_LIMIT, RATIO_LIMIT)  # as a rule the same, and then made once
    advantages = torch.where(active, tokens.advantages, 0.0)
    weight = torch.where(active, share * tokens.corrections, 0.0)
    up = advantages > 0
    bound = torch.where(up, 1.0 + surrogate.high, 1.0 - surrogate.low)
    plain = rho * advantages
    binding = (rho - bound) * advantages > 0
    gain = torch.where(binding, bound * advantages, plain)
    stopped, dual_clips = binding | clamped, torch.zeros((), device=raw.device)
    if surrogate.dual is not None:
        floor = surrogate.dual * advantages
        dual = (advantages < 0) & (gain < floor)
        gain, stopped, dual_clips = torch.where(dual, floor, gain), stopped | dual, _count(dual)
    gradient = torch.where(stopped, 0.0, -weight * plain)
    low, high = _count(binding & ~up), _count(binding & up)
    return gradient, [
        -_total(gain * weight),
        _total(torch.where(active, rho, 0.0)),
        torch.where(active, rho, -torch.inf).amax(dim=-1).amax(),
        torch.where(active, rho, torch.inf).amin(dim=-1).amin(),
        *(low + high, low, high, dual_clips, _count(clamped)),
        _total(excess_near(far, bounded_ratio(far))),
        _count((raw - raw) != 0),  # which is NaN where raw is not finite
    ]


def _penalty(
    kl: KLTerm, tokens: Tokens, active: TokenMask, share: PerToken
) -> tuple[Tensor, list[Tensor]]:
    """β ∑ s KL; its derivative by log π is β s c."""
    assert tokens.ref is not None
    low, high = kl.bounds[kl.estimator]
    raw = torch.where(active, tokens.logprobs - widen(tokens.ref), 0.0)
    d, clamped = _clamped(raw, low, high)
    if kl.estimator == "k1":
        value, slope = d, torch.ones_like(d)
    elif kl.estimator == "k2":
        value, slope = 0.5 * d.square(), d
    else:
        value = excess_near(-d, bounded_ratio(-d))
        slope = d - value  # 1 − e⁻ᵈ
    bounded = clamped
    if kl.gradient == "value":
        coefficient = slope if kl.clamp_gradient == "pass" else torch.where(clamped, 0.0, slope)
    else:
        now, bounded = _clamped(raw, *kl.bounds["coefficient"])
        coefficient = now if kl.clamp_gradient == "pass" else torch.where(bounded, 0.0, now)
    if kl.gradient == "sequence":
        assert tokens.to_come is not None
        limit = kl.clamp_to_come or LARGEST
        ahead = torch.where(active, tokens.to_come, 0.0).clamp(-limit, limit)
        coefficient, bounded = coefficient + ahead, bounded | (ahead.abs() >= limit)
    penalty = tokens.kl_coef * _total(value * share)
    found = [penalty, _total(value), _count(clamped), _count(bounded)]
    return tokens.kl_coef * share * coefficient, found


def _clamped(raw: PerToken, low: float, high: float) -> tuple[PerToken, TokenMask]:
    """raw inside an interval, and where it was not; an end that nothing reaches costs nothing."""
    if high >= LARGEST:
        return raw.clamp(min=low), raw < low
    return raw.clamp(low, high), (raw < low) | (raw > high)


def _total(x: PerToken) -> Tensor:
    """∑ x: along rows first, which keeps the rounding of a plain sum small."""
    return x.sum(dim=-1).sum()


def _count(x: TokenMask) -> Tensor:
    return x.to(torch.int32).sum(dim=-1, dtype=torch.int32).sum()
