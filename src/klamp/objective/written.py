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
from klamp.objective.moments import wide_dtype
from klamp.objective.sums import Sums, report
from klamp.objective.terms import Attached, Term
from klamp.types import Batch, PerSequence, PerToken, Targets, TokenMask

OF_POLICY = ("gain", "rise", "moved", "clipped", "clipped_high", "clamped", "nonfinite")
OF_PENALTY = ("kl_share", "kl", "kl_clamped", "kl_bounded")


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
    """As bytes: a compiler reads bools one by one."""
    rows: Tensor
    """1 for each row; see ``sums``."""
    kl_coef: Tensor | float


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
        mask=targets.mask.view(torch.uint8),
        rows=logprobs.new_ones(len(logprobs)),
        # As a tensor it may move without a new compilation.
        kl_coef=logprobs.new_tensor(targets.kl_coef) if compiled else targets.kl_coef,
    )
    gradient, numbers = (_compiled() if compiled else sums)(surrogate, kl, tokens)
    found = numbers.tolist() if numbers.is_cpu and compiled else numbers.unbind()
    names = _names(surrogate, kl)
    counted = Sums(**dict(zip(names, found, strict=True)))
    loss, metrics = report(counted, targets.kl_coef, with_kl=kl is not None)
    loss = loss.to(logprobs) if isinstance(loss, Tensor) else loss
    return Term(Attached.apply(logprobs, loss, gradient), metrics)


@lru_cache(maxsize=1)
def _compiled() -> Any:
    # One graph it is; asked for, it would be an error once torch has compiled for too many
    # objectives.
    options: dict[str, Any] = {
        # A product and a sum in one rounding: fewer instructions, and no less exact.
        "cpp.enable_floating_point_contract_flag": "fast",
        # As long as it is, it stays one expression; cut at 30 operations, parts went to memory.
        "realize_opcount_threshold": 100,
    }
    return torch.compile(sums, options=options)


def _names(surrogate: ClippedSurrogate, kl: KLTerm | None) -> tuple[str, ...]:
    """What ``sums`` returns, in its order."""
    dual = () if surrogate.dual is None else ("dual",)
    return ("tokens", *OF_POLICY, *dual, *(() if kl is None else OF_PENALTY), "high", "low")


def sums(surrogate: ClippedSurrogate, kl: KLTerm | None, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The gradient, and the numbers of ``Sums`` by ``_names``.

    A factor of 1 for each row keeps the gradient's loop one over rows and columns, like that of the
    sums: as one they read every input once, where a flat loop would be a second one.
    """
    active = (tokens.mask > 0) & (tokens.shares > 0)
    share = torch.where(active, tokens.shares, 0.0)
    gradient, found, ends = _policy(surrogate, tokens, active, share)
    if kl is not None:
        more, others = _penalty(kl, tokens, active, share)
        gradient, found = gradient + more, [*found, *others]
    rows = torch.stack([_along(active), *found])
    totals = rows.sum(dim=-1, dtype=wide_dtype(rows))
    high, minus_low = torch.stack(ends).amax(dim=-1).to(totals).unbind()
    numbers = torch.cat([totals, torch.stack([high, -minus_low])])
    return gradient * tokens.rows[:, None], numbers


def _policy(
    surrogate: ClippedSurrogate, tokens: Tokens, active: TokenMask, share: PerToken
) -> tuple[Tensor, list[PerSequence], list[PerSequence]]:
    """−∑ w min(ρ Â, clip(ρ) Â); its derivative by log π is −w ρ Â where neither clip is binding."""
    limit = surrogate.clamp_log_ratio
    raw = torch.where(active, tokens.logprobs - widen(tokens.old), 0.0)
    near = raw.clamp(-limit, limit)
    rho, clamped = bounded_ratio(near), raw.abs() > limit
    far = raw.clamp(-RATIO_LIMIT, RATIO_LIMIT)  # as a rule the same, and then made once
    advantages = tokens.advantages
    weighted = torch.where(active, share * tokens.corrections * advantages, 0.0)
    up = advantages > 0
    bound = torch.where(up, 1.0 + surrogate.high, rho.new_full((), 1.0 - surrogate.low))
    binding = (rho - bound) * advantages > 0  # not where masked: ρ is 1 there
    odd = (raw - raw) != 0  # which is NaN where raw is not finite
    kept, stopped = torch.where(binding, bound, rho), binding | clamped | odd
    more: list[TokenMask] = []
    if surrogate.dual is not None:
        dual = (advantages < 0) & (kept > surrogate.dual)  # above 1, so not where masked
        kept, stopped, more = torch.where(dual, surrogate.dual, kept), stopped | dual, [dual]
    gradient = torch.where(stopped, 0.0, -weighted * rho)
    moved = excess_near(far, bounded_ratio(far))
    counted = (kept * weighted, rho - 1.0, moved, binding, binding & up, clamped, odd, *more)
    highest = torch.where(active, rho, -torch.inf).amax(dim=-1)
    minus_lowest = torch.where(active, -rho, -torch.inf).amax(dim=-1)
    return gradient, [_along(x) for x in counted], [highest, minus_lowest]


def _penalty(
    kl: KLTerm, tokens: Tokens, active: TokenMask, share: PerToken
) -> tuple[Tensor, list[PerSequence]]:
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
    bounded, moves = clamped, raw if kl.gradient == "value" else tokens.logprobs
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
    # Past ±1e15, and at NaN, nothing moves: ``logratio.straight_through``.
    coefficient = torch.where(moves.abs() <= LARGEST, coefficient, 0.0)
    found = [_along(x) for x in (value * share, value, clamped, bounded)]
    return tokens.kl_coef * share * coefficient, found


def _clamped(raw: PerToken, low: float, high: float) -> tuple[PerToken, TokenMask]:
    """raw inside an interval, and where it was not."""
    return raw.clamp(low, high), (raw < low) | (raw > high)


def _along(x: PerToken | TokenMask) -> PerSequence:
    """∑ over each row: rows first keeps the rounding small; counts are exact up to 2²⁴ tokens."""
    return (x if x.is_floating_point() else x.to(torch.float32)).sum(dim=-1)
