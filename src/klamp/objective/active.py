"""Active tokens as a sequence of their own: the t-th active token, whatever column it is in.

Returns, advantages and sums to come run on the active tokens as if the others were not there, so
that tool output inside a response, or padding anywhere, changes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from klamp.types import PerSequence, PerToken, TokenMask


@dataclass(frozen=True)
class Layout:
    """Where the active tokens of a mask stand, and where they go when rows are compacted."""

    mask: TokenMask
    source: Tensor | None
    """Flat positions of the active tokens; None where every row has them all in front."""
    target: Tensor | None
    full: bool = False
    """Every token is active, so there is nothing to move or to zero."""

    def compact(self, x: PerToken) -> PerToken:
        """Each row's active values moved to its front, zeros after them. May be x itself."""
        if self.full:
            return x
        if self.source is None or self.target is None:
            return torch.where(self.mask, x, 0.0)
        active = x.flatten().index_select(0, self.source)
        return x.new_zeros(x.numel()).index_copy_(0, self.target, active).view_as(x)

    @property
    def in_front(self) -> bool:
        """Every row is some active tokens and then none: nothing has to move."""
        return self.source is None

    def expand(self, x: PerToken) -> PerToken:
        """The inverse of ``compact``, for an x that is zero past a row's active tokens."""
        if self.source is None or self.target is None:
            return x
        active = x.flatten().index_select(0, self.target)
        return x.new_zeros(x.numel()).index_copy_(0, self.source, active).view_as(x)


def layout(mask: TokenMask) -> Layout:
    """The layout of a mask (one host sync)."""
    # Bytes, since max over them is ten times faster than any() over bools.
    bytes_ = mask.view(torch.uint8)
    late = bytes_[:, 1:] > bytes_[:, :-1]  # an active token after an inactive one
    if not late.numel() or not int(late.view(torch.uint8).max()):
        return Layout(mask, None, None, full=mask.numel() == 0 or bool(bytes_.min()))
    width = mask.shape[1]
    source = mask.flatten().nonzero().squeeze(1)
    lengths = mask.sum(dim=1)
    before = lengths.cumsum(0) - lengths
    row = source // width
    rank = torch.arange(len(source), device=mask.device) - before[row]
    return Layout(mask, source, row * width + rank)


def later(x: PerToken, mask: TokenMask) -> PerToken:
    """∑_{t'>t} xₜ' over the active tokens of the row."""
    x = torch.where(mask, x, 0.0)
    return x.flip(1).cumsum(dim=1).flip(1) - x


def place_on_last(scores: PerSequence, mask: TokenMask) -> PerToken:
    """The score on each row's last active token, zeros elsewhere; nothing on an empty row."""
    width = mask.shape[1]
    columns = torch.arange(1, width + 1, device=mask.device)
    last = (mask * columns).amax(dim=1, keepdim=True) if width else mask.sum(dim=1, keepdim=True)
    return torch.where(mask & (columns == last), scores[:, None], 0.0)
