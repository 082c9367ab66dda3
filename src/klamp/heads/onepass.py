"""Loss and gradient of a head in one pass, where a row's loss is known as soon as its softmax is.

The tiles of a block of rows are kept until its slopes are known: three matrix products with a
weight that learns, two with a frozen one, as many as with all logits in memory. The gradient is
made in the forward pass and handed over in the backward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from klamp.errors import NumericsError
from klamp.heads.passes import Block, Gradients, spread, survey
from klamp.heads.softmax import Slopes, Softmax
from klamp.heads.tiles import (
    Head,
    Labels,
    Store,
    blocks,
    columns_of,
    height,
    plain,
)
from klamp.types import Scalar

Rows = slice | Tensor
Answer = Callable[[slice, Softmax], tuple[Scalar, Slopes]]
"""The loss of the i-th to j-th of the chosen rows, and its slopes."""


def one_pass(
    head: Head,
    reference: Head | None,
    labels: Labels,
    rows: Tensor,
    answer: Answer,
    *,
    entropy_grad: bool,
    chunk: int | None,
) -> Scalar:
    """∑ loss over the chosen rows, with its gradient to hidden, weight and bias."""
    inputs = (head.hidden, head.weight, head.bias)
    into = Gradients(head, [x is not None and x.requires_grad for x in inputs])
    keep = ["p", *["x"] * entropy_grad, *["d"] * (reference is not None)]
    most = height(chunk, len(head.weight), kept=True)
    columns = columns_of(len(head.weight), min(most, len(rows)))
    parts = blocks(len(rows), most)
    tall = parts[0].stop
    store = Store(head, tall, columns, reference=reference is not None, keep=keep)
    total = head.hidden.new_zeros((), dtype=head.wide)
    with torch.no_grad(), plain(head.hidden):
        for part in parts:
            at = head.rows(rows[part])
            beside = None if reference is None else reference.rows(rows[part])
            block = Block(at, beside, labels[rows[part]], columns, store)
            found = survey(block)
            loss, slopes = answer(part, found)
            spread(block, rows[part], found, slopes, into)
            total += loss
        grads = into.narrowed([head.wide if x is None else x.dtype for x in inputs])
    return _Known.apply(total, [grads], *inputs)


class _Known(torch.autograd.Function):
    """A number whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, grads: list[list[Tensor | None]], *_: Any) -> Tensor:
        ctx.grads = grads
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *outer: Tensor
    ) -> tuple[Tensor | None, ...]:
        if not ctx.grads:
            raise NumericsError(
                "the gradients of this loss were handed over in its first backward; call it again "
                "for a second one"
            )
        grads = ctx.grads.pop()  # not kept here, so that they become .grad without a copy
        if bool(outer[0] != 1.0):
            grads = [None if g is None else g.mul_(outer[0]) for g in grads]
        return None, None, *grads
