"""The discounted sum yₜ = xₜ + decay · yₜ₊₁ without a loop over t.

In blocks: inside a block the sum is one multiplication with a triangular matrix of powers; the
blocks' first sums form the same recursion, K times shorter and with decayᴷ, which is solved the
same way. No power is ever divided by, so nothing overflows however long the row is.
"""

from functools import lru_cache

import torch
from torch import Tensor

from klamp.types import PerToken

BLOCK = 16
CHUNK_TOKENS = 1 << 18  # what is worked on at a time: it stays in the processor's cache


def discounted_sums(x: PerToken, decay: float, out: PerToken | None = None) -> PerToken:
    """yₜ = ∑_{s≥t} decay^{s−t} xₛ along each row, in x's precision whatever matmul's is set to."""
    if x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        sums = discounted_sums(x.double(), decay).float()
        return sums if out is None else out.copy_(sums)
    with torch.autocast(x.device.type, enabled=False):
        return _sums(x, decay, out)


def _sums(x: PerToken, decay: float, out: PerToken | None) -> PerToken:
    rows, length = x.shape
    if length <= BLOCK:
        return torch.mm(x, powers(length, decay, x.dtype, x.device), out=out)
    if length % BLOCK:
        padded = torch.nn.functional.pad(x, (0, BLOCK - length % BLOCK))
        sums = _sums(padded, decay, None)[:, :length]
        return sums if out is None else out.copy_(sums)
    out = x.new_empty(x.shape) if out is None else out
    block = powers(BLOCK, decay, x.dtype, x.device)
    torch.mm(x.reshape(-1, BLOCK), block, out=out.view(-1, BLOCK))
    inside = out.view(rows, -1, BLOCK)
    # Each place also gets the next block's first sum, times decay^{distance to it}.
    first = _sums(inside[:, :, 0].contiguous(), decay**BLOCK, None)
    inside[:, :-1].addcmul_(first[:, 1:, None], block[-1] * decay)
    return out


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
