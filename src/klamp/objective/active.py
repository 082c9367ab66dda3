"""Active tokens as a sequence of their own: the t-th active token, whatever column it is in.

Returns, advantages and sums to come run on the active tokens as if the others were not there, so
that tool output inside a response, or padding anywhere, changes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from klamp.objective.scan import Scratch, whole
from klamp.types import PerSequence, PerToken, TokenMask

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers as wide as a float of so many bytes."""


@dataclass(frozen=True)
class Layout:
    """Where each row's active tokens are, and how to bring them together. No gradient passes."""

    scratch: Scratch
    bits: Tensor | None = None
    """−1 where active, 0 elsewhere. None: every token is active."""
    column: Tensor | None = None
    """How many of the row's tokens up to here are active. None: these are all in front."""

    @property
    def full(self) -> bool:
        """Every token is active, so there is nothing to move or to zero."""
        return self.bits is None

    def zeroed(self, x: PerToken, out: PerToken | None = None) -> PerToken:
        """x where active, 0 elsewhere, whatever stands there; in scratch memory without an out.

        Where every token is active: x itself.
        """
        if self.bits is None:
            return x
        out = self.scratch.take("zeroed", x, x.shape[1]) if out is None else out
        # Bit by bit: where() branches at every token, and with holes the processor guesses wrong.
        integer = INTEGERS[x.element_size()]
        torch.bitwise_and(x.view(integer), self.bits, out=out.view(integer))
        return out

    def packed(self, zeroed: PerToken) -> Tensor:
        """The k-th active value of each row in column k, zeros elsewhere, in scratch memory.

        Where they are in front already: the given itself, from column 0 on.
        """
        if self.column is None:
            return zeroed
        # One column before the first token, and one after the last, which has one ahead of it too.
        packed = self.scratch.take("packed", zeroed, whole(zeroed.shape[1] + 2)).zero_()
        # Added, so that the zero of an inactive token takes nothing from the active one before it.
        return packed.scatter_add_(1, self.column, zeroed)

    def spread(self, packed: Tensor, out: PerToken, *, ahead: int = 0) -> PerToken:
        """At each active token its own packed value, or that of one ahead; elsewhere anything."""
        assert self.column is not None
        return torch.gather(packed[:, ahead:], 1, self.column, out=out)

    def compact(self, x: PerToken) -> PerToken:
        """Each row's active values moved to its front, zeros after them. May be x itself."""
        packed = self.packed(self.zeroed(x, out=torch.empty_like(x)))
        return packed if self.column is None else packed[:, 1 : x.shape[1] + 1].clone()

    def expand(self, x: PerToken) -> PerToken:
        """The inverse of ``compact``, for an x that is zero past a row's active tokens."""
        if self.column is None:
            return x
        spread = self.spread(torch.nn.functional.pad(x, (1, 0)), torch.empty_like(x))
        return self.zeroed(spread, out=spread)


def layout(mask: TokenMask, scratch: Scratch | None = None) -> Layout:
    """The layout of a mask (one host sync where it is full, else two)."""
    scratch = Scratch() if scratch is None else scratch
    # Bytes, since min and max over them are ten times faster than all() and any() over bools.
    bytes_, width = mask.view(torch.uint8), mask.shape[1]
    if not mask.numel() or int(bytes_.min()):
        return Layout(scratch)
    bits = scratch.take("bits", mask, width, torch.int32).copy_(mask.view(torch.int8)).neg_()
    late = bytes_[:, 1:] > bytes_[:, :-1]  # an active token after an inactive one
    if not late.numel() or not int(late.view(torch.uint8).max()):
        return Layout(scratch, bits)
    column = scratch.take("column", mask, width, torch.int64)
    return Layout(scratch, bits, torch.cumsum(mask, dim=1, out=column))


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
