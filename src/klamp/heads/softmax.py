"""The softmax over a vocabulary, put together from tiles, and its gradient taken apart again.

Of a tile only its own softmax p̂ₖ is ever made. Row by row, with topₖ its largest logit,

    lseₖ = topₖ + log ∑ e^{z − topₖ},   shareₖ = e^{lseₖ − lse},   p = shareₖ · p̂ₖ,

so a gradient that is linear in p is a product with p̂ₖ whose rows are scaled; no pass over the
tile is needed for it. Differences are taken to the tops, so that large logits cost no precision.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from klamp.heads.tiles import PerRow, Tile
from klamp.objective.logratio import LARGEST

Statistics = Float[Tensor, "F K N"]
PerTile = Float[Tensor, "K N"]
OWN, WITH_REFERENCE = 3, 6
"""How many numbers are kept per row and tile."""


class Softmax(NamedTuple):
    """What is known of each row once all its tiles were seen."""

    logprobs: PerRow
    entropy: PerRow
    kl: PerRow | None
    shares: PerTile
    """∑ p over the tile."""
    tops: PerTile
    """log p of the tile's largest logit."""
    gaps: PerTile | None
    """log p − log q of what is 0 in both tiles once their tops are taken off."""

    def at(self, rows: slice | Tensor) -> "Softmax":
        """The same of some rows."""
        return _mapped(lambda x: x[..., rows], self)


def joined(parts: list[Softmax]) -> Softmax:
    """The rows of several blocks that have the same columns."""
    return _mapped(lambda *x: torch.cat(x, dim=-1), *parts)


def _mapped(change: Callable[..., Tensor], *parts: Softmax) -> Softmax:
    first, fields = parts[0], list(zip(*parts, strict=True))
    made: list[Any] = [None if x[0] is None else change(*x) for x in fields]
    return first._make(made)


class Slopes(NamedTuple):
    """d loss / d log-prob, entropy and KL of each row; None: 0 everywhere."""

    logprobs: PerRow | None
    entropy: PerRow | None = None
    kl: PerRow | None = None


def own_softmax(z: Tile, p: Tile) -> PerRow:
    """p ← p̂ and z ← z − top; the tops."""
    top = z.amax(dim=-1)
    torch.softmax(z, dim=-1, out=p)
    z.sub_(top[:, None])
    return top


def measured(top: PerRow, x: Tile, p: Tile, room: Tile) -> list[PerRow]:
    """top, log ∑ eˣ (the largest p̂ is 1 / ∑ eˣ) and ∑ p̂ x, with x = z − top."""
    return [top, -p.amax(dim=-1).log(), torch.mul(p, x, out=room).sum(dim=-1)]


def compared(x: Tile, p: Tile, ref: Tile, room: Tile) -> list[PerRow]:
    """The reference's top and log ∑ eˣ, and ∑ p̂ d; ref ← d = x − x_ref."""
    top = own_softmax(ref, room)
    size = -room.amax(dim=-1).log()
    torch.sub(x, ref, out=ref)
    return [top, size, torch.mul(p, ref, out=room).sum(dim=-1)]


def combined(statistics: Statistics, label: PerRow) -> Softmax:
    """Log-prob, entropy and KL of each row from the numbers of its tiles.

    H = −∑ₖ shareₖ (∑ p̂ₖ x + topₖ − lse), KL = ∑ₖ shareₖ (∑ p̂ₖ d + gapₖ).
    """
    top, size, mean = statistics[:OWN]
    highest = top.amax(dim=0)
    log_size = (top - highest + size).logsumexp(dim=0)
    tops = top - highest - log_size
    shares = (tops + size).exp()
    entropy = -(shares * (mean + tops)).sum(dim=0)
    logprobs = label - highest - log_size
    if len(statistics) == OWN:
        return Softmax(logprobs, entropy, None, shares, tops, None)
    ref_top, ref_size, drift = statistics[OWN:]
    ref_highest = ref_top.amax(dim=0)
    ref_log_size = (ref_top - ref_highest + ref_size).logsumexp(dim=0)
    gaps = tops - (ref_top - ref_highest - ref_log_size)
    kl = (shares * (drift + gaps)).sum(dim=0).clamp(-LARGEST, LARGEST)
    return Softmax(logprobs, entropy, kl, shares, tops, gaps)


class Slope(NamedTuple):
    """d loss / dz of one tile, less what falls on the labels: rows of a matrix, each scaled."""

    matrix: Tile
    scale: PerRow


def slope(p: Tile, x: Tile, d: Tile | None, k: int, found: Softmax, slopes: Slopes) -> Slope:
    """p ∘ (−g − e (log p + H) + k (log p − log q − KL)), made in place of what it is made from."""
    g = torch.zeros_like(found.entropy) if slopes.logprobs is None else slopes.logprobs
    scale = found.shares[k]
    if slopes.entropy is None and slopes.kl is None:
        return Slope(p, -g * scale)
    constant = -g
    factor: Tensor | None = None
    if slopes.entropy is not None:
        constant = constant - slopes.entropy * (found.tops[k] + found.entropy)
        factor = x.mul_(-slopes.entropy[:, None])
    if slopes.kl is not None:
        assert d is not None and found.gaps is not None and found.kl is not None
        constant = constant + slopes.kl * (found.gaps[k] - found.kl)
        d.mul_(slopes.kl[:, None])
        factor = d if factor is None else factor.add_(d)
    assert factor is not None
    return Slope(p.mul_(factor.add_(constant[:, None])), scale)
