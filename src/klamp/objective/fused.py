"""The policy and KL terms in one pass over the tokens, on the CPU: value, metrics and gradient.

What is meant is in ``terms.policy_term`` and ``terms.kl_term``. Here the gradient is written down
and made together with the value, in blocks of tokens whose scratch stays in the processor's cache
(``block.py``). A block that is not ordinary, because a clamp or worse is at work in it, goes to the
terms.
"""

import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from klamp.objective.block import ROWS, Block, Space, Sums, ordinary, space
from klamp.objective.kl import KLTerm
from klamp.objective.losses import ClippedSurrogate, Surrogate
from klamp.objective.metrics import MAX, MIN, SUM, Metric, merge
from klamp.objective.terms import Attached, Term, kl_term, policy_term
from klamp.types import Batch, PerToken, Targets

BLOCK = 1 << 17


def fits(logprobs: PerToken, batch: Batch, targets: Targets) -> bool:
    """Whether the tensors are such that they can be worked on here."""
    if not logprobs.is_cpu or logprobs.dtype not in (torch.float32, torch.float64):
        return False
    given = (batch.old_logprobs, batch.ref_logprobs, targets.advantages, targets.corrections)
    return all(x is None or x.dtype.itemsize <= logprobs.dtype.itemsize for x in given)


def fused_term(
    surrogate: Surrogate,
    kl: KLTerm | None,
    logprobs: PerToken,
    batch: Batch,
    targets: Targets,
    shares: PerToken,
) -> Term:
    """The policy term and the KL term as one; ``token_wise`` and ``fits`` say for what."""
    assert isinstance(surrogate, ClippedSurrogate)
    wants_gradient = logprobs.requires_grad and torch.is_grad_enabled()
    with torch.no_grad():
        gradient = logprobs.new_empty(logprobs.shape) if wants_gradient else None
        sums, odd = Sums(), list[Term]()
        for block, room in _blocks(kl, logprobs, batch, targets, shares, gradient):
            found = ordinary(surrogate, kl, targets.kl_coef, block, room)
            if found is None:
                odd.append(_by_terms(surrogate, kl, targets.kl_coef, block))
            else:
                sums = sums.plus(found)
        term = _report(sums, targets.kl_coef, logprobs, with_kl=kl is not None)
        for other in odd:
            term = Term(term.loss + other.loss, merge(term.metrics, other.metrics))
    if gradient is not None:
        term = Term(Attached.apply(logprobs, term.loss, gradient), term.metrics)
    return term


def _blocks(
    kl: KLTerm | None,
    logprobs: PerToken,
    batch: Batch,
    targets: Targets,
    shares: PerToken,
    gradient: Tensor | None,
) -> Iterator[tuple[Block, Space]]:
    """The tokens, ``BLOCK`` at a time, in whatever row they are, with room to work in."""
    dtype, total = logprobs.dtype, logprobs.numel()

    def part(x: Tensor, start: int) -> Tensor:
        x = x.reshape(-1)
        x = x if x.dtype in (dtype, torch.bool) else x.to(dtype)
        return x if total <= BLOCK else x[start : start + BLOCK]

    ref = None if kl is None else batch.ref_logprobs
    for start in range(0, total, BLOCK):
        block = Block(
            logprobs=part(logprobs, start),
            old=part(batch.old_logprobs, start),
            advantages=part(targets.advantages, start),
            corrections=part(targets.corrections, start),
            shares=part(shares, start),
            mask=part(targets.mask, start),
            ref=None if ref is None else part(ref, start),
            to_come=None if targets.kl_to_come is None else part(targets.kl_to_come, start),
            gradient=None if gradient is None else part(gradient, start),
        )
        yield block, _room(min(BLOCK, total - start), logprobs)


_KEPT = threading.local()


def _room(width: int, like: Tensor) -> Space:
    """Scratch of a block, kept by each thread: fresh pages would cost more than the arithmetic."""
    if getattr(_KEPT, "size", None) != (width, like.dtype):
        if getattr(_KEPT, "dtype", None) != like.dtype:
            with torch.inference_mode(mode=False):  # it may outlive the inference it was made in
                _KEPT.rows, _KEPT.dtype = like.new_empty(ROWS, BLOCK), like.dtype
        _KEPT.space = space(_KEPT.rows[:, :width])
        _KEPT.size = width, like.dtype
    return _KEPT.space


def _by_terms(surrogate: ClippedSurrogate, kl: KLTerm | None, kl_coef: float, block: Block) -> Term:
    """The same from ``policy_term`` and ``kl_term``, which know every case."""
    one, mask, shares = block.shares.new_ones(1), block.mask[None], block.shares[None]
    batch = Batch(
        mask=mask,
        scores=one,
        groups=one.long(),
        old_logprobs=block.old[None],
        ref_logprobs=None if block.ref is None else block.ref[None],
    )
    targets = Targets(
        mask=mask,
        weights=one,
        advantages=block.advantages[None],
        corrections=block.corrections[None],
        kl_coef=kl_coef,
        kl_to_come=None if block.to_come is None else block.to_come[None],
    )
    with torch.enable_grad():
        logprobs = block.logprobs[None].detach().requires_grad_(block.gradient is not None)
        given = (logprobs, batch, targets, mask & (shares > 0), shares)
        terms = [policy_term(surrogate, *given)]
        if kl is not None:
            terms.append(kl_term(kl, *given, None))
        loss = torch.stack([term.loss for term in terms]).sum()
    if block.gradient is not None:
        (gradient,) = torch.autograd.grad(loss, logprobs)
        block.gradient.copy_(gradient[0])
    return Term(loss.detach(), {k: m for term in terms for k, m in term.metrics.items()})


def _report(s: Sums, kl_coef: float, like: Tensor, *, with_kl: bool) -> Term:
    """The loss and the metrics of blocks in which nothing was clamped."""
    tokens, penalty = s.tokens, kl_coef * s.kl_share
    metrics = {
        "actor/pg_loss": Metric(-s.gain, 1.0, SUM),
        "actor/ratio_mean": Metric(s.ratio, tokens),
        "actor/ratio_max": Metric(math.exp(s.high), tokens, MAX),
        "actor/ratio_min": Metric(math.exp(s.low), tokens, MIN),
        "actor/clip_frac": Metric(s.clipped_low + s.clipped_high, tokens),
        "actor/clip_frac_low": Metric(s.clipped_low, tokens),
        "actor/clip_frac_high": Metric(s.clipped_high, tokens),
        "actor/dual_clip_frac": Metric(0.0, tokens),
        "actor/ratio_clamp_frac": Metric(0.0, tokens),
        "actor/old_kl": Metric(s.moved, tokens),
        "actor/nonfinite_tokens": Metric(0.0, 1.0, SUM),
    }
    if with_kl:
        metrics |= {
            "actor/kl_loss": Metric(penalty, 1.0, SUM),
            "actor/kl": Metric(s.kl, tokens),
            "actor/kl_clamp_frac": Metric(0.0, tokens),
            "actor/kl_coef_clamp_frac": Metric(0.0, tokens),
        }
    return Term(like.new_tensor(penalty - s.gain), metrics)
