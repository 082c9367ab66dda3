"""Hidden states to loss: the head and the objective together, without logits in memory.

A token-wise objective needs nothing of a token but its own log-prob, entropy and KL. Then one pass
makes loss and gradient. Others (a ratio or a KL of the whole response) first need all log-probs:
two passes, which make the logits twice. Tokens that the loss does not count are left out of both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from klamp.errors import DataError
from klamp.heads.exact import reference_head
from klamp.heads.logprobs import head_outputs
from klamp.heads.onepass import one_pass
from klamp.heads.softmax import Slopes, Softmax
from klamp.heads.tiles import Bias, Head, Weight, as_rows, check_labels
from klamp.objective.metrics import Metric, merge
from klamp.objective.objective import Objective
from klamp.objective.terms import token_wise, value_term
from klamp.types import Batch, LossOutput, PerToken, Scalar, Targets

Hidden = Float[Tensor, "B T H"]
TokenIds = Int[Tensor, "B T"]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadLoss:
    """The loss, and what the head said at each token: detached, 0 where it was not asked."""

    output: LossOutput
    logprobs: PerToken
    entropy: PerToken


def head_loss(
    objective: Objective,
    hidden: Hidden,
    weight: Weight,
    labels: TokenIds,
    batch: Batch,
    targets: Targets,
    shares: PerToken,
    *,
    bias: Bias | None = None,
    temperature: float = 1.0,
    values: PerToken | None = None,
    ref_hidden: Float[Tensor, "B T R"] | None = None,
    ref_weight: Float[Tensor, "V R"] | None = None,
    ref_bias: Bias | None = None,
    chunk: int | None = None,
) -> HeadLoss:
    """objective.loss(log softmax((h Wᵀ + b) / T)[label], …), its entropy and its exact KL included.

    The loss can be differentiated once, by hidden, weight, bias and values. With ``ref_hidden``
    and ``ref_weight`` the KL over the full vocabulary is made for ``estimator="exact"``.
    """
    if labels.shape != batch.mask.shape or hidden.shape[:2] != labels.shape:
        raise DataError(
            f"head_loss got hidden {list(hidden.shape)} and labels {list(labels.shape)} but "
            f"Batch.mask has {list(batch.mask.shape)}; all cover response positions only"
        )
    head = as_rows(hidden, weight, bias, temperature)
    reference = _reference(objective, head, ref_hidden, ref_weight, ref_bias)
    work = _Work(replace(objective, value_loss=None), batch, targets, shares, chunk)
    inputs = (head.hidden, head.weight, head.bias)
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    run = (
        _in_one_pass
        if learns and token_wise(objective.surrogate, objective.kl, targets)
        else _in_two_passes
    )
    made = run(work, head, reference, labels.reshape(-1))
    if objective.value_loss is None:
        return made
    value = value_term(objective.value_loss, values, batch, targets, shares)
    metrics = {**made.output.metrics, **value.metrics}
    return replace(made, output=LossOutput(loss=made.output.loss + value.loss, metrics=metrics))


@dataclass(frozen=True, eq=False)
class _Work:
    objective: Objective
    batch: Batch
    targets: Targets
    shares: PerToken
    chunk: int | None

    @property
    def entropy_grad(self) -> bool:
        return self.objective.entropy_coef is not None


def _reference(
    objective: Objective,
    head: Head,
    hidden: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Head | None:
    kl = objective.kl
    exact = kl is not None and kl.where == "loss" and kl.estimator == "exact"
    if not exact:
        return None
    if hidden is None or weight is None:
        raise DataError(
            "KLTerm(estimator='exact') needs the reference's distribution, got ref_hidden=None or "
            "ref_weight=None; give head_loss both"
        )
    return reference_head(head, hidden, weight, bias)


def _in_two_passes(work: _Work, head: Head, reference: Head | None, labels: Tensor) -> HeadLoss:
    """The log-probs of all tokens, the objective on [B, T], then back through the logits again."""
    mask = work.batch.mask | work.targets.mask  # a sequence's KL is also that of filtered tokens
    rows = mask.reshape(-1).nonzero().squeeze(1)
    check_labels(labels[rows], len(head.weight))
    at = replace(head, hidden=head.hidden[rows])
    beside = None if reference is None else replace(reference, hidden=reference.hidden[rows])
    found = head_outputs(at, beside, labels[rows], entropy_grad=work.entropy_grad, chunk=work.chunk)
    logprobs, entropy, kl = (None if x is None else _expanded(x, rows, mask) for x in found)
    assert logprobs is not None and entropy is not None
    out = work.objective.loss(
        logprobs, work.batch, work.targets, work.shares, entropy=entropy, exact_kl=kl
    )
    return HeadLoss(output=out, logprobs=logprobs.detach(), entropy=entropy.detach())


def _expanded(x: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    return x.new_zeros(like.numel()).index_copy(0, rows, x).view(like.shape)


def _in_one_pass(work: _Work, head: Head, reference: Head | None, labels: Tensor) -> HeadLoss:
    """Block by block: log-probs, the objective's loss and slopes, and the gradient."""
    counted, watched = _rows_of(work)
    check_labels(labels[torch.cat([counted, watched])], len(head.weight))
    tokens = _as_column(work, counted)
    logprobs, entropy = (head.hidden.new_zeros(len(labels), dtype=head.wide) for _ in range(2))
    metrics: dict[str, Metric] = {}

    def answer(part: slice, found: Softmax) -> tuple[Scalar, Slopes]:
        logprobs[counted[part]], entropy[counted[part]] = found.logprobs, found.entropy
        loss, slopes, counts = _slopes(tokens, part, found)
        metrics.update(merge(metrics, counts))
        return loss, slopes

    loss = one_pass(
        head,
        reference,
        labels,
        counted,
        answer,
        entropy_grad=work.entropy_grad,
        chunk=work.chunk,
    )
    if len(watched):
        at = replace(head, hidden=head.hidden[watched])
        with torch.no_grad():
            seen = head_outputs(at, None, labels[watched], entropy_grad=False, chunk=work.chunk)
        logprobs[watched], entropy[watched] = seen.logprobs, seen.entropy
    shape = work.shares.shape
    return HeadLoss(
        output=LossOutput(loss=loss, metrics=metrics),
        logprobs=logprobs.view(shape),
        entropy=entropy.view(shape),
    )


def _rows_of(work: _Work) -> tuple[Tensor, Tensor]:
    """The tokens that have a share of the loss, and those of the loss mask that have none."""
    mask, has_share = work.targets.mask.reshape(-1), work.shares.reshape(-1) > 0
    return (mask & has_share).nonzero().squeeze(1), (mask & ~has_share).nonzero().squeeze(1)


def _as_column(work: _Work, rows: Tensor) -> _Work:
    """Each token as a sequence of its own, so that any slice of them is a batch."""

    def column(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.reshape(-1)[rows][:, None]

    batch, targets, count = work.batch, work.targets, len(rows)
    tokens = Batch(
        mask=_given(column(batch.mask)),
        scores=work.shares.new_zeros(count),
        groups=rows,
        old_logprobs=_given(column(batch.old_logprobs)),
        ref_logprobs=column(batch.ref_logprobs),
    )
    towards = Targets(
        mask=_given(column(targets.mask)),
        weights=work.shares.new_ones(count),
        advantages=_given(column(targets.advantages)),
        corrections=_given(column(targets.corrections)),
        kl_coef=targets.kl_coef,
        kl_to_come=column(targets.kl_to_come),
    )
    return replace(work, batch=tokens, targets=towards, shares=_given(column(work.shares)))


def _given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _slopes(
    work: _Work, part: slice, found: Softmax
) -> tuple[Tensor, Slopes, Mapping[str, Metric]]:
    """The loss of some tokens, and its derivative by their log-prob, entropy and KL."""
    entropy = found.entropy if work.entropy_grad else None
    leaves = [
        None if x is None else x[:, None].detach().requires_grad_()
        for x in (found.logprobs, entropy, found.kl)
    ]
    logprobs, own_entropy, kl = leaves
    with torch.enable_grad():
        out = work.objective.loss(
            _given(logprobs),
            work.batch.select(part),
            work.targets.select(part),
            work.shares[part],
            entropy=found.entropy[:, None] if own_entropy is None else own_entropy,
            exact_kl=kl,
        )
    asked = [x for x in leaves if x is not None]
    grads = iter(torch.autograd.grad(out.loss, asked, allow_unused=True, materialize_grads=True))
    by = (None if x is None else next(grads).squeeze(1) for x in leaves)
    return out.loss.detach(), Slopes(*by), out.metrics
