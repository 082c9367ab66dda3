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
    """Which column each token goes to when its row's active tokens move to the front."""

    mask: TokenMask
    column: Tensor | None
    """The rank among the active tokens, or the width where inactive; None: all are in front."""
    full: bool = False
    """Every token is active, so there is nothing to move or to zero."""

    def compact(self, x: PerToken) -> PerToken:
        """Each row's active values moved to its front, zeros after them. May be x itself."""
        if self.full:
            return x
        if self.column is None:
            return torch.where(self.mask, x, 0.0)
        rows, width = x.shape
        return x.new_zeros(rows, width + 1).scatter_(1, self.column, x)[:, :width].contiguous()

    def expand(self, x: PerToken) -> PerToken:
        """The inverse of ``compact``, for an x that is zero past a row's active tokens."""
        if self.column is None:
            return x
        return torch.nn.functional.pad(x, (0, 1)).gather(1, self.column)


def layout(mask: TokenMask) -> Layout:
    """The layout of a mask (one host sync)."""
    # Bytes, since max over them is ten times faster than any() over bools.
    bytes_ = mask.view(torch.uint8)
    late = bytes_[:, 1:] > bytes_[:, :-1]  # an active token after an inactive one
    if not late.numel() or not int(late.view(torch.uint8).max()):
        return Layout(mask, None, full=mask.numel() == 0 or bool(bytes_.min()))
    rank = mask.cumsum(dim=1, dtype=torch.int32) - 1
    return Layout(mask, torch.where(mask, rank, mask.shape[1]).long())


def later(x: PerToken, mask: TokenMask) -> PerToken:
    """∑_{t'>t} xₜ' over the active tokens of the row."""
    from_here = torch.where(mask, x, 0.0).flip(1).cumsum(dim=1).flip(1)
    # Shifted, not subtracted: a large xₜ would leave its rounding error behind.
    return torch.nn.functional.pad(from_here, (0, 1))[:, 1:]


def place_on_last(scores: PerSequence, mask: TokenMask) -> PerToken:
    """The score on each row's last active token, zeros elsewhere; nothing on an empty row."""
    width = mask.shape[1]
    columns = torch.arange(1, width + 1, device=mask.device)
    last = (mask * columns).amax(dim=1, keepdim=True) if width else mask.sum(dim=1, keepdim=True)
    return torch.where(mask & (columns == last), scores[:, None], 0.0)
