"""The policy and KL terms in one pass over the tokens, on the CPU: value, metrics and gradient.

What is meant is in ``terms.policy_term`` and ``terms.kl_term``. Here the gradient is written down

    − ∂/∂log π  =  w Â ρ [not clipped]  −  β s c,     w = share · correction,  s = share,

with c the coefficient of the KL term's gradient, and is made together with the value, in blocks of
tokens whose scratch stays in the processor's cache. A block is done this way when it is ordinary:
no clamp changes anything in it and every number is finite. Any other block goes to the terms.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from klamp.objective.kl import KLTerm
from klamp.objective.logratio import EXCESS_LIMIT, LARGEST, growth
from klamp.objective.losses import ClippedSurrogate, Surrogate
from klamp.objective.metrics import MAX, MIN, SUM, Metric, merge
from klamp.objective.terms import Term, kl_term, policy_term
from klamp.types import Batch, PerToken, Targets

BLOCK = 1 << 16
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
"""Masking is done on the bits of a number: x AND 0 is 0, also for NaN, and is fast."""


def fits(
    surrogate: Surrogate, kl: KLTerm | None, logprobs: PerToken, batch: Batch, targets: Targets
) -> bool:
    """Whether each token's terms depend on that token alone, in a form that is written down."""
    if torch.compiler.is_compiling() or not logprobs.is_cpu or logprobs.dtype not in BITS:
        return False
    if not isinstance(surrogate, ClippedSurrogate) or surrogate.ratio != "token":
        return False
    given = (batch.old_logprobs, batch.ref_logprobs, targets.advantages, targets.corrections)
    if any(x is not None and x.dtype.itemsize > logprobs.dtype.itemsize for x in given):
        return False
    if kl is None:
        return True
    if kl.weighting is not None or kl.estimator not in ("k1", "k2", "k3"):
        return False
    return batch.ref_logprobs is not None and (
        kl.gradient != "sequence" or targets.kl_to_come is not None
    )


def fused_term(
    surrogate: Surrogate,
    kl: KLTerm | None,
    logprobs: PerToken,
    batch: Batch,
    targets: Targets,
    shares: PerToken,
) -> Term:
    """The policy term and the KL term as one; ``fits`` says for what."""
    assert isinstance(surrogate, ClippedSurrogate)
    wants_gradient = logprobs.requires_grad and torch.is_grad_enabled()
    with torch.no_grad():
        down = torch.empty(logprobs.shape, dtype=logprobs.dtype) if wants_gradient else None
        work = _Work(surrogate, kl, targets.kl_coef)
        sums, odd = _Sums(), list[Term]()
        for block in _blocks(logprobs, batch, targets, shares, down):
            found = work.ordinary(block)
            if found is None:
                odd.append(work.by_terms(block))
            else:
                sums = sums.plus(found)
        term = _report(sums, targets.kl_coef, logprobs, with_kl=kl is not None)
        for other in odd:
            term = Term(term.loss + other.loss, merge(term.metrics, other.metrics))
    return term if down is None else Term(_Attached.apply(logprobs, term.loss, down), term.metrics)


class _Block(NamedTuple):
    """Some tokens in a row, and rows of scratch as long, as numbers and as bits."""

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    corrections: Tensor
    shares: Tensor
    mask: Tensor
    ref: Tensor | None
    to_come: Tensor | None
    down: Tensor | None
    """Where the negative gradient goes."""
    scratch: tuple[Tensor, ...]
    bits: tuple[Tensor, ...]


class _Sums(NamedTuple):
    """What ordinary blocks add to the loss and the metrics."""

    tokens: float = 0.0
    growth: float = 0.0
    """∑ (ρ − 1)."""
    moved: float = 0.0
    """∑ (ρ − 1 − log ρ)."""
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    gain: float = 0.0
    """∑ w · min(ρ Â, clip(ρ) Â)."""
    kl: float = 0.0
    kl_share: float = 0.0
    """∑ s · KL."""
    low: float = math.inf
    """The smallest log ρ."""
    high: float = -math.inf

    def plus(self, other: "_Sums") -> "_Sums":
        """Both together."""
        if not self.tokens:
            return other
        sums = [a + b for a, b in zip(self[:-2], other[:-2], strict=True)]
        return _Sums(*sums, low=min(self.low, other.low), high=max(self.high, other.high))


class _Ends(NamedTuple):
    """The smallest and the largest of some numbers."""

    low: float
    high: float

    def inside(self, low: float, high: float) -> bool:
        """Whether all of them are in the interval; NaN is not."""
        return low <= self.low and self.high <= high


@dataclass(frozen=True)
class _Work:
    surrogate: ClippedSurrogate
    kl: KLTerm | None
    kl_coef: float

    def ordinary(self, block: _Block) -> _Sums | None:
        """The block's sums, its gradient written; None where a clamp or worse is at work."""
        active = block.mask.to(block.bits[0].dtype).neg_()
        share = block.scratch[0]
        torch.bitwise_and(block.shares.view(active.dtype), active, out=block.bits[0])
        torch.gt(block.bits[0], 0, out=active).neg_()
        sums = self.policy(block, share, active)
        if sums is None or self.kl is None:
            return sums
        kl = self.penalty(self.kl, block, share, active)
        return None if kl is None else sums._replace(kl=kl[0], kl_share=kl[1])

    def policy(self, block: _Block, share: Tensor, active: Tensor) -> _Sums | None:
        """∑ w · min(ρ Â, clip(ρ) Â); leaves w Â ρ in ``down``, 0 where the clip is binding."""
        _, weight, x, y, rho = block.scratch
        tokens = float(torch.gt(share, 0, out=x).sum())
        torch.sub(block.logprobs, block.old, out=x)
        block.bits[2].bitwise_and_(active)
        ends = _ends(x)
        limit = min(self.surrogate.clamp_log_ratio, EXCESS_LIMIT)
        dual = math.inf if self.surrogate.dual is None else math.log(self.surrogate.dual)
        if not ends.inside(-limit, min(limit, dual)):
            return None
        growth(x, *ends, out=y, ratio=rho)
        grown, moved = float(y.sum()), float(y.sub_(x).sum())
        if tokens < len(x):  # a masked token's log-ratio of 0 is no extreme
            ends = _ends_where(active, x, ends)
        torch.mul(share, block.corrections, out=weight)
        gain, low, high = self.clip(block, weight)
        if not math.isfinite(gain):
            return None
        return _Sums(tokens, grown, moved, low, high, gain, low=ends.low, high=ends.high)

    def clip(self, block: _Block, weight: Tensor) -> tuple[float, float, float]:
        """The gain, and at how many tokens the clip is binding, at its lower and its upper end."""
        _, _, x, y, rho = block.scratch
        advantages, down = block.advantages, block.down
        torch.clamp(rho, 1.0 - self.surrogate.low, 1.0 + self.surrogate.high, out=y)
        y.mul_(advantages)
        plain = rho.mul_(advantages)
        loose = torch.le(plain, y, out=x)
        gain = float(torch.dot(torch.minimum(plain, y, out=y), weight))
        if down is not None:
            torch.mul(plain.mul_(loose), weight, out=down)
        clipped = len(x) - float(loose.sum())
        up = torch.gt(advantages, 0, out=y)
        high = float(up.sum()) - float(torch.dot(up, loose)) if clipped else 0.0
        return gain, clipped - high, high

    def penalty(
        self, kl: KLTerm, block: _Block, share: Tensor, active: Tensor
    ) -> tuple[float, float] | None:
        """∑ KL and ∑ s · KL; takes β s c from ``down``."""
        _, spare, x, y, _ = block.scratch
        assert block.ref is not None
        torch.sub(block.ref, block.logprobs, out=x)  # −d
        block.bits[2].bitwise_and_(active)
        ends = _ends(x)
        low, high = kl.bounds[kl.estimator]
        near, far = kl.bounds["coefficient"]
        if not ends.inside(-min(high, far), -max(low, near)):
            return None
        coefficient = x  # of the token and sequence forms, and of k2: d, here with its sign turned
        if kl.estimator == "k1":
            value = torch.neg(x, out=spare)
        elif kl.estimator == "k2":
            value = torch.mul(x, x, out=spare).mul_(0.5)
        else:
            growth(x, *ends, out=y)
            value = torch.sub(y, x, out=spare)
        sums = float(value.sum()), float(torch.dot(value, share))
        if not self.pull(kl, block, x, share, active):
            return None
        return sums

    def pull(
        self, kl: KLTerm, block: _Block, minus_d: Tensor, share: Tensor, active: Tensor
    ) -> bool:
        """Take β s c from ``down``; False where a sum to come is at its limit."""
        grown, spare = block.scratch[3], block.scratch[1]
        down = block.down
        minus_c = minus_d
        if kl.gradient == "value" and kl.estimator == "k3":
            minus_c = grown
        elif kl.gradient == "value" and kl.estimator == "k1":
            minus_c = grown.fill_(-1.0)
        elif kl.gradient == "sequence":
            assert block.to_come is not None
            spare.copy_(block.to_come)
            block.bits[1].bitwise_and_(active)
            limit = kl.clamp_to_come or LARGEST
            if not _ends(spare).inside(-math.nextafter(limit, 0.0), math.nextafter(limit, 0.0)):
                return False
            minus_c = minus_d.sub_(spare)
        if down is not None:
            down.addcmul_(minus_c, share, value=self.kl_coef)
        return True

    def by_terms(self, block: _Block) -> Term:
        """The same from ``policy_term`` and ``kl_term``, which know every case."""
        names = ("logprobs", "old", "advantages", "corrections", "shares", "mask", "ref", "to_come")
        rows = {n: None if (x := getattr(block, n)) is None else x[None] for n in names}
        logprobs, shares, mask = rows["logprobs"], rows["shares"], rows["mask"]
        one = shares.new_ones(1)
        batch = Batch(
            mask=mask,
            scores=one,
            groups=one.long(),
            old_logprobs=rows["old"],
            ref_logprobs=rows["ref"],
        )
        targets = Targets(
            mask=mask,
            weights=one,
            advantages=rows["advantages"],
            corrections=rows["corrections"],
            kl_coef=self.kl_coef,
            kl_to_come=rows["to_come"],
        )
        with torch.enable_grad():
            logprobs = logprobs.detach().requires_grad_(block.down is not None)
            given = (logprobs, batch, targets, mask & (shares > 0), shares)
            terms = [policy_term(self.surrogate, *given)]
            if self.kl is not None:
                terms.append(kl_term(self.kl, *given, None))
            loss = torch.stack([term.loss for term in terms]).sum()
        if block.down is not None:
            (gradient,) = torch.autograd.grad(loss, logprobs)
            torch.neg(gradient[0], out=block.down)
        return Term(loss.detach(), {k: m for term in terms for k, m in term.metrics.items()})


def _blocks(
    logprobs: PerToken, batch: Batch, targets: Targets, shares: PerToken, down: Tensor | None
) -> Iterator[_Block]:
    """The tokens, ``BLOCK`` at a time, in whatever row they are."""
    dtype, width = logprobs.dtype, min(BLOCK, logprobs.numel())
    given = (
        *(logprobs, batch.old_logprobs, targets.advantages, targets.corrections, shares),
        *(targets.mask, batch.ref_logprobs, targets.kl_to_come, down),
    )
    flat = [x if x is None else _row(x, dtype) for x in given]
    scratch = torch.empty(5, width, dtype=dtype)
    space = scratch.unbind(), scratch.view(BITS[dtype]).unbind()
    for start in range(0, logprobs.numel(), BLOCK):
        tokens = flat
        if logprobs.numel() > BLOCK:
            tokens = [x if x is None else x[start : start + BLOCK] for x in flat]
            if len(tokens[0]) < width:
                rows = scratch[:, : len(tokens[0])]
                space = rows.unbind(), rows.view(BITS[dtype]).unbind()
        yield _Block(*tokens, *space)


def _row(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x flat, and in the dtype of the log-probs if it is a number."""
    x = x.reshape(-1)
    return x if x.dtype in (dtype, torch.bool) else x.to(dtype)


def _ends(x: Tensor) -> _Ends:
    low, high = torch.aminmax(x)
    return _Ends(float(low), float(high))


def _ends_where(active: Tensor, x: Tensor, ends: _Ends) -> _Ends:
    """The ends of the active x, given those of all, where the others are 0."""
    if ends.low < 0 < ends.high:
        return ends
    kept = x[active.bool()]
    return _ends(kept) if len(kept) else _Ends(math.inf, -math.inf)


def _report(s: _Sums, kl_coef: float, like: Tensor, *, with_kl: bool) -> Term:
    """The loss and the metrics of blocks in which nothing was clamped."""
    clipped, kl_loss = s.clipped_low + s.clipped_high, kl_coef * s.kl_share
    ends = math.exp(s.low), math.exp(s.high)
    numbers = (
        *(1.0, 0.0, s.tokens, s.tokens + s.growth, *ends, s.moved),
        *(s.clipped_low, s.clipped_high, clipped, -s.gain, s.kl, kl_loss),
    )
    values = torch.tensor(numbers, dtype=torch.float64).unbind()
    one, none, tokens, rho, least, most, moved, low, high, clips, policy, kl, penalty = values
    metrics = {
        "actor/pg_loss": Metric(policy, one, SUM),
        "actor/ratio_mean": Metric(rho, tokens),
        "actor/ratio_max": Metric(most, tokens, MAX),
        "actor/ratio_min": Metric(least, tokens, MIN),
        "actor/clip_frac": Metric(clips, tokens),
        "actor/clip_frac_low": Metric(low, tokens),
        "actor/clip_frac_high": Metric(high, tokens),
        "actor/dual_clip_frac": Metric(none, tokens),
        "actor/ratio_clamp_frac": Metric(none, tokens),
        "actor/old_kl": Metric(moved, tokens),
        "actor/nonfinite_tokens": Metric(none, one, SUM),
    }
    if with_kl:
        metrics |= {
            "actor/kl_loss": Metric(penalty, one, SUM),
            "actor/kl": Metric(kl, tokens),
            "actor/kl_clamp_frac": Metric(none, tokens),
            "actor/kl_coef_clamp_frac": Metric(none, tokens),
        }
    return Term(torch.tensor(kl_loss - s.gain, dtype=like.dtype), metrics)


class _Attached(torch.autograd.Function):
    """A loss whose negative gradient is already there."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, loss: Tensor, down: Tensor) -> Tensor:
        ctx.save_for_backward(down)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (down,) = ctx.saved_tensors
        return down * -grads[0], None, None
