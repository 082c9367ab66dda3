"""The discounted sum yₜ = xₜ + decay · yₜ₊₁ without a loop over t.

In blocks: the blocks' first sums form the same recursion, K times shorter and with decayᴷ, which is
solved the same way; each is then added to the last x of the block before it, and inside a block the
sum is one multiplication with a triangular matrix of powers. No power is ever divided by, so
nothing overflows however long the row is.
"""

from functools import lru_cache

import torch
from torch import Tensor

from klamp.types import PerToken

BLOCK = 16
DIRECT = 64
"""Rows up to this long are one multiplication: it costs less than what it would be cut into."""
CHUNK_TOKENS = 1 << 18  # what is worked on at a time: it stays in the processor's cache


def discounted_sums(
    x: PerToken, decay: float, out: PerToken | None = None, *, overwrite: bool = False
) -> PerToken:
    """yₜ = ∑_{s≥t} decay^{s−t} xₛ along each row, in x's precision whatever matmul's is set to.

    With ``overwrite``, x is left with something else in it, and a copy is saved.
    """
    if x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        sums = discounted_sums(x.double(), decay, overwrite=True).float()
        return sums if out is None else out.copy_(sums)
    own = x.contiguous() if overwrite else x.clone(memory_format=torch.contiguous_format)
    return _sums(own, decay, torch.empty_like(own) if out is None else out)


def _sums(x: Tensor, decay: float, out: Tensor) -> Tensor:
    # Every product names its result: autocast leaves those in the precision that they have.
    rows, length = x.shape
    if length <= DIRECT:
        return torch.mm(x, powers(length, decay, x.dtype, x.device), out=out)
    if length % BLOCK:
        padded = torch.nn.functional.pad(x, (0, -length % BLOCK))
        return out.copy_(_sums(padded, decay, torch.empty_like(padded))[:, :length])
    blocks, inside = x.view(-1, BLOCK), powers(BLOCK, decay, x.dtype, x.device)
    first, solved = x.new_empty(2, rows, length // BLOCK).unbind()
    torch.mv(blocks, inside[:, 0], out=first.view(-1))
    x[:, BLOCK - 1 : -1 : BLOCK].add_(_sums(first, decay**BLOCK, solved)[:, 1:], alpha=decay)
    torch.mm(blocks, inside, out=out.view(-1, BLOCK))
    return out


def whole(width: int) -> int:
    """The least width from this one on that is cut into blocks without padding."""
    return width if width <= DIRECT else BLOCK * whole(-(-width // BLOCK))


@lru_cache(maxsize=32)
def powers(size: int, decay: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """M[s, t] = decay^{s−t} for s ≥ t, else 0."""
    t = torch.arange(size, dtype=torch.float64)
    matrix = torch.pow(decay, (t[:, None] - t[None, :]).clamp(min=0)).tril()
    return matrix.to(device, dtype)


def row_chunks(x: PerToken) -> list[slice]:
    """Slices of whole rows, about ``CHUNK_TOKENS`` each."""
    step = max(1, CHUNK_TOKENS // max(1, x.shape[1]))
    return [slice(i, i + step) for i in range(0, len(x), step)]


class Scratch:
    """Memory by name, made once and used for one chunk after another.

    Fresh memory for each of them would cost its page faults, about as much as the work itself.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """As many rows of this width, with anything in them, until the name is taken again."""
        rows, held = like.shape[0], self._held.get(name)
        if held is None or held.shape[0] < rows or held.shape[1] != width:
            held = self._held[name] = like.new_empty(rows, width, dtype=dtype)
        return held if held.shape[0] == rows else held[:rows]
