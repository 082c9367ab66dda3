"""The policy and KL terms in one pass over the tokens, on the CPU: value, metrics and gradient.

What is meant is in ``terms.policy_term`` and ``terms.kl_term``. Here the gradient is written down
and made together with the value, in blocks of tokens whose scratch stays in the processor's cache
(``block.py``). A block that is not ordinary, because a clamp or worse is at work in it, goes to the
terms.
"""

import threading
from typing import Any

import torch
from torch import Tensor

from klamp.arrays import HAS_NUMPY, Array, np
from klamp.objective.block import ROWS, Block, Space, ordinary, space
from klamp.objective.kl import KLTerm
from klamp.objective.losses import ClippedSurrogate, Surrogate
from klamp.objective.metrics import merge
from klamp.objective.sums import Sums, plus, report
from klamp.objective.terms import Attached, Term, kl_term, policy_term
from klamp.types import Batch, PerToken, Targets

BLOCK = 1 << 16


def fits(logprobs: PerToken, batch: Batch, targets: Targets) -> bool:
    """Whether the tensors are such that they can be worked on here."""
    if not HAS_NUMPY or not logprobs.is_cpu or logprobs.dtype not in (torch.float32, torch.float64):
        return False
    given = (batch.old_logprobs, batch.ref_logprobs, targets.advantages, targets.corrections)
    return logprobs.dtype == torch.float64 or torch.float64 not in [
        x.dtype for x in given if x is not None
    ]


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
    gradient = None
    if logprobs.requires_grad and torch.is_grad_enabled():
        gradient = torch.empty_like(logprobs, memory_format=torch.contiguous_format)
    sums, odd = None, list[Term]()
    with np.errstate(all="ignore"):  # what is masked may be rubbish
        for block in _blocks(kl, logprobs, batch, targets, shares, gradient):
            room = _room(len(block.mask), logprobs)
            found = ordinary(surrogate, kl, targets.kl_coef, block, room)
            if found is None:
                odd.append(_by_terms(surrogate, kl, targets.kl_coef, block))
            else:
                sums = plus(sums, found) if sums else found
    loss, metrics = report(sums or Sums(), targets.kl_coef, with_kl=kl is not None)
    for other in odd:
        loss, metrics = loss + float(other.loss), merge(metrics, other.metrics)
    if gradient is None:
        return Term(logprobs.new_tensor(float(loss)), metrics)
    return Term(Attached.apply(logprobs, loss, gradient), metrics)


def _blocks(
    kl: KLTerm | None,
    logprobs: PerToken,
    batch: Batch,
    targets: Targets,
    shares: PerToken,
    gradient: Tensor | None,
) -> list[Block]:
    """The tokens, ``BLOCK`` at a time, in whatever row they are."""
    dtype, total = logprobs.dtype, logprobs.numel()

    def array(x: Tensor | None) -> Any:
        if x is None:
            return None
        x = x.detach() if x.requires_grad else x
        return (x if x.dtype is dtype or x.dtype is torch.bool else x.to(dtype)).numpy().reshape(-1)

    whole = Block(
        array(logprobs),
        array(batch.old_logprobs),
        array(targets.advantages),
        array(targets.corrections),
        array(shares),
        array(targets.mask),
        ref=None if kl is None else array(batch.ref_logprobs),
        to_come=array(targets.kl_to_come),
        gradient=array(gradient),
    )
    if 0 < total <= BLOCK:
        return [whole]
    return [_part(whole, slice(start, start + BLOCK)) for start in range(0, total, BLOCK)]


def _part(block: Block, cut: slice) -> Block:
    parts: list[Any] = [None if x is None else x[cut] for x in block]
    return Block(*parts)


_KEPT = threading.local()


def _room(width: int, like: Tensor) -> Space:
    """Scratch of a block, kept by each thread: fresh pages would cost more than the arithmetic."""
    if getattr(_KEPT, "size", None) != (width, like.dtype):
        if getattr(_KEPT, "dtype", None) != like.dtype:
            _KEPT.numbers, _KEPT.dtype = like.new_empty(ROWS * BLOCK).numpy(), like.dtype
            _KEPT.marks = like.new_empty(2 * BLOCK, dtype=torch.bool).numpy()
        rows, marks = _KEPT.numbers[: ROWS * width], _KEPT.marks[: 2 * width]
        _KEPT.space = space(rows.reshape(ROWS, width), marks.reshape(2, width))
        _KEPT.size = width, like.dtype
    return _KEPT.space


def _by_terms(surrogate: ClippedSurrogate, kl: KLTerm | None, kl_coef: float, block: Block) -> Term:
    """The same from ``policy_term`` and ``kl_term``, which know every case."""
    old, shares, mask = _row(block.old), _row(block.shares), _row(block.mask)
    one = shares.new_ones(1)
    batch = Batch(
        mask=mask,
        scores=one,
        groups=one.long(),
        old_logprobs=old,
        ref_logprobs=None if block.ref is None else _row(block.ref),
    )
    targets = Targets(
        mask=mask,
        weights=one,
        advantages=_row(block.advantages),
        corrections=_row(block.corrections),
        kl_coef=kl_coef,
        kl_to_come=None if block.to_come is None else _row(block.to_come),
    )
    with torch.enable_grad():
        logprobs = _row(block.logprobs).requires_grad_(block.gradient is not None)
        given = (logprobs, batch, targets, mask & (shares > 0), shares)
        terms = [policy_term(surrogate, *given)]
        if kl is not None:
            terms.append(kl_term(kl, *given, None))
        loss = torch.stack([term.loss for term in terms]).sum()
    if block.gradient is not None:
        (gradient,) = torch.autograd.grad(loss, logprobs)
        _row(block.gradient).copy_(gradient)
    return Term(loss.detach(), {k: m for term in terms for k, m in term.metrics.items()})


def _row(x: Array) -> Tensor:
    """One row of tokens, in the same memory."""
    return torch.from_numpy(x)[None]
