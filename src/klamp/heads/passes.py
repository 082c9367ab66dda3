"""The two passes over the tiles of a block of rows: one to know them, one for their gradient."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from klamp.heads.softmax import (
    OWN,
    WITH_REFERENCE,
    Slopes,
    Softmax,
    combined,
    compared,
    measured,
    own_softmax,
    slope,
)
from klamp.heads.tiles import Head, Labels, PerRow, Rooms, Store, Vectors


@dataclass(frozen=True, eq=False)
class Block:
    """Some rows of a head, those of a reference beside them, their labels, and room for tiles."""

    head: Head
    reference: Head | None
    labels: Labels
    columns: list[slice]
    store: Store

    def rooms(self, columns: slice) -> Rooms:
        """Where the tiles of some columns go."""
        return self.store.rooms(columns, len(self.head.hidden))


def survey(block: Block, mean: Vectors | None = None) -> Softmax:
    """Log-prob, entropy and KL of each row; tiles that are kept hold p̂, x and d.

    ``mean`` becomes ∑ᵥ p(v) Wᵥ, which is all that the gradient of a log-prob needs of a frozen
    head: d log p(label) / dh = W_label − ∑ᵥ p(v) Wᵥ.
    """
    rows, head = len(block.head.hidden), block.head
    fields = OWN if block.reference is None else WITH_REFERENCE
    statistics = head.hidden.new_empty(fields, len(block.columns), rows, dtype=head.wide)
    label = head.hidden.new_zeros(rows, dtype=head.wide)
    seen: Tensor | None = None
    for k, columns in enumerate(block.columns):
        p, x, d, spare = block.rooms(columns)
        w = head.vectors(columns)
        head.logits(w, columns, x)
        pick(label, x, block.labels, columns)
        found = measured(own_softmax(x, p), x, p, spare)
        if block.reference is not None and d is not None:
            reference_logits(block.reference, columns, d)
            found += compared(x, p, d, spare)
        torch.stack(found, out=statistics[:, k])
        if mean is not None:
            seen = average(mean, p @ w, seen, found[0] + found[1])
    return combined(statistics, label)


def reference_logits(reference: Head, columns: slice, out: Tensor) -> None:
    """The reference's logits at some columns."""
    reference.logits(reference.vectors(columns), columns, out)


def pick(label: PerRow, z: Tensor, labels: Labels, columns: slice) -> None:
    """label ← z at the label, where the label is among the columns."""
    at = labels - columns.start
    inside = (at >= 0) & (at < z.shape[1])
    chosen = z.gather(1, at.clamp(0, z.shape[1] - 1)[:, None]).squeeze(1)
    torch.where(inside, chosen, label, out=label)


def average(mean: Vectors, more: Tensor, seen: Tensor | None, size: PerRow) -> PerRow:
    """The mean of rows over all that was seen, and over what is added; the log of their size."""
    if seen is None:
        mean.copy_(more)
        return size
    total = torch.logaddexp(seen, size)
    mean.lerp_(more.to(mean.dtype), (size - total).exp()[:, None])
    return total


class Gradients:
    """Where the gradients of a head are added up, block by block; None where none is needed."""

    def __init__(self, head: Head, needed: Sequence[bool]) -> None:
        def room(x: Tensor | None, is_needed: bool) -> Tensor | None:
            return torch.empty_like(x, dtype=head.wide) if x is not None and is_needed else None

        pairs = zip((head.hidden, head.weight, head.bias), needed, strict=True)
        self.hidden, self.weight, self.bias = (room(x, n) for x, n in pairs)
        self.first = True
        if self.hidden is not None:
            self.hidden.zero_()  # rows that no block has

    def narrowed(self, dtypes: Sequence[torch.dtype]) -> list[Tensor | None]:
        """All of them in the dtypes of what they are the gradients of, saturated, never inf."""
        if self.first:
            for x in (self.weight, self.bias):
                _ = None if x is None else x.zero_()
        made: list[Tensor | None] = []
        for x, dtype in zip((self.hidden, self.weight, self.bias), dtypes, strict=True):
            if x is not None and dtype == torch.float16:
                limit = torch.finfo(dtype).max
                x.clamp_(-limit, limit)
            made.append(None if x is None else x.to(dtype))
        return made


def spread(
    block: Block, rows: slice | Tensor, found: Softmax, slopes: Slopes, into: Gradients
) -> None:
    """Add d loss / d(h, W, b) of the rows that a block has.

    dz = g · onehot(label) + p ∘ (…), with p ∘ (…) as ``softmax.slope`` has it. Tiles that were not
    kept are made again.
    """
    head, h = block.head, block.head.hidden
    by_hidden = h.new_zeros(h.shape, dtype=head.wide)
    for k, columns in enumerate(block.columns):
        p, x, d, _ = block.rooms(columns)
        w = head.vectors(columns)
        if not block.store.keep:
            remake(block, w, columns, slopes)
        matrix, scale = slope(p, x, d, k, found, slopes)
        matrix, scale = matrix.to(h.dtype), (scale / head.temperature)[:, None]
        if into.hidden is not None:
            by_hidden.addcmul_(matrix @ w, scale)
        if into.weight is not None:
            add_product(into.weight[columns], matrix, (h * scale).to(h.dtype), into.first)
        if into.bias is not None:
            add_product(into.bias[columns, None], matrix, scale.to(h.dtype), into.first)
    into.first = False
    if slopes.logprobs is not None:
        at_labels(block, slopes.logprobs / head.temperature, by_hidden, into)
    if into.hidden is not None:
        into.hidden[rows] = by_hidden


def remake(block: Block, w: Tensor, columns: slice, slopes: Slopes) -> None:
    """p̂, and x and d where they are needed, once more."""
    p, x, d, _ = block.rooms(columns)
    block.head.logits(w, columns, x)
    if slopes.entropy is None and slopes.kl is None:
        torch.softmax(x, dim=-1, out=p)
        return
    own_softmax(x, p)
    if block.reference is not None and d is not None and slopes.kl is not None:
        reference_logits(block.reference, columns, d)
        d.sub_(d.amax(dim=-1, keepdim=True))
        torch.sub(x, d, out=d)


def add_product(into: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """into += aᵀ b, added up in the dtype of ``into``; = where it is the first."""
    if into.dtype == a.dtype:
        into.addmm_(a.t(), b, beta=0.0 if first else 1.0)
        return
    if first:
        into.zero_()
    into.add_(a.t() @ b)


def at_labels(block: Block, g: PerRow, by_hidden: Tensor, into: Gradients) -> None:
    """What the log-prob of the label itself adds: g · W_label to h, g · h to W_label, g to b."""
    head, labels = block.head, block.labels
    if into.hidden is not None:
        by_hidden.addcmul_(head.vectors(labels), g[:, None])
    if into.weight is not None:
        into.weight.index_add_(0, labels, head.hidden * g[:, None])
    if into.bias is not None:
        into.bias.index_add_(0, labels, g)
