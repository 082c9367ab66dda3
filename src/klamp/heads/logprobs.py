"""The log-prob of each label and the entropy, from hidden states and the head's weight.

Forward and backward go through tiles of logits, and make them twice: a weight that learns costs
four matrix products instead of three, and no tensor of tokens × vocabulary. A frozen weight costs
two, as it does with all logits in memory.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from klamp.heads.passes import Block, Gradients, spread, survey
from klamp.heads.softmax import Slopes, Softmax, joined
from klamp.heads.tiles import (
    Bias,
    Everywhere,
    Head,
    Labels,
    PerRow,
    Store,
    Weight,
    as_rows,
    blocks,
    check_labels,
    columns_of,
    height,
    plain,
)

At = Float[Tensor, "*shape"]
LabelsAt = Int[Tensor, "*shape"]


def label_logprobs(
    hidden: Everywhere,
    weight: Weight,
    labels: LabelsAt,
    *,
    bias: Bias | None = None,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    chunk: int | None = None,
) -> tuple[At, At]:
    """log p(label) and H(p) at each position, p = softmax((h Wᵀ + b) / temperature).

    The entropy has a gradient where ``entropy_grad`` asks for it. ``chunk`` is the number of rows
    at a time. A position whose outputs get no gradient gives none, whatever is in its hidden state.
    """
    head = as_rows(hidden, weight, bias, temperature)
    ids = labels.reshape(-1)
    check_labels(ids, len(weight))
    found = head_outputs(head, None, ids, entropy_grad=entropy_grad, chunk=chunk)
    return found.logprobs.view(labels.shape), found.entropy.view(labels.shape)


class Outputs(NamedTuple):
    """What a head says at each row."""

    logprobs: PerRow
    entropy: PerRow
    kl: PerRow | None


def head_outputs(
    head: Head, reference: Head | None, labels: Labels, *, entropy_grad: bool, chunk: int | None
) -> Outputs:
    """log p(label), H(p) and, with a reference, KL(p ‖ q), with gradients to the head."""
    rows = height(chunk, len(head.weight))
    columns = columns_of(len(head.weight), min(rows, len(labels)))
    plan = _Plan(labels, reference, head.temperature, entropy_grad, rows, columns)
    return Outputs(*_Outputs.apply(head.hidden, head.weight, head.bias, plan))


class _Plan(NamedTuple):
    labels: Labels
    reference: Head | None
    temperature: float
    entropy_grad: bool
    rows: int
    columns: list[slice]

    def store(self, head: Head, rows: int) -> Store:
        """Room for tiles that are used in turn."""
        return Store(head, rows, self.columns, reference=self.reference is not None)

    def block(self, head: Head, rows: slice | Tensor, store: Store) -> Block:
        """Some rows."""
        reference = None if self.reference is None else self.reference.rows(rows)
        return Block(head.rows(rows), reference, self.labels[rows], self.columns, store)


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        head = Head(hidden, weight, bias, plan.temperature)
        simple = plan.reference is None and not plan.entropy_grad
        frozen = ctx.needs_input_grad[:3] == (True, False, False)
        mean = hidden.new_empty(hidden.shape, dtype=head.wide) if simple and frozen else None
        parts: list[Softmax] = []
        cut = blocks(len(hidden), plan.rows)
        store = plan.store(head, cut[0].stop)
        with plain(hidden):
            for rows in cut:
                block = plan.block(head, rows, store)
                parts.append(survey(block, None if mean is None else mean[rows]))
        found = joined(parts)
        ctx.plan, ctx.found, ctx.mean = plan, found, mean
        ctx.save_for_backward(hidden, weight, bias)
        ctx.set_materialize_grads(False)
        if not plan.entropy_grad:
            ctx.mark_non_differentiable(found.entropy)
        return found.logprobs, found.entropy, found.kl

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        plan, head = ctx.plan, Head(hidden, weight, bias, ctx.plan.temperature)
        into, slopes = Gradients(head, ctx.needs_input_grad[:3]), Slopes(*grads)
        # A row that nothing is asked of adds nothing: 0 · NaN would.
        asked = torch.stack([g != 0 for g in grads if g is not None]).any(dim=0)
        rows = asked.nonzero().squeeze(1)
        with plain(hidden):
            if ctx.mean is not None:
                _by_mean(head, plan.labels, ctx.mean, slopes, rows, into)
            elif len(rows):
                _by_tiles(head, plan, ctx.found, slopes, rows, into)
        dtypes = [x.dtype if x is not None else head.wide for x in ctx.saved_tensors]
        return *into.narrowed(dtypes), None


def _by_mean(
    head: Head, labels: Labels, mean: Tensor, slopes: Slopes, rows: Tensor, into: Gradients
) -> None:
    """dh = g (W_label − ∑ᵥ p(v) Wᵥ) / temperature."""
    assert slopes.logprobs is not None and into.hidden is not None
    by = head.weight[labels[rows]].to(mean.dtype).sub_(mean[rows])
    into.hidden[rows] = by.mul_((slopes.logprobs[rows] / head.temperature)[:, None])


def _by_tiles(
    head: Head, plan: _Plan, found: Softmax, slopes: Slopes, rows: Tensor, into: Gradients
) -> None:
    cut = blocks(len(rows), plan.rows)
    store = plan.store(head, cut[0].stop)
    for part in cut:
        at = rows[part] if len(rows) < len(head.hidden) else part
        here = Slopes(*(None if s is None else s[at] for s in slopes))
        spread(plan.block(head, at, store), at, found.at(at), here, into)
